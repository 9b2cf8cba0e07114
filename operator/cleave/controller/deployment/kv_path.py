"""What KV self-tests and canary handoffs show: conditions of an LLMDeployment, and the rate in
cells that its next plan counts on. Pure.

Called for its status and its plans. An agent tests once per start of its engine, with one peer; the
gateway's witness tests all pairs again and again. KV that silently takes another link than planned
(TCP instead of RDMA) returns the right tokens and passes the tests; only its rate shows it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cleave.api.cluster import ASSUMED_NETWORK, Cluster
from cleave.api.pool import InstancePool
from cleave.api.role import Role
from cleave.controller.cluster.conditions import ConditionState
from cleave.controller.cluster.gateway_client import summarize_kv_paths
from cleave.controller.views import DeploymentView, Pools
from cleave.manifests.labels import Manifest
from cleave.perf.hardware.link import LinkKind
from cleave.rpc.fleet_status import FleetInstance

KV_PATH_VERIFIED, KV_RATE_AS_PLANNED = "KVPathVerified", "KVRateAsPlanned"
KV_PATH_PROVEN = "KVPathProven"
"""Condition types."""
_BITS_PER_BYTE = 8
_STALE_S = 600.0
"""Age from which a proof says nothing about the present."""
_LEAST_SHARE = 0.25
"""Least share of the planned rate. The two instances of a pair test at the same time, so each
may measure half of their link. TCP over 25 Gbit/s has a sixteenth of RDMA over 200."""
_LEAST_LOSS_MS = 20.0
"""Least time by which a test was slower than planned. On a fast link a test takes about as long as
its fixed costs, which say nothing about the rate; and TCP in place of RDMA loses more than this
with each 80 MB, at 25 and 200 Gbit/s."""
_REMEDY_IN_CELLS = (
    "its engines may not reach each other's GPU memory by CUDA IPC: their logs say why (connector "
    "Nixl: with UCX_LOG_LEVEL=info in spec.engine.env); or set spec.planning.affinity High for a "
    "plan without cells"
)
_REMEDY = (
    "check the RDMA devices, the network interfaces and the limit of locked memory of its pod, "
    "and delete it to test again; or set planning.network of the operator's chart to the rate "
    "that the nodes have, for another plan"
)


def build_conditions(
    view: DeploymentView, desired: Pools, plan: Manifest | None
) -> tuple[ConditionState, ConditionState, ConditionState]:
    """Whether KV paths were tested, are as fast as `plan` (status.plan) assumes, and are proven
    again and again."""
    if not desired:
        return _build_all(None, "NoInstances", "")
    has_handoffs = Role.PREFILL in desired or any(pool.spec.members for pool in desired.values())
    if not has_handoffs:
        return _build_all(True, "NotNeeded", "no KV is transferred")
    ready = {pod.name for pod in view.pods if pod.ready and not pod.deleting}
    reported = [each for name, each in (view.instances or {}).items() if name in ready]
    if not reported:
        return _build_all(None, "NotReported", "no gateway has reported instances yet")
    paths = summarize_kv_paths(reported)
    is_verified = paths.verified == paths.total
    reason = "Verified" if is_verified else "NotVerified"
    verified = ConditionState(KV_PATH_VERIFIED, is_verified, reason, paths.message)
    is_on = view.deployment.spec.witness.engine_share > 0
    return verified, _compare_rate(reported, plan or {}), _build_proven(reported, is_on)


def _build_proven(instances: Sequence[FleetInstance], is_on: bool) -> ConditionState:
    """Whether the newest canary handoff of every pair was good."""
    if not is_on:
        text = "spec.witness.engineShare is 0: no canary handoffs"
        return ConditionState(KV_PATH_PROVEN, None, "Off", text)
    decodes = [each for each in instances if each.kv_pairs.total]
    if not decodes:
        text = "no pair of a prefill and a decode instance is reported"
        return ConditionState(KV_PATH_PROVEN, None, "NotReported", text)
    pairs = [each.kv_pairs for each in decodes]
    total, proven = sum(each.total for each in pairs), sum(each.proven for each in pairs)
    oldest_s = max(each.oldest_s for each in pairs)
    rates = [each.bytes_per_s for each in pairs if each.bytes_per_s > 0]
    text = f"{proven} of {total} pairs proven"
    text += f", oldest {oldest_s:.0f} s" if proven else ""
    text += f", {min(rates) / 1e9:.3g} GB/s at least" if rates else ""
    if num_closed := sum(each.num_closed for each in pairs):
        text = f"{text}; {num_closed} not used{_describe_closed(decodes)}"
        return ConditionState(KV_PATH_PROVEN, False, "PairsFailed", text)
    if proven < total:
        return ConditionState(KV_PATH_PROVEN, None, "NotProven", text)
    if oldest_s > _STALE_S:
        return ConditionState(KV_PATH_PROVEN, None, "Stale", text)
    return ConditionState(KV_PATH_PROVEN, True, "Proven", text)


def _describe_closed(decodes: Sequence[FleetInstance]) -> str:
    """The instances all of whose pairs are closed, and the first fault."""
    bad = [each.name for each in decodes if each.kv_pairs.num_closed >= each.kv_pairs.total]
    prefills = set.intersection(*(set(each.kv_pairs.closed) for each in decodes))
    names = ", ".join([*sorted(prefills), *sorted(bad)][:8])
    text = f", among them all of {names}" if names else ""
    first = next(each.kv_pairs.reason for each in decodes if each.kv_pairs.num_closed)
    return f"{text}: {first}" if first else text


@dataclass(frozen=True, slots=True)
class _MeasuredRate:
    """The rate of one instance in its self-test, or of its slowest pair in canary handoffs."""

    instance: str
    gb_per_s: float
    pull_ms: float
    how: str

    def compute_lost_ms(self, planned_gb_per_s: float) -> float:
        """Time by which it was slower than planned."""
        return self.pull_ms * (1 - self.gb_per_s / planned_gb_per_s)


def _list_rates(instances: Sequence[FleetInstance]) -> list[_MeasuredRate]:
    """All rates, the slowest first."""
    rates = []
    for each in instances:
        path, pairs = each.kv_path, each.kv_pairs
        if path.verified and path.bytes_per_s > 0:
            gb_per_s = path.bytes_per_s / 1e9
            rates.append(_MeasuredRate(each.name, gb_per_s, path.pull_ms, path.transport))
        if pairs.bytes_per_s > 0:
            gb_per_s = pairs.bytes_per_s / 1e9
            rates.append(_MeasuredRate(each.name, gb_per_s, pairs.pull_ms, "canary handoffs"))
    return sorted(rates, key=lambda rate: (rate.gb_per_s, rate.instance))


def with_measured_cells(
    cluster: Cluster, resources: Iterable[object], reported: Mapping[str, FleetInstance] | None
) -> Cluster:
    """The cluster with the rate of KV between engines of one pod that the deployment's own cells
    have shown, that of the slowest; a rate in the operator's settings stays. `resources`: its
    pools."""
    network = cluster.network or ASSUMED_NETWORK
    has_cells = any(isinstance(pool, InstancePool) and pool.spec.members for pool in resources)
    rates = _list_rates([*(reported or {}).values()]) if has_cells else []
    if not rates or network.cell_bandwidth_gbps is not None:
        return cluster
    seen_gbps = rates[0].gb_per_s * _BITS_PER_BYTE
    changed = network.model_copy(update={"cell_bandwidth_gbps": seen_gbps})
    return cluster.model_copy(update={"network": changed})


def _compare_rate(instances: Sequence[FleetInstance], plan: Manifest) -> ConditionState:
    link = (plan.get("predicted") or {}).get("kvLink") or plan.get("kvLink")
    if link is None:
        text = "neither a plan nor known GPUs of the nodes say at which rate KV should arrive"
        return ConditionState(KV_RATE_AS_PLANNED, None, "NotPlanned", text)
    rates, planned = _list_rates(instances), link["gbPerS"]
    if not rates:
        text = "no engine has reported the duration of a transfer"
        return ConditionState(KV_RATE_AS_PLANNED, None, "NotMeasured", text)
    low = [each for each in rates if each.gb_per_s < _LEAST_SHARE * planned]
    below = [each for each in low if each.compute_lost_ms(planned) >= _LEAST_LOSS_MS]
    slowest = (below or rates)[0]
    text = (
        f"{slowest.instance} measured {slowest.gb_per_s:.3g} GB/s per GPU ({slowest.how}), "
        f"the plan assumes {planned:.3g} GB/s ({link['kind']})"
    )
    if not low:
        return ConditionState(KV_RATE_AS_PLANNED, True, "AsPlanned", text)
    if not below:
        text = f"{text}, but the test took {slowest.pull_ms:.3g} ms: too short for a rate"
        return ConditionState(KV_RATE_AS_PLANNED, None, "NotMeasured", text)
    remedy = _REMEDY_IN_CELLS if link["kind"] == LinkKind.NVLINK else _REMEDY
    return ConditionState(KV_RATE_AS_PLANNED, False, "BelowPlan", f"{text}; {remedy}")


def _build_all(
    status: bool | None, reason: str, message: str
) -> tuple[ConditionState, ConditionState, ConditionState]:
    return (
        ConditionState(KV_PATH_VERIFIED, status, reason, message),
        ConditionState(KV_RATE_AS_PLANNED, status, reason, message),
        ConditionState(KV_PATH_PROVEN, status, reason, message),
    )
