"""Engines for tests of translated APIs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest


@pytest.fixture
async def fleet(make_fleet):
    """Emulated engines: two of each role."""
    return await make_fleet({"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"})


@pytest.fixture
def one_loss():
    """A block in which decode engines lose streams until one has been lost; it must continue."""

    @asynccontextmanager
    async def lose(stage, engines, after_tokens: int) -> AsyncIterator[None]:
        for name in ("d1", "d2"):
            engines[name].engine.faults.drop = after_tokens
        metrics = stage.context.metrics

        async def recover() -> None:
            await stage.until(lambda: metrics.retries["decode", "lost"] > 0, "lost")
            for emulated in engines.values():
                emulated.engine.faults.clear()

        recovery = asyncio.create_task(recover())
        yield
        await recovery
        assert {how for _, how in metrics.recoveries} == {"continued"}

    return lose
