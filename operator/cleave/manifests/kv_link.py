"""The link over which a placement that was not planned transfers KV, from the nodes alone. Pure.

Called by the operator for the status and by `cleave validate`. A plan knows its link
(`cleave.planner.search.candidate_placement`), whose rules these are: KV takes the network between
pods, also on one node, except inside a cell that is one pod.
"""

from functools import reduce

from cleave.api.cluster import Cluster
from cleave.api.engine import EngineType
from cleave.api.manifest import ManifestError
from cleave.api.role import Role
from cleave.manifests.topology import NodeTopology, fits_one_pod
from cleave.perf.hardware import inventory
from cleave.perf.hardware.gpu import Gpu, UnknownGpuError, find_gpu
from cleave.perf.hardware.kv_transfer import build_kv_transfer
from cleave.perf.hardware.link import Link, select_slower
from cleave.perf.model.model_shape import ModelShape
from cleave.planner.placement import Placement
from cleave.planner.plan import PlannedKvLink, PlannedPool
from cleave.planner.resolved_deployment import ResolvedDeployment
from cleave.planner.search.affinity import SHARE_OF_TTFT


def find_kv_link(
    resolved: ResolvedDeployment, placement: Placement, cluster: Cluster, machines: NodeTopology
) -> PlannedKvLink | None:
    """The link and its rate; None: no KV is transferred, engines are emulated, or a GPU is not
    known. `machines`: of the same nodes as `cluster`."""
    link = _select_link(resolved, placement, cluster, machines)
    if link is None:
        return None
    sent, received = (
        max(pool.parallelism.gpus_per_engine for pool in pools) for pools in _split(placement)
    )
    # Where a decode instance has more GPUs than a prefill instance, several receive from one.
    return PlannedKvLink(link.kind, link.effective_gb_per_s * min(1.0, sent / received))


def explain_slow_link(
    resolved: ResolvedDeployment,
    placement: Placement,
    cluster: Cluster,
    machines: NodeTopology,
    shape: ModelShape,
    prompt_tokens: float,
) -> str | None:
    """Why the KV of a mean prompt takes longer than a plan would accept; None: it does not."""
    link = _select_link(resolved, placement, cluster, machines)
    if link is None:
        return None
    prefill, decode = (
        (pools[0].parallelism.tensor, pools[0].parallelism.pipeline) for pools in _split(placement)
    )
    moved = build_kv_transfer(shape, link, prefill, decode, 0.0)
    moved_ms = moved.compute_serialized_ms(prompt_tokens)
    share = moved_ms / resolved.spec.slo.ttft_ms
    if share <= SHARE_OF_TTFT:
        return None
    return (
        f"the KV of a mean prompt ({prompt_tokens:,.0f} tokens) takes {moved_ms:,.3g} ms over "
        f"{link.kind}: {share:.0%} of spec.slo.ttftMs, where a plan accepts {SHARE_OF_TTFT:.0%}; "
        "use mixed instances, cells that are one pod (perCell, GPUs with NVLink), or a "
        "faster network"
    )


def _split(placement: Placement) -> tuple[list[PlannedPool], list[PlannedPool]]:
    """The pools that send KV, and those that receive it."""
    prefill = [pool for pool in placement.pools if pool.role is Role.PREFILL]
    return prefill, [pool for pool in placement.pools if pool.role is not Role.PREFILL]


def _select_link(
    resolved: ResolvedDeployment, placement: Placement, cluster: Cluster, machines: NodeTopology
) -> Link | None:
    spec = resolved.deployment.spec
    if spec.engine.type is EngineType.EMULATED or not all(_split(placement)):
        return None
    try:
        gpus = _list_gpus(placement, cluster)
    except (ManifestError, UnknownGpuError):
        return None
    is_one_pod = spec.can_share_gpu_memory and fits_one_pod(placement.pools, machines)
    if is_one_pod and (within := inventory.find_cell_link(cluster, gpus[0])):
        return within
    return reduce(select_slower, (inventory.find_network_link(cluster, gpu) for gpu in gpus))


def _list_gpus(placement: Placement, cluster: Cluster) -> list[Gpu]:
    """The kinds of GPU of a placement; all of the nodes where a pool names none."""
    known = inventory.list_gpus(cluster)
    own = [inventory.to_gpu(description) for description in cluster.gpus]
    named = [find_gpu(pool.gpu, own) for pool in placement.pools if pool.gpu]
    return named if len(named) == len(placement.pools) else list(known.values())
