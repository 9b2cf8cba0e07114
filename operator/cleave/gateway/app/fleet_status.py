"""The response of `GET /fleet`: every instance that this gateway watches. Used by the handlers."""

import math
from collections.abc import Iterable, Mapping
from itertools import islice

import msgspec

from cleave.gateway.context import GatewayContext
from cleave.gateway.metrics.pair_summary import PairSummary, find_partners, summarize_pairs
from cleave.perf.model.model_report import MAX_LENGTH as _MAX_REPORT_LENGTH
from cleave.router.instance import RoutedInstance
from cleave.rpc import fleet_status
from cleave.rpc.enum_names import get_enum_name
from cleave.rpc.fleet_status import (
    MAX_CLOSED,
    MAX_INSTANCES,
    MAX_REPORT_BRACES,
    MAX_REPORTS,
    CacheHits,
    FleetStatus,
    KvPairs,
    KvPath,
)
from cleave.rpc.v1 import agent_pb2
from cleave.time_slices import Steps

_TEXT_LIMIT = 300
"""Characters of a reason or detail."""
_DIGEST_LIMIT = 64
_UNUSABLE = "unusable"
"""In place of the digest of a report that is not sent."""
_WEIGHTS_FAULT_LIMIT = 120
"""Characters; every instance may have it."""
_MAX_ADAPTER_FAULTS = 16
"""Instances in one response that say why an adapter is not loaded."""


class _DigestOfReport(msgspec.Struct, frozen=True, rename="camel"):
    """The part of an engine's report that gateways read."""

    config_digest: str = ""


def describe_fleet(context: GatewayContext) -> Steps[list[bytes]]:
    """The current instances, sorted by name, as JSON of `FleetStatus` in pieces."""
    registry, now = context.router.registry, context.clock()
    instances = {name: registry.instances[name] for name in sorted(registry.instances)}
    left_out = max(len(instances) - MAX_INSTANCES, 0)
    pairs: dict[str, KvPairs] = {}
    for table in registry.list_tables():
        prefills, decodes = yield from find_partners(table)
        for decode in decodes:
            pairs[decode.name] = _describe_pairs(summarize_pairs(prefills, decode), now)
            yield
    digests = yield from _read_digests(islice(instances.values(), MAX_INSTANCES))
    reporters = _choose_reporters(instances, digests)
    num_faults = 0
    described: list[bytes] = []
    for name, instance in islice(instances.items(), MAX_INSTANCES):
        yield
        fault = _find_adapter_fault(instance) if num_faults < _MAX_ADAPTER_FAULTS else ""
        num_faults += bool(fault)
        status = msgspec.structs.replace(
            _describe_instance(instance, pairs.get(name, KvPairs()), now),
            model_report=instance.registration.model_report if name in reporters else "",
            model_digest=digests.get(name, ""),
            adapter_fault=fault,
        )
        described.append(msgspec.json.encode(status))
    frame = msgspec.json.encode(FleetStatus(left_out=left_out, draining=context.draining))
    before, after = frame.split(b"[]", 1)
    return [before + b"[", b",".join(described), b"]" + after]


def _read_digests(instances: Iterable[RoutedInstance]) -> Steps[dict[str, str]]:
    """The digest in the report of each ready instance that has a report; empty: it has none."""
    by_report: dict[str, str] = {}
    digests: dict[str, str] = {}
    for instance in instances:
        registration = instance.registration
        report = registration.model_report
        if registration.state != agent_pb2.STATE_READY or not report:
            continue
        if report not in by_report:
            yield
            by_report[report] = _decode_digest(report) if _is_usable(report) else _UNUSABLE
        if (digest := by_report[report]) is not _UNUSABLE:
            digests[instance.name] = digest
    return digests


def _decode_digest(report: str) -> str:
    try:
        found = msgspec.json.decode(report, type=_DigestOfReport)
    except (msgspec.DecodeError, RecursionError):
        return ""
    return found.config_digest[:_DIGEST_LIMIT]


def _choose_reporters(
    instances: Mapping[str, RoutedInstance], digests: Mapping[str, str]
) -> set[str]:
    """The first instance of each revision, then of each further config.json in it; a few."""
    first: dict[str, str] = {}
    others: dict[tuple[str, str], str] = {}
    for name, digest in digests.items():
        revision = instances[name].registration.revision
        is_other = first.setdefault(revision, name) != name and digest != digests[first[revision]]
        if is_other:
            others.setdefault((revision, digest), name)
    return {*[*first.values(), *others.values()][:MAX_REPORTS]}


def _is_usable(report: str) -> bool:
    """Whether the report is within the bounds above which the operator refuses the response."""
    return 0 < len(report) <= _MAX_REPORT_LENGTH and report.count("{") <= MAX_REPORT_BRACES


def _describe_pairs(summary: PairSummary, now: float) -> KvPairs:
    slowest, closed = summary.find_slowest(), summary.closed
    return KvPairs(
        total=summary.total,
        proven=len(summary.proven),
        closed=tuple(sorted(each.prefill for each in closed)[:MAX_CLOSED]),
        num_closed=len(closed),
        oldest_s=round(summary.get_oldest_age_s(now), 1),
        bytes_per_s=_to_finite(slowest.bytes_per_s) if slowest else 0.0,
        pull_ms=_to_finite(slowest.pull_ms) if slowest else 0.0,
        reason=closed[0].reason[:_TEXT_LIMIT] if closed else "",
    )


def _describe_instance(
    instance: RoutedInstance, pairs: KvPairs, now: float
) -> fleet_status.FleetInstance:
    registration, load, in_flight = instance.registration, instance.load, instance.in_flight
    return fleet_status.FleetInstance(
        name=instance.name,
        deployment=registration.deployment,
        model=registration.model,
        revision=registration.revision,
        role=get_enum_name(agent_pb2.Role, registration.role),
        home=get_enum_name(agent_pb2.Role, registration.home or registration.role),
        state=get_enum_name(agent_pb2.State, registration.state),
        epoch=registration.epoch,
        contact=instance.connectivity.value,
        selectable=instance.selectable,
        reason=registration.reason[:_TEXT_LIMIT],
        restarts=registration.restarts,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        pending_tokens=int(in_flight.prompt.pending + in_flight.resident.pending),
        kv_cache_usage=_to_finite(load.kv_cache_usage),
        requests_in_flight=in_flight.count_requests(),
        report_age_s=round(max(now - instance.last_event_at, 0.0), 3),
        kv_path=KvPath(
            verified=registration.kv_path.verified,
            transport=registration.kv_path.transport,
            transfer_ms=_to_finite(registration.kv_path.transfer_ms),
            bytes_per_s=_to_finite(registration.kv_path.bytes_per_s),
            detail=registration.kv_path.detail[:_TEXT_LIMIT],
            pull_ms=_to_finite(registration.kv_path.pull_ms),
        ),
        kv_pairs=pairs,
        weights=registration.weights[:_DIGEST_LIMIT],
        weights_read_s=registration.weights_read_ms / 1000,
        weights_fault=registration.weights_fault[:_WEIGHTS_FAULT_LIMIT],
        adapters_digest=registration.adapters_digest[:_DIGEST_LIMIT],
        adapters_pending=sum(not each.loaded for each in registration.runtime_adapters),
        cache_hits=CacheHits(instance.hits.predicted_share, instance.hits.engine_share),
    )


def _find_adapter_fault(instance: RoutedInstance) -> str:
    """Why the first adapter that failed is not loaded, with its name; empty: none failed."""
    adapters = instance.registration.runtime_adapters
    faults = (f"{e.name}: {e.fault}" for e in adapters if e.fault and not e.loaded)
    return next(faults, "")[:_TEXT_LIMIT]


def _to_finite(value: float) -> float:
    """JSON has no infinity or NaN: msgspec writes `null`, which the operator could not read."""
    return value if math.isfinite(value) else 0.0
