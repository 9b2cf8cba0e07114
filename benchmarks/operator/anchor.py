"""The anchor: how fast this control plane makes pods for a client that does nothing else.

The pods are those of a deployment's workers, so objects and requests are of the operator's
size. It runs before the operator starts, on the same nodes, and leaves nothing behind.
"""

import asyncio
import time
from dataclasses import dataclass

from sightings import Sightings, Stage, poll

from cleave.api.pool import InstancePool
from cleave.manifests.worker import build_worker_pod

from e2e.cluster.client import Client, Manifest

NAMESPACE = "anchor"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
MAX_PODS = 1_000
AT_ONCE = 32
LIMIT_S = 300


@dataclass(frozen=True, slots=True)
class Anchor:
    """Pods made by a bare client."""

    pods: int
    created_s: float
    """From the first request until the last pod was seen."""
    scheduled_s: float
    ready_s: float


async def measure_anchor(api: Client, num_pods: int) -> Anchor:
    """Create at most MAX_PODS pods, AT_ONCE at a time, then delete them."""
    count = min(num_pods, MAX_PODS)
    await api.post("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    await _wait_for_account(api)
    seen = Sightings()
    watch = asyncio.create_task(api.follow(PODS, seen.listed, seen.saw))
    slots = asyncio.Semaphore(AT_ONCE)

    async def create(name: str) -> None:
        async with slots:
            await api.post(PODS, build_pod(name))

    async def delete(name: str) -> None:
        async with slots:
            await api.delete(f"{PODS}/{name}", {"gracePeriodSeconds": 0})

    names = [f"bare-{n}" for n in range(count)]
    began = time.monotonic()
    try:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*map(create, names))
            await seen.all_ready(count)
    finally:
        watch.cancel()
    created, scheduled, ready = (max(seen.times[stage].values()) - began for stage in Stage)
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*map(delete, names))

    async def is_empty() -> bool:
        return not (await api.get(f"{PODS}?limit=1"))["items"]

    await poll(is_empty, LIMIT_S)
    return Anchor(count, created, scheduled, ready)


def build_pod(name: str) -> Manifest:
    """A decode worker's pod that depends on no other object."""
    pool = InstancePool.model_validate(
        {
            "metadata": {"name": "bare-decode", "namespace": NAMESPACE},
            "spec": {
                "deployment": "bare",
                "revision": "0",
                "role": "decode",
                "replicas": 1,
                "model": {"source": "facebook/opt-13b"},
                "engine": {"type": "Emulated"},
            },
        }
    )
    return build_worker_pod(pool, name)


async def _wait_for_account(api: Client) -> None:
    """Pods are admitted once the namespace has its default service account."""

    async def has_account() -> bool:
        accounts = await api.get(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts")
        return bool(accounts["items"])

    await poll(has_account, LIMIT_S)
