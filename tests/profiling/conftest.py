"""An emulated engine in this process, behind its real HTTP API."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest
from aiohttp import web

from cleave.perf import named_profiles
from cleave.perf.model import model_shape
from cleave_worker.emulator.api import EmulatorApi
from cleave_worker.emulator.config import EmulatedEngineConfig
from cleave_worker.emulator.engine import EmulatedEngine
from cleave_worker.emulator.scheduler import EngineLimits


@dataclass
class Running:
    """One engine and its address."""

    engine: EmulatedEngine
    url: str


Serve = Callable[..., Awaitable[Running]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts engines: `await serve(time_scale=..., max_num_batched_tokens=...)`."""
    closers = []

    async def start(time_scale: float = 0.01, max_num_batched_tokens: int = 512) -> Running:
        profile = named_profiles.load_profile("distserve/opt-13b/tp1")
        config = EmulatedEngineConfig(
            served_model_name="m",
            shape=model_shape.load_shape("opt-13b"),
            profile=profile,
            max_model_len=2048,
            limits=EngineLimits(max_num_seqs=64, max_num_batched_tokens=max_num_batched_tokens),
            block_size=16,
            num_blocks=profile.kv_capacity_tokens // 16,
            time_scale=time_scale,
        )
        engine = EmulatedEngine(config)
        await engine.start()
        runner = web.AppRunner(EmulatorApi(engine).build_application(), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, reuse_address=True).start()
        closers.append((engine, runner))
        host, port = runner.addresses[0][:2]
        return Running(engine, f"http://{host}:{port}")

    yield start
    for engine, runner in closers:
        await engine.stop()
        await runner.cleanup()
