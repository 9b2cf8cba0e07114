"""Orders, chunks and admission, in the simulator and in the emulated engine's scheduler."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
import virtual_engine
from numpy.typing import NDArray
from one_engine import BURST, ENGINE, WORKLOADS, burst, stream

from cleave.simulator.fleet import (
    Admission,
    Batching,
    PrefillOrder,
    SimulatedEngine,
    SimulatedFleet,
    SimulatedPool,
    SimulatedTransfer,
)
from cleave.simulator.run import simulate
from cleave.simulator.trace import Trace

SORTED = (16, 32, 64, 128)
ORDERS = (PrefillOrder.FCFS, PrefillOrder.SJF, PrefillOrder.LJF)
ADMISSIONS = (Admission.GREEDY, Admission.RESERVE_STATIC, Admission.RESERVE_DYNAMIC)
"""Those of TetriInfer; `overload` has the others."""
RANGE = 200
"""Tokens in a range of predicted lengths (TetriInfer's granularity)."""
ACCURACY = 0.75


@dataclass(frozen=True, slots=True)
class OrderRow:
    """One order of prompts on one prefill instance; means."""

    workload: str
    arrivals: str
    sorted: int
    order: str
    wait_ms: float
    """From arrival to the first pass."""
    wait_gain: float
    """Beside first come first served."""
    ttft_ms: float
    ttft_gain: float
    longest_ms: float
    """The longest wait of all."""
    engine_wait_ms: float
    """The same mean wait by the emulated engine's scheduler."""


@dataclass(frozen=True, slots=True)
class ChunkRow:
    """One way to batch prompts on one prefill instance; means."""

    workload: str
    arrivals: str
    batches: str
    ttft_ms: float
    gain: float
    """Of chunks beside this."""


@dataclass(frozen=True, slots=True)
class AdmissionRow:
    """One admission on one decode instance; means."""

    workload: str
    predicted: str
    admission: str
    jct_ms: float
    """Job completion time: from arrival to end."""
    gain: float
    """Beside greedy."""
    preemptions: int
    engine_jct_ms: float
    engine_preemptions: int


def orders(quick: bool) -> Iterator[dict[str, object]]:
    """Each order at each PrefillSchedBatch."""
    for workload in WORKLOADS:
        for arrivals, trace in _arrivals(workload, quick):
            fcfs: tuple[float, float] | None = None
            for sorted_prompts in SORTED[:1] if quick else SORTED:
                for order in ORDERS:
                    if order is PrefillOrder.FCFS and fcfs:
                        continue
                    engine = replace(ENGINE, order=order, prefill_sched_batch=sorted_prompts)
                    outcome = simulate(SimulatedFleet(prefill=(SimulatedPool(engine, 1),)), trace)
                    waits = outcome.prefill_start_ms - trace.arrival_ms
                    found = float(waits.mean()), float(outcome.ttft_ms.mean())
                    fcfs = fcfs or found
                    run = virtual_engine.run(trace, engine, decodes=False)
                    yield asdict(
                        OrderRow(
                            *(workload, arrivals, sorted_prompts, order.name),
                            *(found[0], 1 - found[0] / fcfs[0]),
                            *(found[1], 1 - found[1] / fcfs[1]),
                            float(waits.max()),
                            float((run.start_ms - trace.arrival_ms).mean()),
                        )
                    )


def chunks(quick: bool) -> Iterator[dict[str, object]]:
    """Chunks of 512 tokens beside larger ones, whole prompts near L_m and 16 whole prompts."""
    ways = {
        "chunks of 512": ENGINE,
        "chunks of 2,048": replace(ENGINE, max_num_batched_tokens=2_048),
        "whole prompts near 512": replace(ENGINE, batching=Batching.PREFILL_FIRST),
        # Which reserve KV for the longest; here that is not to matter.
        "16 whole prompts": replace(
            ENGINE,
            batching=Batching.FASTER_TRANSFORMER,
            max_num_seqs=16,
            kv_capacity_tokens=20 * ENGINE.kv_capacity_tokens,
        ),
    }
    for workload in WORKLOADS:
        for arrivals, trace in _arrivals(workload, quick):
            ttfts = {name: _ttft_ms(engine, trace) for name, engine in ways.items()}
            first = next(iter(ttfts.values()))
            for name, ttft_ms in ttfts.items():
                yield asdict(ChunkRow(workload, arrivals, name, ttft_ms, 1 - first / ttft_ms))


def admissions(quick: bool) -> Iterator[dict[str, object]]:
    """Greedy and reserving admission, by what is known of the outputs."""
    for workload in WORKLOADS:
        trace = make_lengths_distinct(burst(workload, BURST // 4 if quick else BURST))
        outputs = trace.output_tokens
        ranges = {
            "exactly": outputs,
            "ranges, 100 %, low end": predict(outputs, 1.0, 0.0),
            "ranges, 75 %, low end": predict(outputs, ACCURACY, 0.0),
            "ranges, 100 %, middle": predict(outputs, 1.0, 0.5),
            "ranges, 75 %, middle": predict(outputs, ACCURACY, 0.5),
        }
        greedy = None
        for predicted, tokens in ranges.items():
            predicted_trace = replace(trace, predicted_tokens=tokens)
            for admission in ADMISSIONS:
                if admission is Admission.GREEDY and greedy:
                    continue
                # Pulls cost nothing; a pass takes whole prompts of those that were preempted.
                engine = replace(ENGINE, admission=admission, max_num_batched_tokens=2_048)
                fleet = SimulatedFleet(
                    decode=(SimulatedPool(engine, 1),), transfer=SimulatedTransfer()
                )
                outcome = simulate(fleet, predicted_trace)
                jct_ms = float((outcome.end_ms - trace.arrival_ms).mean())
                greedy = greedy or jct_ms
                run = virtual_engine.run(predicted_trace, engine, decodes=True)
                yield asdict(
                    AdmissionRow(
                        *(workload, predicted, admission.name),
                        *(jct_ms, 1 - jct_ms / greedy),
                        int(outcome.num_preemptions.sum()),
                        float((run.end_ms - trace.arrival_ms).mean()),
                        run.preemptions,
                    )
                )


def predict(
    outputs: NDArray[np.int64], accuracy: float, point: float, seed: int = 1
) -> NDArray[np.int64]:
    """Where in its range an output is taken to lie, 0 its low end; wrong ones are a range off."""
    draw = np.random.default_rng(seed)
    number = outputs // RANGE
    wrong = draw.random(len(outputs)) >= accuracy
    up = (draw.random(len(outputs)) < 0.5) | (number == 0)
    number = number + wrong * np.where(up, 1, -1)
    return np.maximum((number + point) * RANGE, 1).astype(np.int64)


def _arrivals(workload: str, quick: bool) -> Iterator[tuple[str, Trace]]:
    yield f"{BURST} at once", burst(workload)
    if not quick:
        yield "Poisson, load 0.9", stream(workload, 0.9, 2_000)


def _ttft_ms(engine: SimulatedEngine, trace: Trace) -> float:
    return float(
        simulate(SimulatedFleet(prefill=(SimulatedPool(engine, 1),)), trace).ttft_ms.mean()
    )


def make_lengths_distinct(trace: Trace) -> Trace:
    """No two prompts of one length: an engine's predictor sees nothing else of them."""
    prompts = trace.prompt_tokens.copy()
    used_lengths: set[int] = set()
    for at, tokens in enumerate(prompts.tolist()):
        while tokens in used_lengths:
            tokens += 1
        used_lengths.add(tokens)
        prompts[at] = tokens
    return replace(trace, prompt_tokens=prompts)
