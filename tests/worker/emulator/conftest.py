"""Engines in this process, behind their real HTTP API and KV side channel."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

import aiohttp
import pytest
from aiohttp import web

from cleave.perf import named_profiles
from cleave.perf.model import model_shape
from cleave_worker.emulator.api import EmulatorApi
from cleave_worker.emulator.config import EmulatedEngineConfig, KvTransferConfig
from cleave_worker.emulator.engine import EmulatedEngine
from cleave_worker.emulator.scheduler import EngineLimits


@dataclass
class Server:
    """One engine and its address."""

    engine: EmulatedEngine
    url: str
    session: aiohttp.ClientSession

    async def post(self, body: dict, path: str = "/v1/completions", **headers: str):
        """Status and decoded JSON."""
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def text(self, body: dict) -> str:
        """The continuation of a completion that must succeed."""
        status, answer = await self.post(body)
        assert status == 200, answer
        return answer["choices"][0]["text"]

    async def prefill(self, body: dict) -> dict:
        """kv_transfer_params of a prefill that must succeed."""
        ask = {"do_remote_decode": True, "do_remote_prefill": False}
        status, answer = await self.post({**body, "max_tokens": 1, "kv_transfer_params": ask})
        assert status == 200, answer
        return answer["kv_transfer_params"]

    async def samples(self) -> dict[str, float]:
        """/metrics without the labels that all samples share."""
        async with self.session.get(self.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        shared = re.compile(r'engine="0",|,?model_name="m",?')
        return {shared.sub("", name).replace("{}", ""): float(value) for name, value in pairs}

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait a bounded time for a condition on the engine."""
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that are not free."""
        pool = self.engine.scheduler.pool
        return pool.num_blocks - pool.num_free


@pytest.fixture
def config() -> EmulatedEngineConfig:
    """A fast engine of OPT-13B with KV hand-off on a free port."""
    profile = named_profiles.load_profile("distserve/opt-13b/tp1")
    return EmulatedEngineConfig(
        served_model_name="m",
        shape=model_shape.load_shape("opt-13b"),
        profile=profile,
        max_model_len=2048,
        limits=EngineLimits(max_num_seqs=64, max_num_batched_tokens=512),
        block_size=16,
        num_blocks=profile.kv_capacity_tokens // 16,
        time_scale=0.02,
        kv_transfer=KvTransferConfig("A", "127.0.0.1", 0),
    )


@pytest.fixture
async def serve(config: EmulatedEngineConfig) -> AsyncIterator[Callable]:
    """Start engines: `await serve("B", num_blocks=9, lease_s=1)`."""
    servers: list[tuple[Server, web.AppRunner]] = []

    async def start(engine_id: str = "A", **changes: object) -> Server:
        kv_names = {"lease_s", "recompute_on_failure", "latency_ms", "bandwidth_gbps"}
        kv_changes = {name: changes.pop(name) for name in kv_names & changes.keys()}
        assert config.kv_transfer
        kv = replace(config.kv_transfer, engine_id=engine_id, **kv_changes)
        engine = EmulatedEngine(replace(config, **{"kv_transfer": kv, **changes}))
        app = EmulatorApi(engine, fault_injection=True).build_application()
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await engine.start()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        server = Server(engine, url, aiohttp.ClientSession())
        servers.append((server, runner))
        return server

    yield start
    for server, runner in servers:
        await server.session.close()
        await server.engine.stop()
        await runner.cleanup()
