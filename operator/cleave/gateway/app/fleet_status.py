"""The response of `GET /fleet`: every instance that this gateway watches. Used by the handlers."""

import math
from collections.abc import Iterable, Mapping
from itertools import islice

import msgspec

from cleave.gateway.context import GatewayContext
from cleave.perf.model.model_report import MAX_LENGTH as _MAX_REPORT_LENGTH
from cleave.router.instance import RoutedInstance
from cleave.router.pair_summary import PairSummary, summarize_pairs
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

_TEXT_LIMIT = 300
"""Characters of a reason or detail."""
_DIGEST_LIMIT = 64
_MAX_ADAPTER_FAULTS = 16
"""Instances in one response that say why an adapter is not loaded."""


class _DigestOfReport(msgspec.Struct, frozen=True, rename="camel"):
    """The part of an engine's report that gateways read."""

    config_digest: str = ""


def describe_fleet(context: GatewayContext) -> FleetStatus:
    """The current instances, sorted by name."""
    registry, now = context.router.registry, context.clock()
    instances = registry.instances
    pairs = {
        decode.name: _describe_pairs(summary, now)
        for table in registry.list_tables()
        for decode, summary in summarize_pairs(table)
    }
    names = sorted(instances)[:MAX_INSTANCES]
    digests = _read_digests(instances[name] for name in names)
    reporters = _choose_reporters(instances, digests)
    faults = (name for name in names if _find_adapter_fault(instances[name]))
    failing = {*islice(faults, _MAX_ADAPTER_FAULTS)}
    return FleetStatus(
        instances=tuple(
            msgspec.structs.replace(
                _describe_instance(instances[n], pairs.get(n, KvPairs()), now),
                model_report=instances[n].registration.model_report if n in reporters else "",
                model_digest=digests.get(n, ""),
                adapter_fault=_find_adapter_fault(instances[n]) if n in failing else "",
            )
            for n in names
        ),
        left_out=max(len(instances) - MAX_INSTANCES, 0),
        draining=context.draining,
    )


def _read_digests(instances: Iterable[RoutedInstance]) -> dict[str, str]:
    """The digest in the report of each ready instance that has a report; empty: it has none."""
    by_report: dict[str, str] = {}
    digests: dict[str, str] = {}
    for instance in instances:
        registration = instance.registration
        report = registration.model_report
        if registration.state != agent_pb2.STATE_READY or not _is_usable(report):
            continue
        if report not in by_report:
            by_report[report] = _decode_digest(report)
        digests[instance.name] = by_report[report]
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
