"""`simulate`: a fleet serves a trace. The door of this package.

Called by the planner thousands of times per answer, by the command line and the benchmarks. What is
hard: with a thousand requests the compiled part takes half a millisecond, so nothing around it may
take long; a fleet that is simulated often is prepared once.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cleave.simulator import layout
from cleave.simulator.errors import SimulationError
from cleave.simulator.fleet import Batching, Engine, Fleet
from cleave.simulator.outcome import Instances, Outcome
from cleave.simulator.trace import Trace

_LONGEST_TOKENS = 1 << 24
"""Of one request."""
_EVENTS_PER_TOKEN = 64
"""A simulation that needs more thrashes: requests push each other out and never end."""


def simulate(fleet: "Fleet | Prepared", trace: Trace, seed: int = 0) -> Outcome:
    """Serve `trace` from an empty fleet until the last request has ended.

    `seed` matters to random dispatch alone; equal arguments give equal outcomes. Raises
    SimulationError when the fleet or the trace cannot be simulated. The first call of a process
    loads the compiled code (a fraction of a second), the very first one compiles it (seconds).
    """
    prepared = fleet if isinstance(fleet, Prepared) else prepare(fleet)
    requests, instances, state = _run(prepared, trace, seed)
    return _to_outcome(requests, instances, state)


def measure(
    fleet: "Fleet | Prepared", trace: Trace, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(TTFT, TPOT) of each request in ms, as `simulate` finds them, and nothing else."""
    prepared = fleet if isinstance(fleet, Prepared) else prepare(fleet)
    requests, _, _ = _run(prepared, trace, seed)
    first = requests["first_token"]
    gaps = np.maximum(requests["output"] - 1, 1)
    return first - requests["arrival"], (requests["end"] - first) / gaps


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A fleet in the form that the compiled code works on; unchanged by simulations."""

    fleet: Fleet
    instances: layout.Records
    slots: layout.Records
    state: layout.Records
    max_block: int
    max_stages: int
    tables: NDArray[np.float64]
    scores: NDArray[np.float64]
    tree: NDArray[np.int64]


def prepare(fleet: Fleet) -> Prepared:
    """Check and lay out a fleet. Raises SimulationError."""
    roles = ((layout.PREFILL, fleet.prefill), (layout.DECODE, fleet.decode))
    pools = [(role, pool) for role, some in (*roles, (layout.MIXED, fleet.mixed)) for pool in some]
    if not any(pool.replicas for _, pool in pools):
        raise SimulationError("the fleet has no instances; state at least one pool with replicas")
    for _, pool in pools:
        _check_engine(pool.engine)
    _check_fleet(fleet)
    tables = _Tables()
    kinds = [_lay_out_engine(role, pool.engine, tables) for role, pool in pools]
    instances = np.concatenate(
        [np.repeat(kind, pool.replicas) for kind, (_, pool) in zip(kinds, pools, strict=True)]
    )
    stages = instances["stages"]
    instances["first_slot"] = np.cumsum(stages) - stages
    slots = np.zeros(int(stages.sum()), layout.SLOT)
    for name in ("oldest", "youngest", "prompts", "fresh", "next"):
        slots[name] = layout.NONE
    return Prepared(
        fleet,
        instances,
        slots,
        _lay_out_state(fleet, instances),
        int(instances["block"].max()),
        int(stages.max()),
        np.array(tables.points),
        _lay_out_scores(instances["role"]),
        _lay_out_tree(len(instances)),
    )


class _Tables:
    """Points of latency models, one after another."""

    def __init__(self) -> None:
        self.points: list[float] = []

    def add(self, points: tuple[float, ...]) -> tuple[int, int]:
        """(where they begin, how many they are)."""
        start = len(self.points)
        self.points += points
        return start, len(points)


def _lay_out_engine(role: int, engine: Engine, tables: _Tables) -> layout.Records:
    row = np.zeros(1, layout.INSTANCE)
    timing = engine.timing
    blocks = engine.kv_capacity_tokens // engine.kv_block_size
    prompt, decode = tables.add(timing.prompt_ms), tables.add(timing.decode_ms)
    context = tables.add(timing.decode_context_ms)
    values: dict[str, Any] = {
        "prompt_step": timing.prompt_step,
        "prompt_square": timing.prompt_square_ms,
        "hop": timing.hop_ms,
        "hop_token": timing.hop_token_ms,
        "next": math.inf,
        "wake": math.inf,
        "role": role,
        "batching": engine.batching,
        "order": engine.order,
        "admission": engine.admission,
        "block": engine.kv_block_size,
        "blocks": blocks,
        "free": blocks,
        "max_seqs": engine.max_num_seqs,
        "max_tokens": engine.max_num_batched_tokens,
        "sched_batch": engine.prefill_sched_batch,
        "stages": timing.stages,
        "partial": layout.NONE,
    }
    values["prompt_table"], values["prompt_points"] = prompt
    values["decode_table"], values["decode_points"] = decode
    values["context_table"], values["context_points"] = context
    if engine.batching in (Batching.ORCA, Batching.FASTER_TRANSFORMER):
        # -1: as long as the longest request of the trace.
        values["reserve"] = -(-(engine.max_model_len or 0) // engine.kv_block_size) or -1
    for name, value in values.items():
        row[name] = value
    return row


def _lay_out_state(fleet: Fleet, instances: layout.Records) -> layout.Records:
    row = np.zeros(1, layout.STATE)
    transfer = fleet.transfer
    role = instances["role"]
    values: dict[str, Any] = {
        "dispatch": fleet.dispatch,
        "dispatch_ms": fleet.dispatch_ms,
        "latency": transfer.latency_ms,
        "token": transfer.token_ms,
        "overlapped_token": transfer.overlapped_token_ms,
        "overlap_from": transfer.overlap_from_tokens,
        "is_shared": transfer.is_shared,
        "first_by_decode": fleet.first_token_by_decode,
        "has_prefill": bool((role != layout.DECODE).any()),
        "has_decode": bool((role != layout.PREFILL).any()),
        "num_instances": len(instances),
        "num_leaves": _count_leaves(len(instances)),
        "max_block": instances["block"].max(),
        "max_stages": instances["stages"].max(),
    }
    for name, value in values.items():
        row[name] = value
    return row


def _lay_out_scores(role: NDArray[np.int64]) -> NDArray[np.float64]:
    scores = np.zeros((4, len(role)))
    scores[0, role != layout.PREFILL] = np.inf
    scores[1, role == layout.PREFILL] = np.inf
    scores[2, role != layout.MIXED] = np.inf
    return scores


def _count_leaves(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _lay_out_tree(count: int) -> NDArray[np.int64]:
    leaves = _count_leaves(count)
    tree = np.full(2 * leaves, layout.NONE, np.int64)
    tree[leaves : leaves + count] = range(count)
    for at in range(leaves - 1, 0, -1):
        tree[at] = tree[2 * at]
    return tree


def _run(
    prepared: Prepared, trace: Trace, seed: int
) -> tuple[layout.Records, layout.Records, layout.Records]:
    _check_trace(trace)
    requests = np.zeros(len(trace), layout.REQUEST)
    requests["arrival"] = trace.arrival_ms
    requests["prompt"] = trace.prompt_tokens
    requests["todo"] = trace.prompt_tokens
    requests["output"] = trace.output_tokens
    for name in _UNREACHED:
        requests[name] = np.nan
    requests["prefill"] = requests["decode"] = layout.NONE
    instances, slots = prepared.instances.copy(), prepared.slots.copy()
    if instances["reserve"].min() < 0:
        longest = int((trace.prompt_tokens + trace.output_tokens).max())
        own = instances["reserve"] < 0
        instances["reserve"][own] = -(-longest // instances["block"][own])
    count, batch = len(instances), min(int(instances["max_seqs"].max()), len(trace))
    arrays = {
        "requests": requests,
        "instances": instances,
        "slots": slots,
        "queues": np.zeros(2 * count + 3, layout.QUEUE),
        "heaps": np.empty(len(slots) * batch, np.int64),
        "phases": np.zeros(len(slots) * prepared.max_block, np.int64),
        "stages": np.zeros(count * prepared.max_stages),
        "tables": prepared.tables,
        "scores": prepared.scores.copy(),
        "tree": prepared.tree.copy(),
        "pulls": np.empty(len(trace), layout.PULL),
        "scratch": np.empty(2 * (len(trace) + 1), np.int64),
    }
    state = prepared.state.copy()
    tokens = int(trace.prompt_tokens.sum() + trace.output_tokens.sum())
    state["max_events"] = _EVENTS_PER_TOKEN * (tokens + len(trace))
    state["random"] = 1 + (seed * 2_654_435_761 + 12_345) % 2_147_483_645
    state["num_requests"] = len(trace)
    state["heap_size"] = batch
    for name, array in arrays.items():
        state[name] = array.ctypes.data
    _load()(state)
    return requests, instances, state


_UNREACHED = (
    "prefill_start",
    "prefill_end",
    "transfer_start",
    "transfer_end",
    "decode_start",
    "first_token",
    "end",
)


@functools.cache
def _load() -> Callable[..., None]:
    from cleave.simulator.jit import compile_function
    from cleave.simulator.loop import run_events
    from cleave.simulator.rows import build_intrinsics

    return compile_function(run_events, build_intrinsics())


def _to_outcome(
    requests: layout.Records,
    instances: layout.Records,
    state: layout.Records,
) -> Outcome:
    def column(name: str, of: layout.Records = requests) -> Any:  # noqa: ANN401
        return np.ascontiguousarray(of[name])

    end = float(state["now"][0])
    area = instances["kv_area"] + instances["kv_tokens"] * (end - instances["kv_at"])
    prefill, decode = column("prefill"), column("decode")
    if state["has_prefill"][0]:
        prefill = np.where(prefill == layout.NONE, decode, prefill)
    return Outcome(
        arrival_ms=column("arrival"),
        prefill_start_ms=column("prefill_start"),
        prefill_end_ms=column("prefill_end"),
        transfer_start_ms=column("transfer_start"),
        transfer_end_ms=column("transfer_end"),
        decode_start_ms=column("decode_start"),
        first_token_ms=column("first_token"),
        end_ms=column("end"),
        output_tokens=column("output"),
        num_preemptions=column("preemptions"),
        prefill_instance=prefill,
        decode_instance=decode,
        fate=column("fate"),
        instances=Instances(
            busy_ms=column("busy", instances),
            passes=column("passes", instances),
            decode_passes=column("decode_passes", instances),
            batch_peak=column("batch_peak", instances),
            prompt_tokens=column("prompt_tokens", instances),
            decode_tokens=column("decode_tokens", instances),
            kv_token_ms=area,
            kv_peak_tokens=column("kv_peak", instances),
            kv_left_tokens=column("kv_tokens", instances),
            num_preemptions=column("preemptions", instances),
            duration_ms=end,
        ),
    )


def _check_trace(trace: Trace) -> None:
    arrival, prompt, output = trace.arrival_ms, trace.prompt_tokens, trace.output_tokens
    if not len(arrival):
        raise SimulationError("the trace is empty; it needs at least one request")
    if not len(arrival) == len(prompt) == len(output):
        raise SimulationError(
            f"the trace has {len(arrival)} arrivals, {len(prompt)} prompts and {len(output)} "
            "outputs; they must be as many"
        )
    if not (np.isfinite(arrival[-1]) and arrival[0] >= 0 and (arrival[1:] >= arrival[:-1]).all()):
        _explain_arrivals(arrival)
    for name, tokens in (("prompt_tokens", prompt), ("output_tokens", output)):
        if not (tokens.min() >= 1 and tokens.max() <= _LONGEST_TOKENS):
            at = int(np.flatnonzero(~((tokens >= 1) & (tokens <= _LONGEST_TOKENS)))[0])
            raise SimulationError(
                f"{name}[{at}] of the trace is {tokens[at]}; it must be in 1..{_LONGEST_TOKENS}"
            )


def _explain_arrivals(arrival: NDArray[np.float64]) -> None:
    for at, time in enumerate(arrival):
        if not math.isfinite(time) or time < 0:
            raise SimulationError(
                f"arrival_ms[{at}] of the trace is {time}; it must be a number from 0 on"
            )
        if at and time < arrival[at - 1]:
            raise SimulationError(
                f"arrival_ms[{at}] of the trace is {time}, before the one ahead of it "
                f"({arrival[at - 1]}); sort the trace by arrival"
            )


def _check_fleet(fleet: Fleet) -> None:
    for pool in (*fleet.prefill, *fleet.decode, *fleet.mixed):
        if pool.replicas < 0:
            raise SimulationError(f"replicas is {pool.replicas}; it must be at least 0")
    transfer = fleet.transfer
    for name, value in (
        ("dispatch_ms", fleet.dispatch_ms),
        ("transfer.latency_ms", transfer.latency_ms),
        ("transfer.token_ms", transfer.token_ms),
        ("transfer.overlapped_token_ms", transfer.overlapped_token_ms),
    ):
        if not (math.isfinite(value) and value >= 0):
            raise SimulationError(f"{name} is {value}; it must be a number from 0 on")


def _check_engine(engine: Engine) -> None:
    for name in ("kv_block_size", "max_num_seqs", "max_num_batched_tokens", "prefill_sched_batch"):
        value = getattr(engine, name)
        if value < 1:
            raise SimulationError(f"{name} is {value}; it must be at least 1")
    if engine.kv_capacity_tokens < engine.kv_block_size:
        raise SimulationError(
            f"kv_capacity_tokens is {engine.kv_capacity_tokens}, less than one block of "
            f"{engine.kv_block_size} tokens; the model does not fit"
        )
    timing = engine.timing
    if timing.stages < 1 or not timing.prompt_step > 0:
        raise SimulationError("timing: stages must be at least 1 and prompt_step above 0")
    if min(len(timing.prompt_ms), len(timing.decode_ms)) < 2 or not timing.decode_context_ms:
        raise SimulationError("timing: prompt_ms and decode_ms need two points, contexts one")
    points = (*timing.prompt_ms, *timing.decode_ms, *timing.decode_context_ms)
    others = (timing.prompt_square_ms, timing.hop_ms, timing.hop_token_ms)
    if not all(map(math.isfinite, (*points, *others))):
        raise SimulationError("timing: every value must be a finite number")
