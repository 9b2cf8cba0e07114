"""Prompt tokens that an emulated fleet computes, and TTFT, on conversations, by dispatch policy.

Run from the root: `.venv/bin/python benchmarks/conversations/run.py`. README.md says what is sent.
The second half of each run counts.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from cleave.rpc.engine_key import build_headers  # noqa: E402
from cleave.rpc.v1.agent_pb2 import ROLE_DECODE  # noqa: E402

from e2e.chaos.gateways import Gateway  # noqa: E402
from e2e.support.deployments import Deployment, deployed, emulated  # noqa: E402

NAME = "conversations"
UP_S = 120
THINK_S = 2.0
"""Mean time between an answer and the next turn."""
OUTPUT_TOKENS = 40
TURNS = 3, 9
"""Turns of a conversation."""
SYSTEM_BYTES, TURN_BYTES = 2_000, (400, 2_400)
SYSTEMS = 4
"""Different system prompts."""


@dataclass(slots=True)
class Measured:
    """What clients saw, and what engines counted, in the second half."""

    ttft_ms: list[float] = field(default_factory=list)
    tokens: dict[str, float] = field(default_factory=dict)
    """Prompt tokens by source, from all engines."""
    failed: int = 0


def main() -> int:
    """Run all policies; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", action="append", help="spec.routing.policy")
    parser.add_argument("--mixed", type=int, default=4)
    parser.add_argument("--prefill", type=int, default=0, help="with as many decode instances")
    parser.add_argument("--processes", type=int, default=1, help="of the gateway")
    parser.add_argument("--gateways", type=int, default=1, help="a turn goes to any of them")
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    print(
        "| policy | prompt tokens | computed | share cached | TTFT p50 | p99 | turns | predicted |"
    )
    print("|---|---|---|---|---|---|---|---|")
    failed = 0
    for policy in options.policy or ["ShortestWait", "PrefixAware"]:
        with (
            tempfile.TemporaryDirectory() as folder,
            deployed(build_manifest(options, policy), Path(folder), UP_S) as deployment,
        ):
            others = [
                Gateway(f"other-{number}", deployment, Path(folder), options=("--policy", policy))
                for number in range(1, options.gateways)
            ]
            try:
                for gateway in others:
                    gateway.start()
                urls = [deployment.url, *(each.url for each in others)]
                measured = asyncio.run(converse(deployment, urls, options))
                show(policy, measured, read_predicted_share(deployment))
            finally:
                for gateway in others:
                    gateway.kill()
            failed += measured.failed
    return 1 if failed else 0


def build_manifest(options: argparse.Namespace, policy: str) -> dict[str, object]:
    """The fleet."""
    manifest: dict[str, Any] = emulated(NAME, options.prefill, options.prefill, 1.0)
    spec = manifest["spec"]
    if not options.prefill:
        spec["placement"] = {"manual": [{"role": "mixed", "replicas": options.mixed}]}
    spec["routing"] = {"policy": policy}
    spec["gateway"] = {"processes": options.processes}
    spec["pools"] = {"flipping": "Off"}
    return manifest


async def converse(
    deployment: Deployment, urls: list[str], options: argparse.Namespace
) -> Measured:
    """Hold conversations for a while, several at a time."""
    measured = Measured()
    half_s = options.seconds / 2
    counts_from = time.monotonic() + half_s
    ends_at = counts_from + half_s
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        talks = [
            asyncio.create_task(talk(session, urls, number, measured, counts_from, ends_at))
            for number in range(options.sessions)
        ]
        await asyncio.sleep(half_s)
        before = read_sources(deployment)
        await asyncio.sleep(half_s)
        after = read_sources(deployment)
        await asyncio.gather(*talks)
    measured.tokens = {source: after[source] - before[source] for source in after}
    return measured


async def talk(
    session: aiohttp.ClientSession,
    urls: list[str],
    number: int,
    measured: Measured,
    counts_from: float,
    ends_at: float,
) -> None:
    """One conversation after the other, each with the whole history in every turn."""
    rng = random.Random(number)
    systems = [make_words(random.Random(1_000 + n), SYSTEM_BYTES) for n in range(SYSTEMS)]
    await asyncio.sleep(rng.uniform(0, THINK_S))
    while time.monotonic() < ends_at:
        messages = [{"role": "system", "content": rng.choice(systems)}]
        for _ in range(rng.randint(*TURNS)):
            if time.monotonic() > ends_at:
                return
            messages.append({"role": "user", "content": make_words(rng, rng.randint(*TURN_BYTES))})
            answer, ttft_ms = await ask(session, rng.choice(urls), messages)
            if time.monotonic() > counts_from:
                measured.failed += not answer
                measured.ttft_ms.append(ttft_ms)
            messages.append({"role": "assistant", "content": answer})
            await asyncio.sleep(rng.expovariate(1 / THINK_S))


async def ask(
    session: aiohttp.ClientSession, url: str, messages: list[dict[str, str]]
) -> tuple[str, float]:
    """(the answer, ms to its first token)"""
    body = {"model": NAME, "messages": messages, "max_tokens": OUTPUT_TOKENS, "stream": True}
    started, first_s, parts = time.monotonic(), 0.0, []
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            delta = json.loads(line[6:])["choices"][0]["delta"]
            if text := delta.get("content"):
                first_s = first_s or time.monotonic() - started
                parts.append(text)
    return "".join(parts), first_s * 1000


def make_words(rng: random.Random, size: int) -> str:
    """Text of words."""
    letters = "etaoinshrdlu"
    words = ("".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(size // 4))
    return " ".join(words)[:size]


def read_sources(deployment: Deployment) -> dict[str, float]:
    """Prompt tokens by source: computed, cached or pulled; of all engines that compute prompts."""
    found: dict[str, float] = {}
    for registration in deployment.instances().values():
        if registration.role == ROLE_DECODE:
            continue
        page = read_page(f"{registration.engine_url}/metrics", registration.engine_key)
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == "vllm:prompt_tokens_by_source_total":
                    source = sample.labels["source"]
                    found[source] = found.get(source, 0.0) + sample.value
    return found


def read_predicted_share(deployment: Deployment) -> float:
    """The share that the gateway predicted since the start."""
    totals = {"prompt": 0.0, "hit": 0.0}
    for family in text_string_to_metric_families(read_page(f"{deployment.url}/metrics", "")):
        for sample in family.samples:
            for kind in totals:
                is_kind = sample.name == f"cleave_gateway_cache_{kind}_tokens_total"
                if is_kind and sample.labels["source"] == "predicted":
                    totals[kind] += sample.value
    return totals["hit"] / totals["prompt"] if totals["prompt"] else 0.0


def read_page(url: str, engine_key: str) -> str:
    """A page of metrics."""
    return httpx.get(url, headers=build_headers(engine_key), timeout=10).text


def show(policy: str, measured: Measured, predicted: float) -> None:
    """One row."""
    tokens = measured.tokens
    pulled = tokens.get("external_kv_transfer", 0.0)
    total = sum(tokens.values()) - pulled
    computed, cached = tokens["local_compute"], tokens["local_cache_hit"]
    ttft = statistics.quantiles(measured.ttft_ms, n=100)
    print(
        f"| {policy} | {total:,.0f} | {computed:,.0f} | {cached / total:.1%}"
        f" | {ttft[49]:.0f} ms | {ttft[98]:.0f} ms | {len(measured.ttft_ms)} | {predicted:.1%} |",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
