"""What pulling a prompt's beginning from another instance's prefix cache brings, in the simulator.

`python benchmarks/dispatch/pulls.py [--quick] [--sizes 4 8]`, less than a minute on one core once
the simulator is compiled. Mooncake's conversation trace, and generated sessions of agents. What is
hard: an answer's KV lies on the decode instance, and a trace does not say which blocks of later
prompts are answers. Mooncake's are found by lengths: where all later prompts that contain a
request's last full block go on with the same block, the tokens up to the end of its answer count as
its answer. So these hits are an upper bound; with a template that drops or rewrites answers there
are none.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import caches
import numpy as np
from agent_sessions import join_lists
from caches import Traffic
from fleets import NETWORK_GBPS, Worker, worker
from goodput import Targets

from cleave.simulator import run
from cleave.simulator.fleet import SimulatedFleet, SimulatedPool
from cleave.simulator.outcome import SimulationResult
from cleave.simulator.trace import AnswerBlocks, PromptBlocks, Trace

LINKS_GBPS = (25.0, 100.0, 200.0, 400.0)
"""Of one GPU: an instance has four, each with a card of its own or a part of one."""
RATES = {"Mooncake conversation": (0.15, 0.24, 0.3), "agent sessions": (0.15, 0.3, 0.45)}
"""req/s per instance, by traffic. At the highest more requests are late than a deployment would
accept."""

COLUMNS = (
    "traffic", "prefill + decode", "Gbit/s per GPU", "req/s", "prefixes", "computed",
    "pulled from prefill", "from decode",
    "TTFT mean, ms", "P50", "P99", "mean, ratio", "P99, ratio", "prefill GPUs' time, ratio",
    "in time",
)  # fmt: skip

Serve = Callable[[float], SimulationResult]


def read_conversations(requests: int) -> Traffic:
    """Mooncake's, with answers; other rates scale the gaps."""
    trace = caches.read_trace()
    few = trace.blocks.select(np.arange(requests), np.zeros(requests, np.int64))  # type: ignore[union-attr]
    trace = Trace(
        trace.arrival_ms[:requests],
        trace.prompt_tokens[:requests],
        trace.output_tokens[:requests],
        trace.predicted_tokens[:requests],  # type: ignore[index]
        few,
    )
    blocks = find_answers(trace)

    def build(rate: float) -> Trace:
        arrival_ms = trace.arrival_ms * (trace.rate / rate)
        return replace(trace, arrival_ms=arrival_ms, blocks=blocks)

    return Traffic("Mooncake conversation", build, Targets(10_000, 200), 0.25)


def find_answers(trace: Trace) -> PromptBlocks:
    """The trace's blocks with those of answers, see above."""
    blocks = trace.blocks
    assert blocks is not None
    size = blocks.block_tokens
    lists = np.split(blocks.numbers, blocks.starts[1:-1])
    users: dict[int, list[int]] = {}
    for r, numbers in enumerate(lists):
        for number in numbers.tolist():
            users.setdefault(number, []).append(r)
    prompts, answers = [], []
    for r, numbers in enumerate(lists):
        full = int(trace.prompt_tokens[r]) // size
        end = int(trace.prompt_tokens[r] + trace.output_tokens[r])
        answer = numbers[:0]
        if full:
            later = [o for o in users[int(numbers[full - 1])] if o > r and len(lists[o]) > full]
            if later and len({int(lists[other][full]) for other in later}) == 1:
                whole = int(trace.prompt_tokens[later[0]]) // size
                answer = lists[later[0]][full : min(end // size, whole)]
        prompts.append(numbers[:full] if len(answer) else numbers)
        answers.append(answer)
    starts, joined = join_lists(prompts)
    return PromptBlocks(size, starts, joined, blocks.count, AnswerBlocks(*join_lists(answers)))


def build_fleet(one: Worker, count: int, decode_share: float, link_gbps: float) -> SimulatedFleet:
    """Prefill and decode pools."""
    engine = one.engine(most_tokens=8192)
    decode = max(round(count * decode_share), 1)
    token_ms = one.transfer.token_ms * NETWORK_GBPS / link_gbps
    return SimulatedFleet(
        (SimulatedPool(engine, count - decode),),
        (SimulatedPool(engine, decode),),
        transfer=replace(one.transfer, token_ms=token_ms),
    )


def serve_with(fleet: SimulatedFleet, traffic: Traffic, pulls: bool) -> Serve:
    prepared = run.prepare_fleet(replace(fleet, pulls_prefixes=pulls))
    return lambda rate: run.simulate(prepared, traffic.build(rate))


def describe(
    result: SimulationResult, targets: Targets, prefills: int, plain: SimulationResult | None
) -> list[str]:
    """Shares of the prompt tokens, TTFT in ms, time of prefill GPUs and share of requests in time,
    as cells of a table; ratios to `plain`."""
    base = plain or result
    tokens = result.prompt_tokens.sum()
    computed = result.instances.prompt_tokens[:prefills].sum() / tokens
    is_decode = result.source_instance >= prefills
    fetched = [result.fetched_tokens[each].sum() / tokens for each in (~is_decode, is_decode)]
    times, before = (
        [float(each.ttft_ms.mean()), *map(float, np.percentile(each.ttft_ms, (50, 99)))]
        for each in (result, base)
    )
    busy = result.instances.busy_ms[:prefills].sum() / base.instances.busy_ms[:prefills].sum()
    return [
        *(f"{each:.3f}" for each in (computed, *fetched)),
        *(f"{each:,.0f}" for each in times),
        f"{times[0] / before[0]:.2f}",
        f"{times[2] / before[2]:.2f}",
        f"{busy:.2f}",
        f"{result.compute_attainment(targets.ttft_ms, targets.tpot_ms):.3f}",
    ]


def measure(one: Worker, traffic: Traffic, count: int, links: Sequence[float]) -> None:
    """Print the rows of one fleet."""
    for link in links:
        fleet = build_fleet(one, count, traffic.decode_share, link)
        prefills = fleet.prefill[0].replicas
        name = f"{prefills} + {count - prefills}"
        plain, pulling = (serve_with(fleet, traffic, pulls) for pulls in (False, True))
        for rate in RATES[traffic.name]:
            before, after = plain(rate * count), pulling(rate * count)
            start = [traffic.name, name, f"{link:g}", f"{rate * count:.2f}"]
            print_row(*start, "computed", *describe(before, traffic.targets, prefills, None))
            print_row(*start, "pulled", *describe(after, traffic.targets, prefills, before))


def print_row(*cells: str) -> None:
    print("|", " | ".join(cells), "|", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few requests; do not quote figures")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8], help="instances")
    parser.add_argument("--links", type=float, nargs="+", default=LINKS_GBPS, help="Gbit/s per GPU")
    parser.add_argument("--traffic", choices=("conversations", "agents"), nargs="+")
    args = parser.parse_args(arguments)
    builders = {"conversations": read_conversations, "agents": caches.draw_agents}
    requests = {"conversations": 4_000, "agents": 2_000}
    one = worker("llama-2-70b", "H100-SXM-80GB", 4)
    print(f"{one.name}, {one.estimate.kv_capacity_tokens:,} tokens of KV an instance\n")
    print_row(*COLUMNS)
    print("|---" * len(COLUMNS) + "|")
    for count in args.sizes:
        for name in args.traffic or builders:
            traffic = builders[name](500 if args.quick else requests[name])
            measure(one, traffic, count, args.links)
    return 0


if __name__ == "__main__":
    sys.exit(main())
