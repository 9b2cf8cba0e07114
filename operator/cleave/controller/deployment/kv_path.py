"""What the KV self-tests of the instances say: conditions of an LLMDeployment. Pure.

Called for its status. An agent tests once per start of its engine, so a condition changes when
instances start. KV that silently takes another link than planned (TCP instead of RDMA) returns the
right tokens and passes the test; only its rate shows it.
"""

from collections.abc import Sequence

from cleave.api.role import Role
from cleave.controller.cluster.conditions import ConditionState
from cleave.controller.cluster.gateway_client import find_slowest_kv_path, summarize_kv_paths
from cleave.controller.views import DeploymentView, Pools
from cleave.manifests.labels import Manifest
from cleave.perf.hardware.link import LinkKind
from cleave.rpc.fleet_status import FleetInstance

KV_PATH_VERIFIED, KV_RATE_AS_PLANNED = "KVPathVerified", "KVRateAsPlanned"
"""Condition types."""
_LEAST_SHARE = 0.25
"""Least share of the planned rate. The two instances of a pair test at the same time, so each
may measure half of their link. TCP over 25 Gbit/s has a sixteenth of RDMA over 200."""
_LEAST_LOSS_MS = 20.0
"""Least time by which a test was slower than planned. On a fast link a test takes about as long as
its fixed costs, which say nothing about the rate; and TCP in place of RDMA loses more than this
with each 80 MB, at 25 and 200 Gbit/s."""
_REMEDY_IN_CELLS = (
    "its engines may not reach each other's GPU memory by CUDA IPC: with UCX_LOG_LEVEL=info in "
    "spec.engine.env their logs name the transport; or set spec.planning.affinity High for a plan "
    "without cells"
)
_REMEDY = (
    "check the RDMA devices, the network interfaces and the limit of locked memory of its pod, "
    "and delete it to test again; or set planning.network of the operator's chart to the rate "
    "that the nodes have, for another plan"
)


def build_conditions(
    view: DeploymentView, desired: Pools, plan: Manifest | None
) -> tuple[ConditionState, ConditionState]:
    """Whether KV paths were tested, and are as fast as `plan` (status.plan) assumes."""
    if not desired:
        return _build_both(None, "NoInstances", "")
    has_handoffs = Role.PREFILL in desired or any(pool.spec.members for pool in desired.values())
    if not has_handoffs:
        return _build_both(True, "NotNeeded", "no KV is transferred")
    ready = {pod.name for pod in view.pods if pod.ready and not pod.deleting}
    reported = [each for name, each in (view.instances or {}).items() if name in ready]
    if not reported:
        return _build_both(None, "NotReported", "no gateway has reported instances yet")
    paths = summarize_kv_paths(reported)
    is_verified = paths.verified == paths.total
    reason = "Verified" if is_verified else "NotVerified"
    verified = ConditionState(KV_PATH_VERIFIED, is_verified, reason, paths.message)
    return verified, _compare_rate(reported, plan or {})


def _compare_rate(instances: Sequence[FleetInstance], plan: Manifest) -> ConditionState:
    link = (plan.get("predicted") or {}).get("kvLink")
    if link is None:
        text = "the placement was not planned, or its plan has no rate"
        return ConditionState(KV_RATE_AS_PLANNED, None, "NotPlanned", text)
    slowest = find_slowest_kv_path(instances)
    if slowest is None:
        text = "no engine has reported the duration of a transfer"
        return ConditionState(KV_RATE_AS_PLANNED, None, "NotMeasured", text)
    measured = slowest.kv_path.bytes_per_s / 1e9
    text = (
        f"{slowest.name} measured {measured:.3g} GB/s per GPU ({slowest.kv_path.transport}), "
        f"the plan assumes {link['gbPerS']:.3g} GB/s ({link['kind']})"
    )
    if measured >= _LEAST_SHARE * link["gbPerS"]:
        return ConditionState(KV_RATE_AS_PLANNED, True, "AsPlanned", text)
    lost_ms = slowest.kv_path.pull_ms * (1 - measured / link["gbPerS"])
    if lost_ms < _LEAST_LOSS_MS:
        text = f"{text}, but the test took {slowest.kv_path.pull_ms:.3g} ms: too short for a rate"
        return ConditionState(KV_RATE_AS_PLANNED, None, "NotMeasured", text)
    remedy = _REMEDY_IN_CELLS if link["kind"] == LinkKind.NVLINK else _REMEDY
    return ConditionState(KV_RATE_AS_PLANNED, False, "BelowPlan", f"{text}; {remedy}")


def _build_both(
    status: bool | None, reason: str, message: str
) -> tuple[ConditionState, ConditionState]:
    return (
        ConditionState(KV_PATH_VERIFIED, status, reason, message),
        ConditionState(KV_RATE_AS_PLANNED, status, reason, message),
    )
