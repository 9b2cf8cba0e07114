"""TetriInfer by class of requests (figures 11 to 15): one pair beside one mixed instance.

Called by run.py. Requests of ShareGPT's lengths, all at one moment, heavy and light as in section
5.1. The pair runs the paper's choices: chunks of 512 tokens, the shortest of 16 prompts first,
admission to decoding by predicted ranges of 200 tokens. What is hard: the paper's baseline is vLLM
of 2023 with a fixed batch, and most of the gains are gains over that batch, so that the same engine
with a larger one, and today's, stand beside it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cleave.api.cluster import Cluster, NodeGroup
from cleave.perf import named_profiles
from cleave.perf.estimator import build_estimator
from cleave.perf.model import model_shape
from cleave.perf.published import distserve
from cleave.perf.timing import EngineTiming
from cleave.simulator.fleet import (
    Admission,
    Batching,
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

HEAVY_PROMPT, HEAVY_OUTPUT = 512, 128
"""Tokens above which a prompt or an output is heavy."""
REQUESTS = 128
SEEDS = 20
_DRAWN = 8_192
"""Requests drawn to find those of a class."""
MAX_TOKENS = 2_048
"""Prompt and output of OPT."""
KV_TOKENS = 41_600
"""Two V100 of 32 GB less the weights, at 0.82 MB a token."""
KV_BYTES = 0.82e6
RANGE, ACCURACY = 200, 0.749
"""Tokens of a predicted range, and how many are right (section 5.2.2)."""
LINKS = {"NVLink": 300e9, "RoCE": 25e9}
"""Bytes per second between the instances of the pair (section 5.1)."""

Lengths = tuple[bool | None, bool | None]
"""Whether prompt and output are heavy; None: either."""

CLASSES: dict[str, Lengths] = {
    "LPLD": (False, False),
    "LPHD": (False, True),
    "HPLD": (True, False),
    "HPHD": (True, True),
    "Mixed": (None, None),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over all requests, and time that instances were in use; ms."""

    ttft_ms: float
    jct_ms: float
    """From arrival to the last token."""
    used_ms: float
    """Of all instances together, until each has done its last work (section 5.1)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One class on one GPU: the pair over one mixed instance, less 1."""

    name: str
    gpu: str
    baseline: str
    ttft: float
    jct: float
    used: float


def compare() -> list[Row]:
    """Every class, GPU and baseline."""
    return [row for gpu, timing in build_timings().items() for row in compare_on(gpu, timing)]


def build_timings() -> dict[str, EngineTiming]:
    """OPT-13B on two GPUs: as DistServe measured it on A100, and by the roofline of the paper's."""
    shape, name = model_shape.load_shape("facebook/opt-13b"), "V100-SXM-32GB"
    cluster = Cluster(nodes=[NodeGroup(count=1, gpu=name, gpus_per_node=4)])
    computed = build_estimator(shape, cluster).estimate(name, 2, 1)
    assert computed is not None
    measured = named_profiles.to_timing(distserve.FITS["distserve/opt-13b/tp2"])
    return {"A100, measured": measured, "V100, computed": computed.timing}


def compare_on(gpu: str, timing: EngineTiming, seeds: int = SEEDS) -> Iterator[Row]:
    """Every class and baseline on one GPU; means over `seeds` draws."""
    for name in CLASSES:
        traces = [draw(name, seed) for seed in range(seeds)]
        pair = _average(measure_pair(timing, trace, "NVLink") for trace in traces)
        slow = _average(measure_pair(timing, trace, "RoCE") for trace in traces)
        fixed: Figures | None = None
        for baseline, engine in build_baselines(timing).items():
            found = _average(measure_mixed(engine, trace) for trace in traces)
            fixed = fixed or found
            yield _compare(name, gpu, baseline, pair, found)
        assert fixed is not None
        yield _compare(name, gpu, "the first, KV over RoCE", slow, fixed)


def build_baselines(timing: EngineTiming) -> dict[str, SimulatedEngine]:
    """vLLM as the paper ran it, with a larger batch, and today's."""
    first = SimulatedEngine(
        timing, KV_TOKENS, batching=Batching.PREFILL_FIRST, max_num_seqs=16,
        max_num_batched_tokens=MAX_TOKENS, prefix_caching=False,
    )  # fmt: skip
    return {
        "vLLM 2023, batch of 16": first,
        "vLLM 2023, batch of 256": replace(first, max_num_seqs=256),
        "vLLM today, chunks": replace(
            first, batching=Batching.VLLM, max_num_seqs=256, prefix_caching=True
        ),
    }


def draw(name: str, seed: int) -> Trace:
    """`REQUESTS` requests of a class at one moment, with predicted ranges of outputs."""
    drawn = published.get_workload("sharegpt").build_demand().draw(_DRAWN, seed=seed)
    prompt, output = drawn.prompt_tokens, drawn.output_tokens
    fits = prompt + output <= MAX_TOKENS
    for is_heavy, values, limit in zip(
        CLASSES[name], (prompt, output), (HEAVY_PROMPT, HEAVY_OUTPUT), strict=True
    ):
        if is_heavy is not None:
            fits &= (values > limit) == is_heavy
    chosen = np.flatnonzero(fits)[:REQUESTS]
    if len(chosen) < REQUESTS:
        raise ValueError(f"{name}: {len(chosen)} of {_DRAWN} requests are of this class")
    outputs = output[chosen]
    return Trace(np.zeros(REQUESTS), prompt[chosen], outputs, predict(outputs, seed))


def predict(outputs: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """The low end of each output's range; ranges that are wrong are one off."""
    generator = np.random.default_rng(seed)
    number = outputs // RANGE
    wrong = generator.random(len(outputs)) >= ACCURACY
    up = (generator.random(len(outputs)) < 0.5) | (number == 0)
    number = number + wrong * np.where(up, 1, -1)
    return np.maximum(number * RANGE, 1).astype(np.int64)


def measure_mixed(engine: SimulatedEngine, trace: Trace) -> Figures:
    """One mixed instance, which knows nothing of outputs."""
    fleet = SimulatedFleet(mixed=(SimulatedPool(engine, 1),))
    outcome = simulate(fleet, replace(trace, predicted_tokens=None))
    return _read(outcome, float(outcome.end_ms.max()))


def measure_pair(timing: EngineTiming, trace: Trace, link: str) -> Figures:
    """TetriInfer's pair of one prefill and one decode instance."""
    prefill = SimulatedEngine(
        timing,
        KV_TOKENS,
        max_num_batched_tokens=512,
        order=PrefillOrder.SJF,
        prefill_sched_batch=16,
        prefix_caching=False,
    )
    decode = SimulatedEngine(
        timing,
        KV_TOKENS,
        max_num_batched_tokens=MAX_TOKENS,
        admission=Admission.RESERVE_DYNAMIC,
        prefix_caching=False,
    )
    fleet = SimulatedFleet(
        prefill=(SimulatedPool(prefill, 1),),
        decode=(SimulatedPool(decode, 1),),
        transfer=SimulatedTransfer(token_ms=KV_BYTES / LINKS[link] * 1_000),
        first_token_by_decode=False,
    )
    outcome = simulate(fleet, trace)
    decoding_ms = float(outcome.end_ms.max() - np.nanmin(outcome.transfer_start_ms))
    return _read(outcome, float(outcome.prefill_end_ms.max()) + decoding_ms)


def _read(outcome: SimulationResult, used_ms: float) -> Figures:
    jct_ms = float((outcome.end_ms - outcome.arrival_ms).mean())
    return Figures(float(outcome.ttft_ms.mean()), jct_ms, used_ms)


def _average(figures: Iterator[Figures]) -> Figures:
    rows = [(each.ttft_ms, each.jct_ms, each.used_ms) for each in figures]
    return Figures(*(sum(column) / len(rows) for column in zip(*rows, strict=True)))


def _compare(name: str, gpu: str, baseline: str, pair: Figures, mixed: Figures) -> Row:
    return Row(
        name,
        gpu,
        baseline,
        pair.ttft_ms / mixed.ttft_ms - 1,
        pair.jct_ms / mixed.jct_ms - 1,
        pair.used_ms / mixed.used_ms - 1,
    )
