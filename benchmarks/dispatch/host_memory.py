"""What dispatch that knows of host memory for KV brings, in the simulator.

`python benchmarks/dispatch/host_memory.py [--quick] [--sizes 4 8] [--gib 256]`, less than a minute
on one core once the simulator is compiled. Mooncake's conversation trace at other rates. Compared
are instances without host memory, with it where dispatch counts on GPUs only, as before decision
136, and where it counts on both.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

import caches
import numpy as np
from fleets import Worker, worker
from pulls import print_row

from cleave.simulator import run
from cleave.simulator.fleet import SimulatedFleet, SimulatedPool
from cleave.simulator.outcome import SimulationResult
from cleave.simulator.trace import Trace

RATES = (0.15, 0.24, 0.3)
"""req/s per instance."""
TTFT_MS, TPOT_MS = 10_000, 200
COLUMNS = (
    "instances", "req/s", "host memory, GiB", "dispatch counts on", "computed", "on GPU",
    "in host memory", "TTFT mean, ms", "P50", "P99", "in time",
)  # fmt: skip


def serve(fleet: SimulatedFleet, trace: Trace, *, is_known: bool) -> SimulationResult:
    """`is_known`: whether dispatch counts on host memory."""
    prepared = run.prepare_fleet(fleet)
    if not is_known:
        prepared.instances["host_tokens"] = 0
    return run.simulate(prepared, trace)


def build_fleet(one: Worker, count: int, gib: int) -> SimulatedFleet:
    """Mixed instances with so much host memory each."""
    engine = replace(
        one.engine(most_tokens=8192),
        host_capacity_tokens=(gib << 30) // one.estimate.kv_bytes_per_token,
        host_token_ms=one.estimate.host_token_ms,
    )
    return SimulatedFleet(mixed=(SimulatedPool(engine, count),))


def describe(result: SimulationResult) -> list[str]:
    """Shares of the prompt tokens, TTFT in ms and share of requests in time, as cells."""
    tokens = result.prompt_tokens.sum()
    shares = (
        result.instances.prompt_tokens.sum() / tokens,
        result.cached_tokens.sum() / tokens,
        result.loaded_tokens.sum() / tokens,
    )
    times = result.ttft_ms.mean(), *np.percentile(result.ttft_ms, (50, 99))
    return [
        *(f"{each:.3f}" for each in shares),
        *(f"{each:,.0f}" for each in times),
        f"{result.compute_attainment(TTFT_MS, TPOT_MS):.3f}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few requests; do not quote figures")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8], help="instances")
    parser.add_argument("--gib", type=int, nargs="+", default=[128, 256, 512], help="of each")
    args = parser.parse_args(arguments)
    trace = caches.read_trace().take_first(500 if args.quick else 4_000)
    one = worker("llama-2-70b", "H100-SXM-80GB", 4)
    estimate = one.estimate
    print(
        f"{one.name}: {estimate.kv_capacity_tokens:,} tokens of KV an instance, "
        f"{(1 << 30) / estimate.kv_bytes_per_token:,.0f} in a GiB, "
        f"{1000 * estimate.host_token_ms:.2f} us to copy one back\n"
    )
    print_row(*COLUMNS)
    print("|---" * len(COLUMNS) + "|")
    for count in args.sizes:
        for each in RATES:
            rate = each * count
            scaled = replace(trace, arrival_ms=trace.arrival_ms * (trace.rate / rate))
            start = [str(count), f"{rate:.2f}"]
            plain = serve(build_fleet(one, count, 0), scaled, is_known=True)
            print_row(*start, "0", "GPUs", *describe(plain))
            for gib in args.gib:
                fleet = build_fleet(one, count, gib)
                for is_known in (False, True):
                    counts_on = "both" if is_known else "GPUs"
                    result = serve(fleet, scaled, is_known=is_known)
                    print_row(*start, str(gib), counts_on, *describe(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
