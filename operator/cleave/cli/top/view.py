"""The state that `cleave top` shows after each poll of a gateway, also as JSON. Pure."""

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from cleave.rpc.fleet_status import FleetInstance, FleetStatus
from cleave.traffic.counters import CounterHistory, GatewayCounters, TrafficRates, compute_rates

NOW_S = 5.0
MINUTE_S = 60.0
_MAX_CHANGES = 5


@dataclass(frozen=True, slots=True)
class ObservedRoleChange:
    """A change of an instance's role between two polls."""

    at: float
    """Unix time."""
    instance: str
    before: str
    role: str


@dataclass(frozen=True, slots=True)
class TopView:
    """The result of one poll."""

    at: float
    """Unix time."""
    fleet: FleetStatus
    counts: GatewayCounters
    now: TrafficRates | None
    """Traffic of the last `NOW_S` seconds; None until the second poll."""
    minute: TrafficRates | None
    """Traffic of the last `MINUTE_S` seconds, or since the first poll."""
    total: TrafficRates | None
    """Traffic since the gateway started; None where its clock is ahead of this machine's."""
    changes: tuple[ObservedRoleChange, ...]
    """The last changes of roles, newest first."""
    fault: str = ""
    """Why later polls failed; empty: the last poll succeeded."""

    @property
    def deployments(self) -> list[str]:
        """Names of the deployments that the instances belong to; usually one."""
        return sorted({each.deployment for each in self.fleet.instances})

    @property
    def models(self) -> list[str]:
        """Models that the instances serve; usually one."""
        return sorted({each.model for each in self.fleet.instances})


class ViewBuilder:
    """Builds views from polls; keeps the history for windows and the last changes of roles."""

    def __init__(self) -> None:
        self._history = CounterHistory(MINUTE_S)
        self._roles: dict[str, str] = {}
        self._changes: deque[ObservedRoleChange] = deque(maxlen=_MAX_CHANGES)

    def update(self, fleet: FleetStatus, counts: GatewayCounters, at: float) -> TopView:
        """The view after a poll, from this page and earlier ones; `at`: Unix time of the poll."""
        self._history.add(counts)
        self._changes.extendleft(self._find_changes(fleet, at))
        self._roles = {each.name: each.role for each in fleet.instances}
        uptime_s = at - counts.started_s if counts.started_s else 0.0
        return TopView(
            at=at,
            fleet=fleet,
            counts=counts,
            now=self._history.get_rates(NOW_S),
            minute=self._history.get_rates(MINUTE_S),
            total=compute_rates(GatewayCounters(at_s=counts.at_s - uptime_s), counts),
            changes=tuple(self._changes),
        )

    def _find_changes(self, fleet: FleetStatus, at: float) -> Iterator[ObservedRoleChange]:
        for each in fleet.instances:
            before = self._roles.get(each.name, each.role)
            if before != each.role:
                yield ObservedRoleChange(at, each.name, before, each.role)


def is_flipped(instance: FleetInstance) -> bool:
    """Whether it serves another role than the configured one, which old gateways do not report."""
    return bool(instance.home) and instance.home != instance.role


def build_document(view: TopView) -> dict[str, Any]:
    """The view for JSON. Rates are null until the second poll; after a fault, data is of `time`."""
    counts = view.counts
    windows = {"now": view.now, "minute": view.minute, "ever": view.total}
    return {
        "time": view.at,
        "fault": view.fault or None,
        "deployments": view.deployments,
        "models": view.models,
        "requests_in_flight": round(counts.in_flight),
        "requests_waiting": round(counts.waiting),
        "slo": {"ttft_ms": counts.ttft_target_ms, "tpot_ms": counts.tpot_target_ms},
        **{name: asdict(traffic) if traffic else None for name, traffic in windows.items()},
        "flips": [asdict(change) for change in view.changes],
        "instances": msgspec.to_builtins(view.fleet.instances),
        "instances_left_out": view.fleet.left_out,
        "draining": view.fleet.draining,
    }
