"""Latency of interactive streams without a batch, beside one, and beside the same requests sent as
ordinary ones, on emulated engines.

README.md says how to read it. Exit code 1: a stream failed, or the batch got no answer.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import result_table  # noqa: E402

from cleave.profiling.client import OpenAIClient, TimedCompletion  # noqa: E402

from e2e.support.deployments import CLEAVE, MARK, Deployment, deployed, emulated  # noqa: E402

NAME = "shared"
UP_S = 120
NUM_REQUESTS = 20_000
"""Of the batch, more than can be answered: it is stopped."""
OUTPUT_TOKENS = 64
RAMP_S = 8.0
"""From the start of a batch to the first stream that is measured."""
CASES = {"alone": "", "beside a batch": "flex", "beside ordinary requests": "default"}
"""Tier of the batch by case; empty: there is none."""


def main() -> int:
    """Measure all cases; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each case")
    parser.add_argument("--rate", type=float, default=1.5, help="interactive requests per second")
    parser.add_argument("--ttft-ms", type=int, default=400)
    parser.add_argument("--tpot-ms", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="5 s of each case")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    seconds = 5.0 if options.quick else options.seconds
    manifest: dict[str, Any] = emulated(NAME, 1, 1, 1.0)
    manifest["spec"]["slo"] = {"ttftMs": options.ttft_ms, "tpotMs": options.tpot_ms}
    manifest["spec"]["pools"] = {"flipping": "Off"}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with deployed(manifest, folder, UP_S) as deployment:
            for case, tier in CASES.items():
                batch = run_batch(deployment, folder, tier) if tier else nullcontext({})
                with batch as counted:
                    streams = asyncio.run(measure(deployment.url, options.rate, seconds))
                rows.append({"case": case, **summarize(streams), **counted})
                print(rows[-1], file=sys.stderr, flush=True)
    result_table.show({"interactive streams": rows}, options.output, 130, format_cell)
    return 0 if rows[1]["batch req/s"] else 1


@contextmanager
def run_batch(deployment: Deployment, folder: Path, tier: str) -> Iterator[dict[str, float]]:
    """A batch that runs until the block ends; yields what then has its requests and tokens per
    second."""
    file = folder / f"{tier}.jsonl"
    rng = random.Random(tier)
    with file.open("w") as out:
        for number in range(NUM_REQUESTS):
            body = {
                "model": NAME,
                "prompt": [rng.randrange(1_000, 30_000) for _ in range(rng.randint(50, 400))],
                "max_tokens": rng.randint(32, 128),
                "ignore_eos": True,
                "service_tier": tier,
            }
            line = {"custom_id": str(number), "url": "/v1/completions", "body": body}
            out.write(json.dumps(line) + "\n")
    started = time.monotonic()
    process = subprocess.Popen(
        [CLEAVE, "batch", file, "--endpoint", deployment.url, "-o", "json"],
        env=os.environ | {MARK: str(deployment.state_dir)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    counted: dict[str, float] = {}
    try:
        time.sleep(RAMP_S)
        yield counted
    finally:
        process.terminate()
        summary = json.loads(process.communicate(timeout=60)[0])
        seconds = time.monotonic() - started
        counted["batch req/s"] = summary["succeeded"] / seconds
        counted["batch tokens/s"] = summary["output_tokens"] / seconds


async def measure(url: str, rate: float, seconds: float) -> list[TimedCompletion]:
    """Streams that arrive at random (Poisson) for so long; the same ones in every case."""
    rng, client, loop = random.Random(7), OpenAIClient(url, NAME), asyncio.get_running_loop()
    started, tasks = loop.time(), []
    at = rng.expovariate(rate)
    while at < seconds:
        await asyncio.sleep(max(0.0, started + at - loop.time()))
        prompt = [rng.randrange(1_000, 30_000) for _ in range(rng.randint(50, 400))]
        tasks.append(asyncio.create_task(client.complete(prompt, OUTPUT_TOKENS)))
        at += rng.expovariate(rate)
    return await asyncio.gather(*tasks)


def summarize(streams: Sequence[TimedCompletion]) -> dict[str, float]:
    """Quantiles of the latencies, in ms."""
    ttfts = sorted(stream.ttft_ms for stream in streams)
    tpots = sorted(
        (stream.latency_ms - stream.ttft_ms) / (stream.num_tokens - 1) for stream in streams
    )
    return {
        "streams": len(streams),
        "TTFT p50": pick_quantile(ttfts, 0.5),
        "TTFT p99": pick_quantile(ttfts, 0.99),
        "TPOT p50": pick_quantile(tpots, 0.5),
        "TPOT p99": pick_quantile(tpots, 0.99),
        "batch req/s": 0.0,
        "batch tokens/s": 0.0,
    }


def pick_quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def format_cell(column: str, value: object) -> str:
    """The text of a cell."""
    return f"{value:.1f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
