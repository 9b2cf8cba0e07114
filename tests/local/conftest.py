"""Pods that are small Python programs, and a kubelet to run them."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cleave.local.kubelet.kubelet import Kubelet
from cleave.local.kubelet.node import LocalNode

Pod = dict[str, Any]
WAIT_S = 20


@pytest.fixture
def pod() -> Callable[..., Pod]:
    """Builds a pod that runs a Python text."""

    def build(name: str, code: str, **spec: Any) -> Pod:
        container = {
            "name": "main",
            "image": "none",
            "command": ["python", "-u", "-c"],
            "args": [code],
            **spec.pop("container", {}),
        }
        labels = spec.pop("labels", {})
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default", "labels": labels},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 5, **spec},
        }

    return build


@pytest.fixture
def node() -> LocalNode:
    return LocalNode(name="here", cores=frozenset({0, 1}), memory_bytes=2**34)


@pytest.fixture
async def kubelet(tmp_path: Path, node: LocalNode) -> AsyncIterator[Kubelet]:
    async with Kubelet(node, tmp_path / "chat") as running:
        yield running


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Waits for something to come true; fails when it does not."""

    async def wait(condition: Callable[[], object]) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, "it did not come true"
            await asyncio.sleep(0.02)

    return wait
