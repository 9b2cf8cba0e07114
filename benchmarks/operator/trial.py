"""One trial: deployments are applied, and what becomes of them is watched from outside."""

import asyncio
import math
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass

import psutil
from operator_process import Operator, Reading

from e2e.cluster.client import Client, Manifest

DEPLOYMENTS = "/apis/cleave.dev/v1alpha1/namespaces/default/llmdeployments"
WORKERS = "/api/v1/namespaces/default/pods?labelSelector=cleave.dev/component%3Dworker"
APPLIED_AT_ONCE = 32
SETTLED_S = 5.0
"""Without a write for so long, the operator has come to rest."""


@dataclass(frozen=True, slots=True)
class Case:
    """The load that a case creates."""

    name: str
    deployments: int
    prefill: int
    """Instances of each deployment."""
    decode: int
    limit_s: float

    @property
    def pods(self) -> int:
        return self.deployments * (self.prefill + self.decode)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one trial showed."""

    case: Case
    created_p50_s: float
    """From the moment a deployment was applied until a worker pod of it was seen."""
    created_p99_s: float
    all_created_s: float
    """From the first apply to the last pod."""
    all_ready_s: float
    work: Reading
    """Of the operator, from the first apply until it rested."""
    cpu_us_per_event: float
    peak_mib: float
    rest: Reading
    """Of the operator, over a time in which nothing changed but a resync came."""
    others_cores: float
    """Cores that processes of no part in it took meanwhile: with them the waits are longer."""


class Sightings:
    """When pods were seen, by deployment."""

    def __init__(self) -> None:
        self.created: dict[str, list[float]] = defaultdict(list)
        self.num_created = 0
        self.last_created_s = 0.0
        self.last_ready_s = 0.0
        self._news = asyncio.Event()
        self._ready: set[str] = set()
        self._known: set[str] = set()

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    async def all_ready(self, count: int) -> None:
        """Wait until so many pods are made and ready."""
        while min(self.num_created, self.num_ready) < count:
            self._news.clear()
            await self._news.wait()

    def listed(self, pods: list[Manifest]) -> None:
        for pod in pods:
            self.saw({"type": "ADDED", "object": pod})

    def saw(self, event: Manifest) -> None:
        pod, now = event["object"], time.monotonic()
        self._news.set()
        uid = pod["metadata"]["uid"]
        if uid not in self._known:
            self._known.add(uid)
            self.created[pod["metadata"]["labels"]["cleave.dev/deployment"]].append(now)
            self.num_created += 1
            self.last_created_s = now
        if uid not in self._ready and is_ready(pod):
            self._ready.add(uid)
            self.last_ready_s = now


async def run_trial(api: Client, operator: Operator, case: Case, rest_s: float) -> Outcome:
    """Apply, watch, wait until all is at rest, then wait `rest_s` more. Raises TimeoutError."""
    seen = Sightings()
    watch = asyncio.create_task(api.follow(WORKERS, seen.listed, seen.saw))
    # Its watches come up in the seconds after it begins to lead.
    await rest(operator)
    before, began, foreign_s = operator.read(), time.monotonic(), count_foreign_s()
    try:
        async with asyncio.timeout(case.limit_s):
            applied = await apply_all(api, case)
            await seen.all_ready(case.pods)
            settled = await rest(operator)
        work = settled - before
        foreign_s = count_foreign_s() - foreign_s
        await asyncio.sleep(rest_s)
        idle = operator.read() - settled
    finally:
        watch.cancel()
    waits = [at - applied[name] for name, times in seen.created.items() for at in times]
    if seen.num_created != case.pods:
        raise RuntimeError(f"{seen.num_created} pods were made where {case.pods} were asked for")
    return Outcome(
        case=case,
        created_p50_s=statistics.median(waits),
        created_p99_s=find_percentile(waits, 0.99),
        all_created_s=seen.last_created_s - began,
        all_ready_s=seen.last_ready_s - began,
        work=work,
        cpu_us_per_event=1e6 * work.cpu_s / max(work.events, 1),
        peak_mib=operator.peak_mib,
        rest=idle,
        others_cores=foreign_s / work.at_s,
    )


async def apply_all(api: Client, case: Case) -> dict[str, float]:
    """Create every deployment; when each was sent, by name."""
    applied: dict[str, float] = {}
    slots = asyncio.Semaphore(APPLIED_AT_ONCE)

    async def apply(name: str) -> None:
        async with slots:
            applied[name] = time.monotonic()
            await api.post(DEPLOYMENTS, manifest(name, case))

    await asyncio.gather(*(apply(f"chat-{n}") for n in range(case.deployments)))
    return applied


async def rest(operator: Operator) -> Reading:
    """Wait until the operator writes no more."""
    reading = await asyncio.to_thread(operator.read)
    while True:
        await asyncio.sleep(SETTLED_S)
        newer = await asyncio.to_thread(operator.read)
        if newer.writes == reading.writes and not newer.queued:
            return newer
        reading = newer


def manifest(name: str, case: Case) -> Manifest:
    """A deployment placed by hand: the planner's time is not what is measured."""
    return {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": "facebook/opt-13b", "servedName": name},
            "slo": {"ttftMs": 400, "tpotMs": 40},
            "engine": {"type": "Emulated"},
            "planning": {"mode": "Manual"},
            "placement": {
                "manual": [
                    {"role": "prefill", "replicas": case.prefill},
                    {"role": "decode", "replicas": case.decode},
                ]
            },
        },
    }


def count_foreign_s() -> float:
    """CPU seconds of this machine since its start, less those of this process and its children."""
    total = psutil.cpu_times()
    own = psutil.Process()
    family = [own.cpu_times(), *(child.cpu_times() for child in own.children(recursive=True))]
    busy = total.user + total.nice + total.system + total.irq + total.softirq
    return busy - sum(times.user + times.system for times in family)


def is_ready(pod: Manifest) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def find_percentile(values: list[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]
