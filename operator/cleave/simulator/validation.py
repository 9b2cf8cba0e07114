"""Validates fleets and traces; raises SimulationError with one line. Called by `run`."""

import math

import numpy as np
from numpy.typing import NDArray

from cleave.simulator.fleet import (
    Batching,
    CacheView,
    DispatchPolicy,
    SimulatedEngine,
    SimulatedFleet,
)
from cleave.simulator.trace import PromptBlocks, Trace

_MAX_TOKENS = 1 << 24
"""Limit of a prompt or an output."""


class SimulationError(ValueError):
    """The fleet or the trace cannot be simulated; the message is one line for the user."""


def check_trace(trace: Trace) -> None:
    """Reject a trace that is empty, unsorted or has an invalid time or length."""
    arrival, prompt, output = trace.arrival_ms, trace.prompt_tokens, trace.output_tokens
    if not len(arrival):
        raise SimulationError("the trace is empty; it needs at least one request")
    if not len(arrival) == len(prompt) == len(output):
        raise SimulationError(
            f"the trace has {len(arrival)} arrivals, {len(prompt)} prompts and {len(output)} "
            "outputs; the numbers must be equal"
        )
    if not (np.isfinite(arrival[-1]) and arrival[0] >= 0 and (arrival[1:] >= arrival[:-1]).all()):
        _refuse_arrivals(arrival)
    lengths = [("prompt_tokens", prompt), ("output_tokens", output)]
    if trace.predicted_tokens is not None:
        lengths.append(("predicted_tokens", trace.predicted_tokens))
        if len(trace.predicted_tokens) != len(output):
            raise SimulationError(
                f"the trace has {len(output)} outputs and {len(trace.predicted_tokens)} predicted "
                "ones; the numbers must be equal"
            )
    for name, tokens in lengths:
        if not (tokens.min() >= 1 and tokens.max() <= _MAX_TOKENS):
            at = int(np.flatnonzero(~((tokens >= 1) & (tokens <= _MAX_TOKENS)))[0])
            raise SimulationError(
                f"{name}[{at}] of the trace is {tokens[at]}; it must be in 1..{_MAX_TOKENS}"
            )


def check_blocks(
    blocks: PromptBlocks, prompt_tokens: NDArray[np.int64], kv_block_sizes: NDArray[np.int64]
) -> None:
    """Reject blocks that are no multiple of an engine's, or more than the prompts have."""
    tokens, starts, numbers = blocks.block_tokens, blocks.starts, blocks.numbers
    for size in kv_block_sizes:
        if tokens < 1 or tokens % size:
            raise SimulationError(
                f"block_tokens of the trace is {tokens}, no multiple of the kv_block_size {size} "
                "of an engine; hash blocks of that size, or change the engine's"
            )
    if len(starts) != len(prompt_tokens) + 1 or starts[0] != 0 or starts[-1] != len(numbers):
        raise SimulationError(
            f"blocks.starts of the trace has {len(starts)} entries up to {starts[-1]}; it needs "
            f"{len(prompt_tokens) + 1}, from 0 to the {len(numbers)} numbers"
        )
    counts = np.diff(starts)
    most = -(-prompt_tokens // tokens)
    if not ((counts >= 0) & (counts <= most)).all():
        at = int(np.flatnonzero((counts < 0) | (counts > most))[0])
        raise SimulationError(
            f"request {at} of the trace has {counts[at]} blocks of {tokens} tokens; its prompt of "
            f"{prompt_tokens[at]} tokens has 0 to {most[at]}"
        )
    _check_numbers("numbers", numbers, blocks.count)
    answers = blocks.answers
    if answers is None:
        return
    _check_numbers("answers.numbers", answers.numbers, blocks.count)
    wrong = (np.diff(answers.starts) > 0) & (counts != prompt_tokens // tokens)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise SimulationError(
            f"request {at} of the trace has an answer with blocks, and {counts[at]} blocks of its "
            f"prompt; number only its {prompt_tokens[at] // tokens} full ones"
        )


def _check_numbers(name: str, numbers: NDArray[np.int64], count: int) -> None:
    if len(numbers) and not (numbers.min() >= 0 and numbers.max() < count):
        at = int(np.flatnonzero((numbers < 0) | (numbers >= count))[0])
        raise SimulationError(
            f"blocks.{name}[{at}] of the trace is {numbers[at]}; it must be in 0..{count - 1}"
        )


def _refuse_arrivals(arrival: NDArray[np.float64]) -> None:
    for at, time in enumerate(arrival):
        if not math.isfinite(time) or time < 0:
            raise SimulationError(
                f"arrival_ms[{at}] of the trace is {time}; it must be finite and at least 0"
            )
        if at and time < arrival[at - 1]:
            raise SimulationError(
                f"arrival_ms[{at}] of the trace is {time}, earlier than the previous one "
                f"({arrival[at - 1]}); sort the trace by arrival"
            )


def check_fleet(fleet: SimulatedFleet) -> None:
    """Reject negative times and counts, and combinations of options that cannot work."""
    if fleet.dispatch is DispatchPolicy.BEST_FIT and fleet.best_fit is None:
        raise SimulationError("dispatch is BEST_FIT without its model; set the fleet's best_fit")
    if fleet.defers_dispatch and fleet.flipping is not None:
        raise SimulationError("dispatch is deferred with flipping; choose one of them")
    for pool in (*fleet.prefill, *fleet.decode, *fleet.mixed):
        if pool.replicas < 0:
            raise SimulationError(f"replicas is {pool.replicas}; it must be at least 0")
        if pool.engine.ranks > 1 and fleet.flipping is not None:
            raise SimulationError("flipping changes the role of engines, not of several ranks")
    engines = [pool.engine for pool in (*fleet.prefill, *fleet.decode, *fleet.mixed)]
    if fleet.cache_view is CacheView.CACHED and any(each.host_capacity_tokens for each in engines):
        raise SimulationError("cache_view CACHED does not see host memory; use SENT")
    pools = fleet.prefill if fleet.pulls_prefixes else ()
    if any(pool.engine.batching is not Batching.VLLM for pool in pools):
        raise SimulationError("pulls_prefixes needs batching VLLM on all prefill instances")
    transfer = fleet.transfer
    for name, value in (
        ("dispatch_ms", fleet.dispatch_ms),
        ("transfer.latency_ms", transfer.latency_ms),
        ("transfer.token_ms", transfer.token_ms),
        ("transfer.overlapped_token_ms", transfer.overlapped_token_ms),
        ("transfer.receiver_ms", transfer.receiver_ms),
        ("transfer.receiver_token_ms", transfer.receiver_token_ms),
    ):
        if not (math.isfinite(value) and value >= 0):
            raise SimulationError(f"{name} is {value}; it must be finite and at least 0")


def check_engine(engine: SimulatedEngine) -> None:
    """Reject limits below 1, memory below one block and an incomplete latency model."""
    limits = ("kv_block_size", "max_num_seqs", "max_num_batched_tokens", "prefill_sched_batch")
    for name in (*limits, "ranks"):
        value = getattr(engine, name)
        if value < 1:
            raise SimulationError(f"{name} is {value}; it must be at least 1")
    if engine.kv_capacity_tokens < engine.kv_block_size:
        raise SimulationError(
            f"kv_capacity_tokens is {engine.kv_capacity_tokens}, less than one block of "
            f"{engine.kv_block_size} tokens; the model does not fit"
        )
    if engine.host_capacity_tokens and engine.batching is not Batching.VLLM:
        raise SimulationError(
            f"host_capacity_tokens is {engine.host_capacity_tokens} with batching "
            f"{engine.batching.name}; set 0, or batching VLLM"
        )
    for name in ("host_capacity_tokens", "host_token_ms"):
        value = getattr(engine, name)
        if not (math.isfinite(value) and value >= 0):
            raise SimulationError(f"{name} is {value}; it must be finite and at least 0")
    for name in ("ttft_ms", "tpot_ms"):
        if not getattr(engine, name) > 0:
            raise SimulationError(f"{name} is {getattr(engine, name)}; it must be above 0")
    timing = engine.timing
    if timing.stages > 1 and engine.ranks > 1:
        raise SimulationError("ranks is above 1 with pipeline stages; choose one of them")
    if timing.stages < 1 or not timing.prompt_step > 0:
        raise SimulationError("timing: stages must be at least 1 and prompt_step above 0")
    if min(len(timing.prompt_ms), len(timing.decode_ms)) < 2 or not timing.decode_context_ms:
        raise SimulationError("timing: prompt_ms and decode_ms need two points, contexts one")
    contexts = timing.decode_context_ms + timing.mixed_context_ms
    points = (*timing.prompt_ms, *timing.decode_ms, *contexts)
    scalars = (timing.prompt_square_ms, timing.hop_ms, timing.hop_token_ms)
    if not all(map(math.isfinite, (*points, *scalars))):
        raise SimulationError("timing: every value must be a finite number")
