"""An API server for discovery."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.support.fake_api_server import FakeApiServer, build_slice, serve_slices

PATIENCE_S = 15


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApiServer]:
    """An API server, and KUBECONFIG that leads to it."""
    config = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(config))
    async with serve_slices(config) as fake:
        yield fake


@pytest.fixture
def until() -> Callable[[Callable[[], bool], str], object]:
    async def wait(condition: Callable[[], bool], what: str) -> None:
        for _ in range(PATIENCE_S * 100):
            if condition():
                return
            await asyncio.sleep(0.01)
        pytest.fail(f"not within {PATIENCE_S} s: {what}")

    return wait


@pytest.fixture
def make_slice() -> Callable[..., dict]:
    return build_slice
