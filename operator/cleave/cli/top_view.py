"""What `cleave top` knows after each look at a gateway, and the same for programs. Pure."""

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from cleave.rpc.fleet_page import FleetPage, Instance
from cleave.traffic.counts import Counts, History, Traffic, compare

NOW_S = 5.0
MINUTE_S = 60.0
_FLIPS = 5


@dataclass(frozen=True, slots=True)
class Change:
    """A role that was another one at the look before."""

    at: float
    """Unix time."""
    instance: str
    before: str
    role: str


@dataclass(frozen=True, slots=True)
class View:
    """One look."""

    at: float
    """Unix time."""
    fleet: FleetPage
    counts: Counts
    now: Traffic | None
    """The last `NOW_S`; None until there was a second look."""
    minute: Traffic | None
    """The last `MINUTE_S`, or less after the first look."""
    ever: Traffic | None
    """Since the gateway was started; None where its clock is ahead of ours."""
    changes: tuple[Change, ...]
    """The last ones, newest first."""
    fault: str = ""
    """Why there was no later look; empty: this is the last one."""

    @property
    def deployments(self) -> list[str]:
        """Of the instances; in general one."""
        return sorted({each.deployment for each in self.fleet.instances})

    @property
    def models(self) -> list[str]:
        """Of the instances; in general one."""
        return sorted({each.model for each in self.fleet.instances})


class Watcher:
    """Remembers what windows need, and the last changes of roles."""

    def __init__(self) -> None:
        self._history = History(MINUTE_S)
        self._roles: dict[str, str] = {}
        self._changes: deque[Change] = deque(maxlen=_FLIPS)

    def take(self, fleet: FleetPage, counts: Counts, at: float) -> View:
        """What the pages say together with the earlier ones; `at`: Unix time of the look."""
        self._history.add(counts)
        self._changes.extendleft(self._find_changes(fleet, at))
        self._roles = {each.name: each.role for each in fleet.instances}
        uptime_s = at - counts.started_s if counts.started_s else 0.0
        started = Counts(at_s=counts.at_s - uptime_s)
        return View(
            at=at,
            fleet=fleet,
            counts=counts,
            now=self._history.look_back(NOW_S),
            minute=self._history.look_back(MINUTE_S),
            ever=compare(started, counts),
            changes=tuple(self._changes),
        )

    def _find_changes(self, fleet: FleetPage, at: float) -> Iterator[Change]:
        for each in fleet.instances:
            before = self._roles.get(each.name, each.role)
            if before != each.role:
                yield Change(at, each.name, before, each.role)


def is_away(instance: Instance) -> bool:
    """Whether it serves something else than it was made for; old gateways do not tell its home."""
    return bool(instance.home) and instance.home != instance.role


def to_plain(view: View) -> dict[str, Any]:
    """For JSON. Rates are null until there was a second look; with a fault all is of `time`."""
    counts = view.counts
    windows = {"now": view.now, "minute": view.minute, "ever": view.ever}
    return {
        "time": view.at,
        "fault": view.fault or None,
        "deployments": view.deployments,
        "models": view.models,
        "requests_in_flight": round(counts.in_flight),
        "requests_waiting": round(counts.waiting),
        "slo": {"ttft_ms": counts.ttft_target_ms, "tpot_ms": counts.tpot_target_ms},
        **{name: asdict(found) if found else None for name, found in windows.items()},
        "flips": [asdict(change) for change in view.changes],
        "instances": msgspec.to_builtins(view.fleet.instances),
        "instances_left_out": view.fleet.left_out,
        "draining": view.fleet.draining,
    }
