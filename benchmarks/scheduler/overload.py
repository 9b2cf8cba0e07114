"""What engines that schedule by targets serve in time: under overload, and at most without it.

Called by run.py. Fleets of OPT-13B in the simulator, whose requests have the lengths of Azure's
conversations. An overload is six minutes of twice the rate that the fleet serves well.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np

from cleave.perf import named_profiles
from cleave.simulator.fleet import (
    Admission,
    PrefillOrder,
    SimulatedEngine,
    SimulatedFleet,
    SimulatedPool,
    SimulatedTransfer,
)
from cleave.simulator.outcome import SimulationResult
from cleave.simulator.run import simulate
from cleave.simulator.trace import Trace
from cleave.traffic import published

PROFILE = "distserve/opt-13b/tp1"
WORKLOAD = "azure-conversation"
SETTINGS = {
    "default": (PrefillOrder.FCFS, Admission.GREEDY),
    "InTimeFirst": (PrefillOrder.IN_TIME, Admission.GREEDY),
    "WithinTpot": (PrefillOrder.FCFS, Admission.WITHIN_TPOT),
    "both": (PrefillOrder.IN_TIME, Admission.WITHIN_TPOT),
}
FLEETS = {"4 mixed": (0, 0, 4), "2 prefill, 3 decode": (2, 3, 0)}
"""Prefill, decode and mixed instances."""
TARGETS = ((2_500.0, 60.0), (1_000.0, 60.0), (1_000.0, 40.0), (4_000.0, 200.0))
"""ms: TTFT and TPOT; the first ones are those of the overload."""
LONGEST = 8_192
RATE = 1.6
"""Requests per second and instance before and after the overload."""
BEFORE_S, OVERLOAD_S, AFTER_S = 120.0, 360.0, 360.0
ATTAINMENT = 0.9
WARM_UP = 0.2
PRECISION = 0.02


@dataclass(frozen=True, slots=True)
class OverloadRow:
    """Shares of requests within both targets, by when they arrived; means over the seeds."""

    fleet: str
    setting: str
    before_share: float
    overload_share: float
    after_share: float
    longest_s: float
    """Until a first token."""


@dataclass(frozen=True, slots=True)
class GoodputRow:
    """Requests per second and instance of which 90 % are within both targets, by setting."""

    fleet: str
    targets: str
    default: float
    in_time_first: float
    within_tpot: float
    both: float


def overload(quick: bool) -> Iterator[dict[str, object]]:
    """Each fleet with each setting, through twice its load."""
    seeds = range(1 if quick else 4)
    for name in FLEETS:
        rate = RATE * sum(FLEETS[name])
        for setting in SETTINGS:
            fleet = build_fleet(name, setting, *TARGETS[0])
            shares, longest = [], 0.0
            for seed in seeds:
                trace = draw_overload(rate, seed)
                outcome = simulate(fleet, trace)
                met = find_met(outcome, *TARGETS[0])
                longest = max(longest, float(outcome.ttft_ms.max()) / 1000)
                edges_s = np.cumsum([0.0, BEFORE_S, OVERLOAD_S, AFTER_S])
                numbers = np.digitize(trace.arrival_ms / 1000, edges_s[1:-1])
                shares.append([float(met[numbers == number].mean()) for number in range(3)])
            yield asdict(OverloadRow(name, setting, *np.mean(shares, axis=0).tolist(), longest))


def goodput(quick: bool) -> Iterator[dict[str, object]]:
    """The highest rate of each fleet with each setting, and with four pairs of targets."""
    for name in FLEETS:
        for ttft_ms, tpot_ms in TARGETS[: 1 if quick else None]:
            found = [
                find_goodput(build_fleet(name, setting, ttft_ms, tpot_ms), ttft_ms, tpot_ms, quick)
                / sum(FLEETS[name])
                for setting in SETTINGS
            ]
            yield asdict(GoodputRow(name, f"{ttft_ms:,.0f} and {tpot_ms:.0f} ms", *found))


def build_fleet(name: str, setting: str, ttft_ms: float, tpot_ms: float) -> SimulatedFleet:
    """The fleet with all its engines in this setting."""
    profile, (order, admission) = named_profiles.load_profile(PROFILE), SETTINGS[setting]
    engine = SimulatedEngine(
        profile.timing,
        profile.kv_capacity_tokens,
        max_num_batched_tokens=2_048,
        order=order,
        admission=admission,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
    )
    pools = [((SimulatedPool(engine, count),) if count else ()) for count in FLEETS[name]]
    return SimulatedFleet(*pools, transfer=SimulatedTransfer(latency_ms=5.0, token_ms=0.01))


def draw_overload(rate: float, seed: int) -> Trace:
    """`rate` requests per second, in between twice as many."""
    rng = np.random.default_rng(seed)
    parts = ((BEFORE_S, rate), (OVERLOAD_S, 2 * rate), (AFTER_S, rate))
    gaps = [rng.exponential(1000 / each, int(seconds * each)) for seconds, each in parts]
    arrival_ms = np.cumsum(np.concatenate(gaps))
    demand = published.get_workload(WORKLOAD).build_demand().with_max_model_len(LONGEST)
    return replace(demand.draw(len(arrival_ms), seed=seed), arrival_ms=arrival_ms)


def find_goodput(fleet: SimulatedFleet, ttft_ms: float, tpot_ms: float, quick: bool) -> float:
    """Requests per second of which ATTAINMENT are within both targets."""
    demand = published.get_workload(WORKLOAD).build_demand().with_max_model_len(LONGEST)
    seeds, requests = (1, 400) if quick else (3, 2_000)

    def attain(rate: float) -> float:
        shares = []
        for seed in range(seeds):
            met = find_met(simulate(fleet, demand.draw(requests, rate, seed)), ttft_ms, tpot_ms)
            shares.append(met[int(WARM_UP * requests) :].mean())
        return float(np.mean(shares))

    low, high = 0.1, 64.0
    while high - low > PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if attain(middle) >= ATTAINMENT else (low, middle)
    return low


def find_met(outcome: SimulationResult, ttft_ms: float, tpot_ms: float) -> np.ndarray:
    """Which requests are within both targets."""
    return np.asarray((outcome.ttft_ms <= ttft_ms) & (outcome.tpot_ms <= tpot_ms))
