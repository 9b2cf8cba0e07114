"""What clients observed in a day, scored against the targets: per phase and in all."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from deployment import TPOT_MS, TTFT_MS
from traffic import Day

from cleave.simulator.trace import Trace


@dataclass(frozen=True, slots=True)
class Seen:
    """One entry per request, in milliseconds of the trace since it was due.

    nan: it failed; inf: the day was over before its answer.
    """

    first_token_ms: np.ndarray
    end_ms: np.ndarray
    lag_ms: np.ndarray
    """By which it was sent late."""
    faults: tuple[str, ...]
    busy_share: float
    """Of this machine's cores, by all processes."""

    def tpot_ms(self, trace: Trace) -> np.ndarray:
        """(end - first token) / (output tokens - 1)."""
        # Who went home unanswered has waited endlessly for the first token already.
        first_ms = np.where(np.isinf(self.end_ms), 0.0, self.first_token_ms)
        return np.asarray((self.end_ms - first_ms) / np.maximum(trace.output_tokens - 1, 1))

    def attained(self, trace: Trace) -> np.ndarray:
        """Who met both targets; what failed did not."""
        return (self.first_token_ms <= TTFT_MS) & (self.tpot_ms(trace) <= TPOT_MS)


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """One phase in one mode."""

    phase: str
    requests: int
    attained: int
    attainment: float
    goodput: float
    """Requests per second of the trace that met both targets."""
    ttft_p90_ms: float | None
    tpot_p90_ms: float | None


@dataclass(frozen=True, slots=True)
class Result:
    """One mode's day."""

    mode: str
    phases: tuple[PhaseResult, ...]
    requests: int
    attained: int
    failed: int
    unanswered: int
    """When the day was over; each had waited for long."""
    flips: int
    replans: int
    instance_hours: float
    """Hours of the trace that instances were ready, all together."""
    late_p99_ms: float
    """Of the wall's clock: by which the load itself came late."""
    busy_share: float
    faults: tuple[str, ...]
    machine: str

    @property
    def attainment(self) -> float:
        return self.attained / self.requests


def read_seen(file: Path) -> Seen:
    """What asking.py has written."""
    arrays = np.load(file)
    return Seen(
        arrays["first_token_ms"],
        arrays["end_ms"],
        arrays["lag_ms"],
        tuple(map(str, arrays["faults"])),
        float(arrays["busy_share"]),
    )


def write_seen(file: Path, seen: Seen) -> None:
    """For `read_seen`."""
    np.savez(file, **(asdict(seen) | {"faults": np.array(seen.faults)}))


def read_result(file: Path) -> Result:
    """What an earlier run has written as JSON."""
    fields = json.loads(file.read_text())
    phases = tuple(PhaseResult(**each) for each in fields.pop("phases"))
    return Result(**{**fields, "phases": phases, "faults": tuple(fields["faults"])})


def join(parts: Sequence[Seen]) -> Seen:
    """Phases that were served one by one, as one day."""
    return Seen(
        np.concatenate([part.first_token_ms for part in parts]),
        np.concatenate([part.end_ms for part in parts]),
        np.concatenate([part.lag_ms for part in parts]),
        tuple(fault for part in parts for fault in part.faults),
        float(np.mean([part.busy_share for part in parts])),
    )


def score(mode: str, day: Day, seen: Seen, time_scale: float, counts: "ReportedCounts") -> Result:
    """Everything about a mode's day."""
    attained = seen.attained(day.trace)
    tpot_ms = seen.tpot_ms(day.trace)
    phases = []
    for index, phase in enumerate(day.phases):
        mine = day.phase_of == index
        count, met = int(mine.sum()), int(attained[mine].sum())
        phases.append(
            PhaseResult(
                phase.name,
                count,
                met,
                met / count,
                met / day.phase_ms * 1e3,
                _p90(seen.first_token_ms[mine]),
                _p90(tpot_ms[mine]),
            )
        )
    return Result(
        mode=mode,
        phases=tuple(phases),
        requests=len(day.trace),
        attained=int(attained.sum()),
        failed=int(np.isnan(seen.end_ms).sum()),
        unanswered=int(np.isinf(seen.end_ms).sum()),
        flips=counts.flips,
        replans=counts.replans,
        instance_hours=counts.instance_s / time_scale / 3600,
        late_p99_ms=float(np.nanpercentile(seen.lag_ms, 99)) * time_scale,
        busy_share=seen.busy_share,
        faults=seen.faults[:5],
        machine=describe_machine(),
    )


@dataclass(frozen=True, slots=True)
class ReportedCounts:
    """What Prometheus and the deployment's status say of a day."""

    flips: int
    replans: int
    instance_s: float


def describe_machine() -> str:
    """What figures are taken on."""
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def _p90(values: np.ndarray) -> float | None:
    """None: more than a tenth got no answer."""
    found = np.sort(np.where(np.isnan(values), np.inf, values))[int(0.9 * (len(values) - 1))]
    return float(found) if np.isfinite(found) else None
