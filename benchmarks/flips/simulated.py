"""Pools that lend each other instances, beside those that do not, in moving traffic; simulated."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from cleave.perf import named_profiles
from cleave.perf.published import distserve
from cleave.policy.role_flipping import build_thresholds
from cleave.simulator.fleet import (
    FlipThresholds,
    SimulatedEngine,
    SimulatedFleet,
    SimulatedPool,
    SimulatedTransfer,
)
from cleave.simulator.run import simulate
from cleave.simulator.trace import Trace

TTFT_MS, TPOT_MS = 400.0, 60.0
TERMS = build_thresholds(TTFT_MS)
GPUS = 8
_ENGINE = SimulatedEngine(
    named_profiles.to_timing(distserve.FITS["distserve/opt-13b/tp1"]),
    kv_capacity_tokens=60_000,
    max_num_batched_tokens=2_048,
)


@dataclass(frozen=True, slots=True)
class Phase:
    """Traffic that lasts for a while."""

    name: str
    seconds: float
    rate: float
    prompt: float
    """Median tokens."""
    output: float


@dataclass(frozen=True, slots=True)
class Row:
    """One traffic on one fleet."""

    traffic: str
    prefill: int
    decode: int
    fixed: float
    """Attainment."""
    flipping: float
    flips: int
    oracle: float
    """Of the best fixed fleet for each phase by itself."""


def run(quick: bool) -> Iterator[dict[str, object]]:
    """Every traffic on every ratio."""
    scale = 0.2 if quick else 1.0
    code = Phase("code", 300 * scale, 14.0, 1_200, 30)
    talk = Phase("conversation", 300 * scale, 16.0, 500, 220)
    shorts = [Phase(each.name, 30.0, each.rate, each.prompt, each.output) for each in (code, talk)]
    traffics = {
        "code, then conversation, twice": [code, talk] * 2,
        "the same, in turns of 30 s": shorts * round(20 * scale),
        "code": [code] * 2,
        "conversation": [talk] * 2,
    }
    ratios = [(n, GPUS - n) for n in range(2, GPUS - 1)]
    best = {
        phase.name: max(_attain([phase], *ratio, None)[0] for ratio in ratios)
        for phase in (code, talk)
    }
    for name, phases in traffics.items():
        requests = sum(phase.rate * phase.seconds for phase in phases)
        oracle = sum(best[p.name] * p.rate * p.seconds for p in phases) / requests
        for prefill, decode in ratios:
            fixed, _ = _attain(phases, prefill, decode, None)
            flipping, flips = _attain(phases, prefill, decode, TERMS)
            yield asdict(Row(name, prefill, decode, fixed, flipping, flips, oracle))


def _attain(
    phases: list[Phase], prefill: int, decode: int, terms: FlipThresholds | None
) -> tuple[float, int]:
    """(share within both targets, flips)."""
    pools = (SimulatedPool(_ENGINE, prefill),), (SimulatedPool(_ENGINE, decode),)
    fleet = SimulatedFleet(*pools, transfer=SimulatedTransfer(1.0, 0.002), flipping=terms)
    outcome = simulate(fleet, _draw(phases))
    return outcome.compute_attainment(TTFT_MS, TPOT_MS), outcome.num_flips


def _draw(phases: list[Phase], seed: int = 0) -> Trace:
    """Poisson arrivals, log-normal lengths."""
    draw = np.random.default_rng(seed)
    arrivals, prompts, outputs, start = [], [], [], 0.0
    for phase in phases:
        count = draw.poisson(phase.rate * phase.seconds)
        arrivals.append(np.sort(draw.uniform(start, start + phase.seconds, count)) * 1_000)
        prompts.append(draw.lognormal(np.log(phase.prompt), 0.8, count).clip(10, 6_000))
        outputs.append(draw.lognormal(np.log(phase.output), 0.7, count).clip(2, 1_500))
        start += phase.seconds
    lengths = (np.concatenate(some).astype(np.int64) for some in (prompts, outputs))
    return Trace(np.concatenate(arrivals), *lengths)
