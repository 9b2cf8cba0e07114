"""How long a flip takes, on emulated engines or on vLLM's: from the order to the first request that
ran as the new role wants.

The prefill instance of a pair with a mixed instance becomes a decode instance and back, over and
over. Clients ask; the answer's headers name who served them. The time counts from just before the
order to the moment when the first such request was sent, and when it was answered.
"""

import asyncio
import contextlib
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import numpy as np

from cleave.local.tiny_model import build
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

sys.path.append(str(Path(__file__).parents[2]))

from e2e.support.deployments import Deployment, deployed, emulated

TIME_SCALE = 0.02
CLIENTS = {"idle": 0, "loaded": 8}
"""That ask all the time. In an idle fleet somebody asks after each order, until the new role has
served it."""
_WAIT_S = 60.0
_PREFILL = "x-cleave-prefill"


@dataclass
class Seen:
    """What clients have seen."""

    split: tuple[float, float] = (0.0, 0.0)
    """When the newest request that was split had been sent, and answered."""
    whole: tuple[float, float] = (0.0, 0.0)
    requests: int = 0
    failed: int = 0
    wrong: int = 0
    news: asyncio.Condition = field(default_factory=asyncio.Condition)
    expected: dict[int, str] = field(default_factory=dict)
    """The first answer to each question."""


def run(flips: int, vllm: bool) -> list[dict[str, object]]:
    """A row for an idle and one for a loaded fleet."""
    with tempfile.TemporaryDirectory() as folder:
        manifest = emulated("flips", 1, 1, time_scale=TIME_SCALE)
        spec = manifest["spec"]
        assert isinstance(spec, dict)
        spec["pools"] = {"flipping": "Off"}
        spec["placement"]["manual"][1]["role"] = "mixed"
        if vllm:
            spec["engine"] = {"scheduling": {"order": "ShortestFirst"}}
            spec["model"] |= {"source": str(_build(folder)), "dtype": "float32"}
            spec["model"]["maxModelLen"] = 2048
        with deployed(manifest, Path(folder), 600) as deployment:
            return [
                asyncio.run(_measure(deployment, name, clients, flips))
                for name, clients in CLIENTS.items()
            ]


def _build(folder: str) -> Path:
    model = Path(folder) / "tiny"
    build(model)
    return model


async def _measure(
    deployment: Deployment, name: str, clients: int, flips: int
) -> dict[str, object]:
    (file,) = deployment.state_dir.rglob("agents")
    seen, sent, answered = Seen(), [], []
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
        address, agent, epoch = await _find_prefill(stack, file.read_text().split(), deployment)
        asking = [asyncio.create_task(_ask(client, deployment, seen, n)) for n in range(clients)]
        try:
            for turn in range(flips):
                to_decode = turn % 2 == 0
                role = agent_pb2.ROLE_DECODE if to_decode else agent_pb2.ROLE_PREFILL
                begun = time.perf_counter()
                order = agent_pb2.SetRoleRequest(role=role, epoch=epoch + turn + 1)
                await agent.SetRole(order, metadata=deployment.sign(address))
                while not clients and (seen.whole if to_decode else seen.split)[0] < begun:
                    await _ask_once(client, deployment, seen, clients)
                first = await _wait(seen, to_decode, begun)
                if not to_decode:
                    # A mixed instance may serve a whole request at any time, so only this shows it.
                    sent.append(first[0] - begun)
                    answered.append(first[1] - begun)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
    return {
        "fleet": name,
        "flips": flips,
        "sent_p50_ms": float(np.percentile(sent, 50)) * 1_000,
        "sent_p99_ms": float(np.percentile(sent, 99)) * 1_000,
        "answered_p50_ms": float(np.percentile(answered, 50)) * 1_000,
        "answered_p99_ms": float(np.percentile(answered, 99)) * 1_000,
        "requests": seen.requests,
        "failed": seen.failed,
        "wrong": seen.wrong,
    }


async def _find_prefill(
    stack: contextlib.AsyncExitStack, addresses: list[str], deployment: Deployment
) -> "tuple[str, agent_pb2_grpc.AgentAsyncStub, int]":
    """The address and agent of the instance that prefills, and its epoch."""
    for address in addresses:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        agent = agent_pb2_grpc.AgentStub(channel)
        request, own = agent_pb2.HealthRequest(), deployment.sign(address)
        health = await agent.Health(request, timeout=5, metadata=own)
        registration = health.registration
        if registration.home == agent_pb2.ROLE_PREFILL:
            return address, agent, registration.epoch
    raise RuntimeError("no prefill instance")


async def _ask(client: httpx.AsyncClient, deployment: Deployment, seen: Seen, number: int) -> None:
    """Ask the same again and again."""
    while True:
        await _ask_once(client, deployment, seen, number)


async def _ask_once(
    client: httpx.AsyncClient, deployment: Deployment, seen: Seen, number: int
) -> None:
    body = {"model": deployment.name, "prompt": f"question {number} " * 5, "max_tokens": 2}
    body |= {"temperature": 0}
    sent = time.perf_counter()
    answer = await client.post(f"{deployment.url}/v1/completions", json=body)
    seen.requests += 1
    if answer.status_code != httpx.codes.OK:
        seen.failed += 1
        return
    text = answer.json()["choices"][0]["text"]
    seen.wrong += text != seen.expected.setdefault(number, text)
    async with seen.news:
        now = time.perf_counter()
        if _PREFILL in answer.headers:
            seen.split = max(seen.split, (sent, now))
        else:
            seen.whole = max(seen.whole, (sent, now))
        seen.news.notify_all()


async def _wait(seen: Seen, whole: bool, begun: float) -> tuple[float, float]:
    """When the first request was sent, after `begun`, that ran that way; and answered."""
    async with asyncio.timeout(_WAIT_S), seen.news:
        while (at := seen.whole if whole else seen.split)[0] < begun:
            await seen.news.wait()
    return at
