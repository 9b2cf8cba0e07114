"""`simulate`: a fleet serves a trace. The entry point of this package.

Called by the planner thousands of times per plan, by the command line and by the benchmarks. What
is hard: with a thousand requests the compiled part takes half a millisecond, so nothing around it
may take long; callers that simulate a fleet often prepare it once.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cleave.policy.cache_horizon import HISTORY_SIZE, UNKNOWN
from cleave.policy.role_flipping import build_pressure_history
from cleave.simulator import records
from cleave.simulator.fleet import SimulatedFleet
from cleave.simulator.inter_token_latency import NUM_BINS
from cleave.simulator.outcome import (
    InstanceStatistics,
    InterTokenLatencies,
    SimulationResult,
    Times,
)
from cleave.simulator.prepared_fleet import PreparedFleet as PreparedFleet
from cleave.simulator.prepared_fleet import prepare_fleet as prepare_fleet
from cleave.simulator.records import Records
from cleave.simulator.trace import PromptBlocks, Trace
from cleave.simulator.validation import check_blocks, check_trace

Fleet = SimulatedFleet | PreparedFleet
Window = tuple[float, float]
"""From the first moment until before the second, in ms."""
_ALWAYS: Window = (0.0, math.inf)
NEVER: Window = (0.0, 0.0)
"""Counting costs 1 to 7 % of a simulation's time, so it is left out where nobody asks."""


@dataclass(frozen=True, slots=True)
class EarlyVerdict:
    """Ends a simulation when all counted requests have ended, or too many have missed a target. The
    latencies of others are not complete then."""

    counted: range
    """Rows of the counted requests."""
    max_ttft_ms: float
    max_tpot_ms: float
    max_missed: int
    """Counted requests that may miss a target."""


class Latencies(NamedTuple):
    """Latencies of the requests of one simulation; nan: it did not end."""

    ttft_ms: Times
    tpot_ms: Times
    num_arrived: int
    """Requests that the simulation reached."""
    running_peaks: tuple[int, int, int]
    """Most requests that ran on a prefill, a decode and a mixed instance at once."""
    itl: InterTokenLatencies


_ROLES = (records.PREFILL, records.DECODE, records.MIXED)
_MAX_EVENTS_PER_TOKEN = 64
"""A simulation that needs more thrashes: requests preempt each other and never end."""


def simulate(
    fleet: Fleet, trace: Trace, seed: int = 0, itl_window: Window = _ALWAYS
) -> SimulationResult:
    """Serve `trace` from an empty fleet until the last request has ended.

    Tokens that come in `itl_window` count in `itl`. `seed` matters only to random dispatch; equal
    arguments give equal results. Raises SimulationError when the fleet or the trace cannot be
    simulated. The first call in a process loads the compiled code (a fraction of a second); the
    first one after a change compiles it.
    """
    return build_result(*_run_compiled(fleet, trace, seed, itl_window))


def measure_latencies(
    fleet: Fleet,
    trace: Trace,
    seed: int = 0,
    verdict: EarlyVerdict | None = None,
    itl_window: Window = NEVER,
) -> Latencies:
    """Latencies as in the result of `simulate`, which takes longer. With `verdict`, the simulation
    ends when that is known."""
    arrays, state = _run_compiled(fleet, trace, seed, itl_window, verdict)
    requests = arrays["requests"]
    first = requests["first_token"]
    gaps = np.maximum(requests["output"] - 1, 1)
    tpot_ms = (requests["end"] - first) / gaps
    peaks = np.zeros(3, np.int64)
    np.maximum.at(peaks, arrays["instances"]["role"], arrays["instances"]["running_peak"])
    prefill, decode, mixed = (int(peaks[role]) for role in _ROLES)
    ttft_ms, num_arrived = first - requests["arrival"], int(state["num_arrived"][0])
    itl = InterTokenLatencies(arrays["itl_counts"])
    return Latencies(ttft_ms, tpot_ms, num_arrived, (prefill, decode, mixed), itl)


def is_compiled(has_blocks: bool = False) -> bool:
    """Whether the machine code is cached on disk; if not, the first call compiles for seconds.
    `has_blocks`: that of traces with the blocks of prompts."""
    from cleave.simulator import compiler

    return compiler.is_compiled(_find_loop(has_blocks))


def _run_compiled(
    fleet: Fleet,
    trace: Trace,
    seed: int,
    itl_window: Window,
    verdict: EarlyVerdict | None = None,
) -> tuple[dict[str, NDArray[Any]], Records]:
    prepared = fleet if isinstance(fleet, PreparedFleet) else prepare_fleet(fleet)
    arrays, state = lay_out(prepared, trace, seed)
    state["itl_begin"], state["itl_end"] = itl_window
    if verdict is not None:
        state["first_counted"] = verdict.counted.start
        state["end_counted"] = verdict.counted.stop
        state["counted_left"] = verdict.counted.stop - verdict.counted.start
        state["misses_left"] = verdict.max_missed
        state["max_ttft"], state["max_tpot"] = verdict.max_ttft_ms, verdict.max_tpot_ms
    _load_compiled(trace.blocks is not None)(state)
    return arrays, state


def lay_out(
    prepared: PreparedFleet, trace: Trace, seed: int
) -> tuple[dict[str, NDArray[Any]], Records]:
    """The memory of a simulation: arrays by name, and the STATE that holds their addresses."""
    check_trace(trace)
    if trace.blocks is not None:
        check_blocks(trace.blocks, trace.prompt_tokens, prepared.instances["block"])
    requests = np.zeros(len(trace), records.REQUEST)
    requests["arrival"] = trace.arrival_ms
    requests["prompt"] = trace.prompt_tokens
    requests["to_compute"] = trace.prompt_tokens
    requests["output"] = trace.output_tokens
    predicted = trace.predicted_tokens
    requests["predicted"] = trace.output_tokens if predicted is None else predicted
    for name in _TIME_FIELDS:
        requests[name] = np.nan
    requests["prefill"] = requests["decode"] = records.NONE
    instances, slots = prepared.instances.copy(), prepared.slots.copy()
    if instances["reserve"].min() < 0:
        longest = int((trace.prompt_tokens + trace.output_tokens).max())
        own = instances["reserve"] < 0
        instances["reserve"][own] = -(-longest // instances["block"][own])
    count, batch = len(instances), min(prepared.max_batch, len(trace))
    arrays = {
        "requests": requests,
        "instances": instances,
        "slots": slots,
        "queues": np.zeros(2 * count + 3, records.QUEUE),
        "heaps": np.empty(len(slots) * batch, np.int64),
        "phases": np.zeros(len(slots) * prepared.max_block, np.int64),
        "stages": np.zeros(count * prepared.max_stages),
        "tables": prepared.tables,
        "scores": prepared.scores.copy(),
        "tree": prepared.tree.copy(),
        "pulls": np.empty(len(trace), records.PULL),
        "scratch": np.empty(2 * (len(trace) + 1), np.int64),
        "members": prepared.members.copy(),
        "pressure_history": build_pressure_history(),
        "itl_counts": np.zeros(NUM_BINS, np.int64),
    }
    state = prepared.state.copy()
    tokens = int(trace.prompt_tokens.sum() + trace.output_tokens.sum())
    state["max_events"] = _MAX_EVENTS_PER_TOKEN * (tokens + len(trace))
    state["random"] = 1 + (seed * 2_654_435_761 + 12_345) % 2_147_483_645
    state["num_requests"] = len(trace)
    state["is_predicted"] = predicted is not None
    state["heap_size"] = batch
    if trace.blocks is None:
        state["cache_view"] = records.NOTHING
    else:
        arrays |= _lay_out_caches(trace.blocks, instances, state)
    for name, array in arrays.items():
        state[name] = array.ctypes.data
    return arrays, state


def _lay_out_caches(
    blocks: PromptBlocks, instances: Records, state: Records
) -> dict[str, NDArray[Any]]:
    """The arrays of the prefix caches. They cost address space; memory only where they are used."""
    uses = len(blocks.numbers)
    num_answers = 0 if blocks.answers is None else len(blocks.answers.numbers)
    prompts = np.zeros(len(blocks.starts) - 1, records.PROMPT)
    prompts["first_block"] = blocks.starts[:-1]
    prompts["num_blocks"] = np.diff(blocks.starts)
    prompts["source"] = prompts["own"] = records.NONE
    answers = blocks.answers
    if answers is not None:
        prompts["first_answer"] = answers.starts[:-1]
        prompts["num_answers"] = np.diff(answers.starts)
    # Those in host memory follow.
    caches = np.zeros(2 * len(instances), records.CACHE)
    for name in ("oldest", "newest", "first_used", "last_used", "first_begun", "last_begun"):
        caches[name] = records.NONE
    caches["horizon"] = caches["reported"] = UNKNOWN
    state["block_tokens"] = blocks.block_tokens
    state["num_block_uses"] = uses
    state["free_copy"] = state["free_known"] = records.NONE
    if state["cache_view"][0] != records.NOTHING:
        state["is_by_score"] = 0
    return {
        "prompts": prompts,
        "caches": caches,
        "clocks": np.zeros(len(instances) * HISTORY_SIZE),
        "blocks": np.ascontiguousarray(blocks.numbers, np.int64),
        "answers": np.zeros(1) if answers is None else np.ascontiguousarray(answers.numbers),
        "copies": np.empty(_bound_copies(instances, uses + len(prompts)), records.COPY),
        "first_copies": np.full(blocks.count, records.NONE),
        "held": np.empty(2 * uses, np.int64),
        "known": np.empty(2 * (uses + num_answers), records.KNOWN),
        "first_known": np.full(blocks.count, records.NONE),
    }


def _bound_copies(instances: Records, most_kept: int) -> int:
    """Limit of copies. Each has at least one KV block on a GPU, and none is shared by two. A
    request adds at most its blocks and one more to the host memory of each of its two instances:
    `most_kept`, if all requests have one."""
    on_gpus = int(instances["blocks"].sum()) + 1
    return on_gpus + (2 * most_kept if instances["host_blocks"].any() else 0)


_TIME_FIELDS = (
    "prefill_start", "prefill_end", "transfer_start", "transfer_end", "decode_start",
    "first_token", "end",
)  # fmt: skip
_COUNT_FIELDS = ("iterations", "decode_iterations", "batch_peak", "prompt_tokens", "decode_tokens")


@functools.cache
def _load_compiled(has_blocks: bool) -> Callable[..., None]:
    return compile_loop(_find_loop(has_blocks), has_blocks=has_blocks)


def _find_loop(has_blocks: bool) -> Callable[..., None]:
    """The uncompiled loop; the imports take time, which readers of results do not have."""
    from cleave.simulator.events import run_events, run_events_with_caches

    return run_events_with_caches if has_blocks else run_events


def compile_loop(
    function: Callable[..., None], *scalars: type, has_blocks: bool = False
) -> Callable[..., None]:
    """A compiled function of a STATE and of `scalars`, with the replacements that `policy` requires
    of callers. `has_blocks`: it simulates prefix caches; no other value may be used for the same
    function, because its code is cached by name."""
    from cleave.simulator.compiler import load_function

    build = functools.partial(build_replacements, has_blocks)
    return load_function(function, build, *scalars)


def build_replacements(has_blocks: bool) -> dict[Callable[..., Any], Any]:
    """What compiled code calls in place of functions that callers of `policy` have to supply."""
    from cleave.policy import best_fit, prompt_cost
    from cleave.policy.dispatch import count_cached_for, find_for
    from cleave.simulator import dispatch, prefix_caches, prefix_index
    from cleave.simulator.record_access import build_intrinsics

    return build_intrinsics() | {
        find_for: dispatch.find,
        count_cached_for: dispatch.count_cached,
        best_fit.check: dispatch.check,
        prompt_cost.find_depth: prefix_index.find_depth,
        prompt_cost.find_holder: prefix_index.find_holder,
        prompt_cost.get_holder: prefix_index.get_holder,
        prompt_cost.has_load: prefix_index.has_load,
        prompt_cost.predict_at: prefix_index.predict_at,
        prompt_cost.predict_bound: prefix_index.predict_bound,
        prefix_caches.has_caches: _return_true if has_blocks else _return_false,
    }


def _return_true() -> bool:
    return True


def _return_false() -> bool:
    return False


def build_result(arrays: dict[str, NDArray[Any]], state: Records) -> SimulationResult:
    """The result of a simulation whose memory is from `lay_out`."""
    requests, instances = arrays["requests"], arrays["instances"]

    def column(name: str, of: Records = requests) -> Any:  # noqa: ANN401
        return np.ascontiguousarray(of[name])

    end = float(state["now"][0])
    area = instances["kv_area"] + instances["kv_tokens"] * (end - instances["kv_at"])
    prefill, decode = column("prefill"), column("decode")
    nothing = np.zeros(len(requests), np.int64)
    prompts = arrays.get("prompts")
    if state["has_prefill"][0]:
        prefill = np.where(prefill == records.NONE, decode, prefill)
    return SimulationResult(
        **{f"{name}_ms": column(name) for name in ("arrival", *_TIME_FIELDS)},
        prompt_tokens=column("prompt"),
        output_tokens=column("output"),
        num_preemptions=column("preemptions"),
        prefill_instance=prefill,
        decode_instance=decode,
        outcome=column("outcome"),
        cached_tokens=nothing if prompts is None else column("hit", prompts),
        pull_cached_tokens=nothing if prompts is None else column("pull_hit", prompts),
        fetched_tokens=nothing if prompts is None else column("fetched", prompts),
        loaded_tokens=nothing if prompts is None else column("loaded", prompts),
        source_instance=nothing + records.NONE if prompts is None else column("source", prompts),
        instances=InstanceStatistics(
            busy_ms=column("busy", instances),
            **{name: column(name, instances) for name in _COUNT_FIELDS},
            kv_token_ms=area,
            kv_peak_tokens=column("kv_peak", instances),
            kv_final_tokens=column("kv_tokens", instances),
            num_preemptions=column("preemptions", instances),
            duration_ms=end,
        ),
        itl=InterTokenLatencies(arrays["itl_counts"]),
        num_flips=int(state["num_flips"][0]),
    )
