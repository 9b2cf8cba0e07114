"""When pods were seen to be created, scheduled and ready, by a watch from outside."""

import asyncio
import math
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from e2e.cluster.client import Manifest


class Stage(Enum):
    """What a pod reaches, one after the other."""

    CREATED = "created"
    SCHEDULED = "scheduled"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Waits:
    """From the apply of a deployment until its pods reached a stage."""

    p50_s: float
    p99_s: float
    all_s: float
    """From the first apply to the last pod."""


class Sightings:
    """Times of pods by stage and uid."""

    def __init__(self) -> None:
        self.times: dict[Stage, dict[str, float]] = {stage: {} for stage in Stage}
        self._deployments: dict[str, str] = {}
        self._news = asyncio.Event()

    async def all_ready(self, count: int) -> None:
        """Wait until so many pods are ready."""
        while len(self.times[Stage.READY]) < count:
            self._news.clear()
            await self._news.wait()

    def listed(self, pods: list[Manifest]) -> None:
        for pod in pods:
            self.saw({"type": "ADDED", "object": pod})

    def saw(self, event: Manifest) -> None:
        pod, now = event["object"], time.monotonic()
        uid = pod["metadata"]["uid"]
        self._deployments[uid] = pod["metadata"]["labels"]["cleave.dev/deployment"]
        self.times[Stage.CREATED].setdefault(uid, now)
        if pod["spec"].get("nodeName"):
            self.times[Stage.SCHEDULED].setdefault(uid, now)
        if is_ready(pod):
            self.times[Stage.READY].setdefault(uid, now)
        self._news.set()

    def compute_waits(self, applied: Mapping[str, float]) -> dict[Stage, Waits]:
        """By stage; `applied`: when each deployment was sent. Of those, every pod counts."""
        began = min(applied.values())
        found: dict[Stage, Waits] = {}
        for stage, times in self.times.items():
            waits = [
                at - applied[name]
                for uid, at in times.items()
                if (name := self._deployments[uid]) in applied
            ]
            last = max(at for uid, at in times.items() if self._deployments[uid] in applied)
            found[stage] = Waits(
                statistics.median(waits), find_percentile(waits, 0.99), last - began
            )
        return found


async def poll(
    condition: Callable[[], Awaitable[object]], limit_s: float, period_s: float = 0.5
) -> None:
    """Wait until the condition holds. Raises TimeoutError."""
    async with asyncio.timeout(limit_s):
        while True:
            if await condition():
                return
            await asyncio.sleep(period_s)


def is_ready(pod: Manifest) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def find_percentile(values: list[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]
