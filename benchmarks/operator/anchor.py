"""The anchor: how fast this control plane makes pods for a client that does nothing else.

The pods are those of a deployment's workers, so objects and requests are as large as the operator's.
It runs before the operator starts, on the same nodes, and leaves nothing behind.
"""

import asyncio
import time
from dataclasses import dataclass

from cleave.api.pool import InstancePool
from cleave.manifests.worker import build_worker_pod

from e2e.cluster.client import Client, Manifest
from sightings import Sightings, Stage

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

    began = time.monotonic()
    try:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(create(f"bare-{n}") for n in range(count)))
            await seen.all_ready(count)
    finally:
        watch.cancel()
    created, scheduled, ready = (max(seen.times[stage].values()) - began for stage in Stage)
    await api.delete(PODS, {"gracePeriodSeconds": 0})
    async with asyncio.timeout(LIMIT_S):
        while (await api.get(f"{PODS}?limit=1"))["items"]:
            await asyncio.sleep(0.5)
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
    pod = build_worker_pod(pool, name)
    del pod["spec"]["serviceAccountName"]
    return pod


async def _wait_for_account(api: Client) -> None:
    """Pods are admitted once the namespace has its default service account."""
    accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
    async with asyncio.timeout(LIMIT_S):
        while not (await api.get(accounts))["items"]:
            await asyncio.sleep(0.2)
