"""Dispatch that knows of prefix caches, on Mooncake's conversation trace and on generated sessions
of agents, in the simulator.

Called by run.py. Engines cache with vLLM's
rules; what differs is how an instance is chosen for a prompt. What is hard: two of the policies are
other projects', so they are no part of Cleave; they are written here for the simulator's compiler
and take the place of its dispatch.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import agent_sessions
import numpy as np
import traces
from fleets import Worker
from goodput import Targets, bisect
from numpy.typing import NDArray

from cleave.policy.dispatch import BY_REQUESTS, TO_DECODE
from cleave.simulator import dispatch, run
from cleave.simulator.compiler import load_function
from cleave.simulator.dispatch import find
from cleave.simulator.events import run_events
from cleave.simulator.fleet import (
    CacheView,
    DispatchPolicy,
    SimulatedFleet,
    SimulatedPool,
)
from cleave.simulator.outcome import SimulationResult
from cleave.simulator.prefix_index import record_block
from cleave.simulator.record_access import (
    get_block,
    get_cache,
    get_first_known,
    get_instance,
    get_known,
    get_prompt,
    get_request,
)
from cleave.simulator.records import DECODE, MIXED, NONE, State
from cleave.simulator.trace import Trace
from cleave.traffic import history

LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1)
"""Of the goodput of dispatch that knows nothing of caches; where that meets the targets at no rate,
of that of the least cost."""
SHOWN_LOAD = 0.8
CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5
"""Defaults of sglang's gateway, of which CACHE_THRESHOLD is a share of the prompt, and the others
compare requests in flight: docs/getting-started/load-balancing.md of lightseekorg/smg."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How an instance is chosen."""

    name: str
    dispatch: DispatchPolicy
    view: CacheView = CacheView.NOTHING
    is_foreign: bool = False
    """Chosen by `select_as_others_do`."""


SHORTEST_WAIT = Policy("shortest wait", DispatchPolicy.SHORTEST_WAIT)
COST = Policy("least cost (PrefixAware)", DispatchPolicy.PREFIX_AWARE, CacheView.SENT)
SEEN = Policy("least cost, caches seen", DispatchPolicy.PREFIX_AWARE, CacheView.CACHED)
COMPARED = (
    Policy("random", DispatchPolicy.RANDOM),
    SHORTEST_WAIT,
    Policy("session pinned", DispatchPolicy.SHORTEST_WAIT, is_foreign=True),
    Policy("radix tree (sglang)", DispatchPolicy.LEAST_REQUESTS, is_foreign=True),
    COST,
    SEEN,
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests whose prompts repeat."""

    name: str
    build: Callable[[float], Trace]
    """By rate, in req/s."""
    targets: Targets
    decode_share: float
    """Of the instances, where these are apart."""


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one fleet."""

    traffic: str
    fleet: str
    policy: str
    computed: float
    """Computed prompt tokens over all prompt tokens, at SHOWN_LOAD, as the next two."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    goodput: float
    """Highest rate at which the targets hold, req/s."""
    mean_ttft_ratios: tuple[float, ...]
    """Mean TTFT over that of shortest wait, by load."""
    p99_ttft_ratios: tuple[float, ...]
    """The same of the 99th percentile."""


def read_conversations() -> Traffic:
    """Mooncake's, whose gaps are scaled for other rates."""
    trace = read_trace()

    def build(rate: float) -> Trace:
        return replace(trace, arrival_ms=trace.arrival_ms * (trace.rate / rate))

    return Traffic("Mooncake conversation", build, Targets(10_000, 200), 0.25)


def draw_agents(requests: int, seed: int = 1) -> Traffic:
    """Generated sessions."""

    def build(rate: float) -> Trace:
        return agent_sessions.draw_sessions(requests, rate, seed)

    return Traffic("agent sessions", build, Targets(2_000, 100), 0.5)


def read_trace() -> Trace:
    """An hour of conversations of Kimi; outputs predicted as the router does."""
    trace = history.read_trace(traces.DATA / "mooncake_conversation_trace.jsonl")
    predicted = traces.predict(trace.prompt_tokens, trace.output_tokens)
    arrival_ms = spread_arrivals(trace.arrival_ms)
    return replace(trace, arrival_ms=arrival_ms, predicted_tokens=predicted)


def spread_arrivals(arrival_ms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Arrivals of one moment, spread evenly until the next: the trace's times are rounded to three
    seconds, and ten requests at once would stay together at any rate."""
    times, first, owner, counts = np.unique(
        arrival_ms, return_index=True, return_inverse=True, return_counts=True
    )
    gaps = np.diff(times, append=times[-1])
    position = np.arange(len(arrival_ms)) - first[owner]
    spread: NDArray[np.float64] = arrival_ms + gaps[owner] * position / counts[owner]
    return spread


def list_fleets(
    worker: Worker, count: int, decode_share: float
) -> Iterator[tuple[str, SimulatedFleet]]:
    """Mixed instances, and as many in prefill and decode pools."""
    engine = worker.engine(most_tokens=8192)
    yield f"{count} mixed", SimulatedFleet(mixed=(SimulatedPool(engine, count),))
    decode = round(count * decode_share)
    pools = (SimulatedPool(engine, count - decode),), (SimulatedPool(engine, decode),)
    yield (
        f"{count - decode} prefill, {decode} decode",
        SimulatedFleet(*pools, transfer=worker.transfer),
    )


def compare(name: str, fleet: SimulatedFleet, traffic: Traffic) -> list[Row]:
    """A row for each policy."""
    build, targets = functools.lru_cache(traffic.build), traffic.targets
    served = {each: build_server(each, fleet, build) for each in COMPARED}
    goodputs = {policy: find_goodput(serve, targets) for policy, serve in served.items()}
    base = goodputs[SHORTEST_WAIT] or goodputs[COST]
    plain = [_measure_ttft(served[SHORTEST_WAIT](load * base)) for load in LOADS]
    rows = []
    for policy, serve in served.items():
        results = [serve(load * base) for load in LOADS]
        shown = results[LOADS.index(SHOWN_LOAD)]
        computed = shown.instances.prompt_tokens.sum() / shown.prompt_tokens.sum()
        p50, p99 = np.percentile(shown.ttft_ms, (50, 99))
        pairs = zip(map(_measure_ttft, results), plain, strict=True)
        means, p99s = zip(*((a / c, b / d) for (a, b), (c, d) in pairs), strict=True)
        rows.append(
            Row(traffic.name, name, policy.name, computed, p50, p99, goodputs[policy], means, p99s)
        )
    return rows


def _measure_ttft(result: SimulationResult) -> tuple[float, float]:
    """(mean, 99th percentile) in ms."""
    return float(result.ttft_ms.mean()), float(np.percentile(result.ttft_ms, 99))


def find_goodput(serve: Callable[[float], SimulationResult], targets: Targets) -> float:
    """Highest rate at which the share of requests within both targets is high enough."""

    def holds(rate: float) -> bool:
        attained = serve(rate).compute_attainment(targets.ttft_ms, targets.tpot_ms)
        return attained >= targets.attainment

    return bisect(holds)


def compute_least_share(trace: Trace) -> float:
    """Share of prompt tokens that one cache without limit would leave to compute."""
    blocks = trace.blocks
    assert blocks is not None
    owner = np.repeat(np.arange(len(trace)), np.diff(blocks.starts))
    position = np.arange(len(blocks.numbers)) - blocks.starts[owner]
    left = trace.prompt_tokens[owner] - position * blocks.block_tokens
    _, first = np.unique(blocks.numbers, return_index=True)
    return float(np.minimum(left, blocks.block_tokens)[first].sum() / trace.prompt_tokens.sum())


def build_server(
    policy: Policy, fleet: SimulatedFleet, build: Callable[[float], Trace]
) -> Callable[[float], SimulationResult]:
    """Serves the traffic at a rate."""
    prepared = run.prepare_fleet(replace(fleet, dispatch=policy.dispatch, cache_view=policy.view))

    def serve(rate: float) -> SimulationResult:
        if not policy.is_foreign:
            return run.simulate(prepared, build(rate))
        arrays, state = run.lay_out(prepared, build(rate), 0)
        load_foreign()(state)
        return run.build_result(arrays, state)

    return serve


@functools.cache
def load_foreign() -> Callable[..., None]:
    """The simulator with the policies of others; compiled for a minute, once for each version."""

    def build() -> dict[Callable[..., object], object]:
        ours = run.build_replacements(has_blocks=True)
        return ours | {dispatch.select_instances: select_as_others_do}

    return load_function(run_with_others, build)


def run_with_others(state: State) -> None:
    """The simulator's loop with `select_as_others_do`; its own name, as code is cached by name."""
    run_events(state)


def select_as_others_do(state: State, r: int) -> tuple[int, int]:
    """(prefill, decode) instance. With scores by requests as a radix tree chooses, otherwise by
    session: the second block of a prompt, as the first is common to all, by hash.

    Radix tree (`cache_aware` of sglang's gateway): the instance of fewest requests if the most and
    the fewest are out of balance; else the one that got the longest equal prefix, if that is more
    than CACHE_THRESHOLD of the prompt; else the one that got the fewest blocks.
    """
    prompt, request = get_prompt(state, r), get_request(state, r)
    entries = 0
    most, fewest, idle, smallest = 0, 1 << 60, 0, 0
    for i in range(state.num_instances):
        inst = get_instance(state, i)
        if inst.role == DECODE:
            continue
        entries += 1
        most = max(most, inst.requests)
        if inst.requests < fewest:
            fewest, idle = inst.requests, i
        if get_cache(state, i).written < get_cache(state, smallest).written:
            smallest = i
    if state.counts != BY_REQUESTS:
        key = r
        if prompt.num_blocks > 1:
            key = get_block(state, prompt.first_block + 1).value
        chosen = (key * 2_654_435_761 % (1 << 32)) * entries >> 32
    else:
        chosen = smallest
        is_unequal = most - fewest > BALANCE_ABS_THRESHOLD and most > BALANCE_REL_THRESHOLD * fewest
        depth = prompt.num_blocks
        while depth > 0:
            block = get_block(state, prompt.first_block + depth - 1).value
            k = get_first_known(state, block).value
            if k != NONE:
                if depth * state.block_tokens > CACHE_THRESHOLD * request.prompt:
                    chosen = get_known(state, k).instance
                break
            depth -= 1
        if is_unequal:
            chosen = idle
        for at in range(prompt.num_blocks):
            record_block(state, chosen, get_block(state, prompt.first_block + at).value)
        get_cache(state, chosen).written += prompt.num_blocks - depth
    if get_instance(state, chosen).role == MIXED:
        return NONE, chosen
    return chosen, find(state, TO_DECODE, r, chosen)
