"""Lowers the instances of a deployment while others need the GPUs that it lends. Pure.

Called by the deployment's reconcile. The plan stays: when the GPUs come back, so do its instances.
"""

from collections.abc import Sequence

from cleave.api.pool import InstancePool
from cleave.controller.cluster import conditions
from cleave.controller.cluster.conditions import ConditionState
from cleave.controller.cluster.gpu_lending import GpuRoom, fit_pools
from cleave.manifests.labels import Manifest
from cleave.manifests.resources import Device, count_pod_gpus

_SCALING_LIMITED = "ScalingLimited"
_GPUS_LENT = "GPUsLent"
"""Reason of ScalingLimited."""
_MAX_NAMES = 2


def is_lending(status: Manifest) -> bool:
    """Whether a deployment with this status has fewer instances than its plan because of that."""
    limited = conditions.find(status, _SCALING_LIMITED)
    return limited is not None and limited["reason"] == _GPUS_LENT


def limit_pools(
    desired: Sequence[InstancePool], room: GpuRoom | None, device: Device
) -> tuple[list[InstancePool], ConditionState | None]:
    """Return the pools with the replicas that there is room for, and the condition where these are
    fewer. `room`: None: the deployment does not lend, or nothing needs its GPUs."""
    if room is None:
        return list(desired), None
    fitting = fit_pools(desired, room, device)
    limited, num_lent, num_total = list[InstancePool](), 0, 0
    for pool in desired:
        replicas, gpus = pool.spec.replicas, count_pod_gpus(pool.spec, device) * pool.spec.nodes
        fits = fitting.get(pool.name, replicas)
        num_lent += (replicas - fits) * gpus
        num_total += replicas * gpus
        if fits < replicas:
            spec = pool.spec.model_copy(update={"replicas": fits})
            pool = pool.model_copy(update={"spec": spec})
        limited.append(pool)
    if not num_lent:
        return limited, None
    text = f"lends {num_lent} of {num_total} GPUs to {_list_names(room.borrowers)}"
    return limited, ConditionState(_SCALING_LIMITED, True, _GPUS_LENT, text)


def _list_names(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
