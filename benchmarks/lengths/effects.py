"""What better predictions are worth: to dispatch between instances, to admission inside one."""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from predictions import Predictions

sys.path.append(str(Path(__file__).parents[1] / "dispatch"))
sys.path.append(str(Path(__file__).parents[1] / "scheduler"))

from fleets import worker
from goodput import Targets, bisect, colocated, split
from one_engine import BURST, ENGINE

from cleave.simulator.fleet import (
    Admission,
    DispatchPolicy,
    SimulatedFleet,
    SimulatedPool,
    SimulatedTransfer,
)
from cleave.simulator.run import prepare_fleet, simulate
from cleave.simulator.trace import Trace

MOST_TOKENS = 4_096
"""Longest context of the models here."""
WARM_UP = 0.2
SEEDS = 3
BURSTS = 20
POLICIES = (DispatchPolicy.SHORTEST_WAIT, DispatchPolicy.LEAST_HEAVY, DispatchPolicy.BEST_FIT)
"""Those that look at predicted outputs; the first is the default."""


@dataclass(frozen=True, slots=True)
class DispatchRow:
    """One policy with one way to predict outputs."""

    fleet: str
    policy: str
    foretold_by: str
    per_gpu: float
    """Goodput, req/s."""
    gain: float
    """Beside the mean by prompt length."""


@dataclass(frozen=True, slots=True)
class AdmissionRow:
    """One admission on one decode instance; means over seeds."""

    admission: str
    foretold_by: str
    jct_ms: float
    """Job completion time: from arrival to end."""
    gain: float
    """Beside greedy."""
    preemptions: float


def dispatch(predictions: Predictions, quick: bool) -> Iterator[dict[str, object]]:
    """Fleets of benchmarks/dispatch, goodput by policy."""
    one = worker("llama-2-70b", "H100-SXM-80GB", 4)
    targets = Targets(2_000, 100)
    fleets = {
        "8 mixed": (colocated(one, 8, targets), 8),
        "4 prefill, 6 decode": (split(one, 4, 6, targets), 10),
    }
    for name, (fleet, instances) in fleets.items():
        for policy in POLICIES[: 1 if quick else None]:
            prepared = prepare_fleet(replace(fleet, dispatch=policy))
            found = {
                by: _goodput(prepared, predictions, tokens, targets, 300 if quick else 4_000)
                / (instances * one.gpus)
                for by, tokens in _ways(predictions).items()
            }
            first = found["mean by prompt length"]
            for by, per_gpu in found.items():
                yield asdict(DispatchRow(name, policy.name, by, per_gpu, per_gpu / first - 1))


def admissions(predictions: Predictions, quick: bool) -> Iterator[dict[str, object]]:
    """256 requests at once, their prompts computed, on one decode instance that is short of KV."""
    ways = {**_ways(predictions), "likeliest range, low end": predictions.low}
    greedy = 0.0
    for by, tokens in ways.items():
        for admission in Admission:
            if admission is Admission.GREEDY and greedy:
                continue
            engine = replace(ENGINE, admission=admission, max_num_batched_tokens=2_048)
            fleet = SimulatedFleet(decode=(SimulatedPool(engine, 1),), transfer=SimulatedTransfer())
            times, preempted = [], []
            for seed in range(1 if quick else BURSTS):
                trace = _draw(predictions, tokens, BURST, seed)
                outcome = simulate(fleet, replace(trace, arrival_ms=np.zeros(BURST)))
                times.append(outcome.end_ms.mean())
                preempted.append(outcome.num_preemptions.sum())
            jct_ms = float(np.mean(times))
            greedy = greedy or jct_ms
            label = "any" if admission is Admission.GREEDY else by
            yield asdict(
                AdmissionRow(
                    admission.name, label, jct_ms, 1 - jct_ms / greedy, float(np.mean(preempted))
                )
            )


def _ways(predictions: Predictions) -> dict[str, NDArray[np.float64] | NDArray[np.int64]]:
    return {
        "mean by prompt length": predictions.mean,
        "classifier": predictions.tree,
        "known": predictions.answers.output_tokens,
    }


def _goodput(
    fleet: object, predictions: Predictions, tokens: NDArray, targets: Targets, requests: int
) -> float:
    def attainment(rate: float) -> float:
        shares = []
        for seed in range(SEEDS):
            trace = _draw(predictions, tokens, requests, seed, rate)
            outcome = simulate(fleet, trace, seed)
            met = (outcome.ttft_ms <= targets.ttft_ms) & (outcome.tpot_ms <= targets.tpot_ms)
            shares.append(float(np.mean(met[int(WARM_UP * requests) :])))
        return sum(shares) / SEEDS

    return bisect(lambda rate: attainment(rate) >= targets.attainment)


def _draw(
    predictions: Predictions, tokens: NDArray, num: int, seed: int, rate: float = 1.0
) -> Trace:
    """Poisson arrivals of requests drawn from the test set; the same ones for every way."""
    rng = np.random.default_rng(seed)
    prompts, outputs = predictions.answers.prompt_tokens, predictions.answers.output_tokens
    some = rng.choice(np.flatnonzero(prompts + outputs <= MOST_TOKENS), num)
    arrival = np.cumsum(rng.exponential(1000 / rate, num))
    predicted = np.maximum(np.rint(tokens[some]), 1).astype(np.int64)
    return Trace(arrival, prompts[some], outputs[some], predicted)
