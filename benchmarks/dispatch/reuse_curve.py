"""The reuse curve that a gateway learns, compared with an exact simulation of a cache.

`python benchmarks/dispatch/reuse_curve.py mooncake_conversation_trace.jsonl`, a minute. The trace
was published with Mooncake's paper (FAST 2025, kvcache-ai/Mooncake).

Each request passes the router, with a text of four bytes per token that repeats as its blocks do.
Compared are hit shares of prompt tokens of one cache that evicts what was used longest ago, a
prompt's end before its beginning: simulated block by block; from the router's counts; from the
exact times of all blocks; and, simulated again, with the conversations that replanning fits to the
counts.
"""

import argparse
import json
import math
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from registrations import state

from cleave.api.enums import DispatchPolicy
from cleave.gateway.metrics.gateway_metrics import LENGTH_BOUNDS
from cleave.policy.reuse_times import BOUNDS_S
from cleave.router.registry import InstanceRegistry
from cleave.router.router import RequestPhase, Router
from cleave.rpc.v1 import agent_pb2
from cleave.simulator.trace import Trace
from cleave.traffic import history, workload
from cleave.traffic.counters import Buckets
from cleave.traffic.recordings.request_fields import MOONCAKE_BLOCK_TOKENS
from cleave.traffic.refit import refit, to_demand
from cleave.traffic.reuse_curve import build_curve, measure_reuse
from cleave.traffic.window import TrafficWindow

KV_TOKENS = (300_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000, 16_000_000, 32_000_000)
INSTANCES = 4
BYTES_PER_TOKEN = 4
ANSWER_S = 9.0
"""From a request to the end of its answer, for the fit: 2 s and 343 tokens of 20 ms."""


def count_reuse(path: Path, trace: Trace) -> tuple[Buckets, float]:
    """The router's counts for all requests of the trace, and CPU time per request in us."""
    now_s = 0.0
    registry = InstanceRegistry(DispatchPolicy.PREFIX_AWARE)
    for number in range(INSTANCES):
        name = f"i{number}"
        registry.on_event(name, state(name, agent_pb2.ROLE_MIXED), 0.0)
    router, model = Router(registry, seed=1, clock=lambda: now_s), next(iter(registry.models))
    spent_s = 0.0
    for at, text in enumerate(_list_texts(path)):
        now_s = float(trace.arrival_ms[at]) / 1000
        start_s = time.process_time()
        pick = router.pick(model, int(trace.prompt_tokens[at]), text=text)
        spent_s += time.process_time() - start_s
        router.release(pick, RequestPhase.PREFILL)
        router.observe_completion(pick, int(trace.output_tokens[at]))
        router.release(pick)
    counts = accumulate(router.reuse_times[model].to_list())
    return Buckets((*BOUNDS_S, math.inf), tuple(counts)), spent_s / len(trace) * 1e6


def _list_texts(path: Path) -> Iterator[bytes]:
    drawn, blocks = random.Random(1), dict[int, bytes]()
    size = MOONCAKE_BLOCK_TOKENS * BYTES_PER_TOKEN
    for line in path.open():
        request = json.loads(line)
        for each in request["hash_ids"]:
            if each not in blocks:
                blocks[each] = drawn.randbytes(size)
        text = b"".join(blocks[each] for each in request["hash_ids"])
        yield text[: request["input_length"] * BYTES_PER_TOKEN]


def fit(trace: Trace, reuse: Buckets) -> Trace:
    """As many requests of the conversations that replanning fits to these counts, twice."""
    duration_s = float(trace.arrival_ms[-1]) / 1000
    answered = Buckets((ANSWER_S, math.inf), (1.0, 1.0), ANSWER_S)
    prompts, outputs = (
        Buckets.from_values(each.tolist(), (*LENGTH_BOUNDS, math.inf))
        for each in (trace.prompt_tokens, trace.output_tokens)
    )
    window = TrafficWindow(
        duration_s, duration_s, len(trace), prompts, outputs, reuse=reuse, ttft=answered
    )
    spec = refit([window])
    print(f"fitted: {spec.reuse}")
    conversations = workload.build_from_spec(spec, Path())
    return to_demand([window]).with_reuse_of(conversations).draw(2 * len(trace))


def simulate_cache(trace: Trace, kv_tokens: float, skipped: int = 0) -> float:
    """The hit share of one cache, of all requests but the first `skipped`."""
    assert trace.blocks is not None
    size, starts, numbers = trace.blocks.block_tokens, trace.blocks.starts, trace.blocks.numbers
    cached: OrderedDict[int, int] = OrderedDict()
    used = hits = total = 0
    for at, tokens in enumerate(trace.prompt_tokens.tolist()):
        own = numbers[starts[at] : starts[at + 1]].tolist()
        sizes = [min(size, tokens - size * place) for place in range(len(own))]
        known = next((place for place, each in enumerate(own) if each not in cached), len(own))
        if at >= skipped:
            hits += sum(sizes[:known])
            total += tokens
        for block, length in zip(reversed(own), reversed(sizes), strict=True):
            used += 0 if block in cached else length
            cached[block] = length
            cached.move_to_end(block)
        while used > kv_tokens:
            used -= cached.popitem(last=False)[1]
    return hits / total


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--kv-tokens", type=float, nargs="+", default=KV_TOKENS)
    args = parser.parse_args(arguments)
    trace = history.read_trace(args.trace)
    rate = float(trace.prompt_tokens.sum() / trace.arrival_ms[-1] * 1000)
    counted, us = count_reuse(args.trace, trace)
    print(f"{us:.1f} us of CPU for a pick")
    learned, exact = build_curve(counted, rate), build_curve(measure_reuse(trace), rate)
    fitted = fit(trace, counted)
    print("| KV tokens | simulated | learned | from all times | fitted conversations, simulated |")
    print("|---|---|---|---|---|")
    for kv_tokens in args.kv_tokens:
        shares = (
            simulate_cache(trace, kv_tokens),
            learned.find_share(kv_tokens),
            exact.find_share(kv_tokens),
            simulate_cache(fitted, kv_tokens, len(trace)),
        )
        print(f"| {kv_tokens:,.0f} | {' | '.join(f'{100 * each:.1f} %' for each in shares)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
