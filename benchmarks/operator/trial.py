"""One trial: deployments are applied, and what becomes of them is watched from outside."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import psutil
from anchor import AT_ONCE, Anchor, measure_anchor
from api_server import ApiServerReading, parse
from operator_process import Operator, Reading
from sightings import Sightings, Stage, Waits, is_ready, poll

from e2e.cluster.client import Client, Manifest

DEPLOYMENTS = "/apis/cleave.dev/v1alpha1/namespaces/default/llmdeployments"
WORKERS = "/api/v1/namespaces/default/pods?labelSelector=cleave.dev/component%3Dworker"
SETTLED_S = 5.0
"""Without a write for so long, the operator has come to rest."""
MAX_SETTLING_S = 600
POLL_S = 1.0
FAILOVER_LIMIT_S = 300


@dataclass(frozen=True, slots=True)
class Case:
    """The load that a case creates."""

    name: str
    nodes: int
    deployments: int
    prefill: int
    """Instances of each deployment."""
    decode: int
    limit_s: float

    @property
    def pods(self) -> int:
        """Of workers; each deployment has two gateways besides."""
        return self.deployments * (self.prefill + self.decode)


@dataclass(frozen=True, slots=True)
class Failover:
    """The leader is killed, a standby takes over."""

    filled_s: float
    """From the standby's start until its cache was filled."""
    filled_cpu_s: float
    leading_s: float
    """From SIGKILL until the standby led: at least what is left of the Lease."""
    settled_s: float
    """From then until it had nothing to do."""
    work: Reading
    """Of the standby, from SIGKILL until it rested."""
    peak_mib: float


@dataclass(frozen=True, slots=True)
class Usage:
    """What each part has used."""

    cpu_s: Mapping[str, float]
    rss_mib: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one trial showed."""

    case: Case
    anchor: Anchor | None
    """None: pods of workers without a deployment would run there, and never be ready."""
    waits: Mapping[str, Waits]
    """By stage, of all deployments applied at once."""
    work: Reading
    """Of the operator, from the first apply until it rested."""
    requests: ApiServerReading
    """Of the API server, in the same time."""
    usage: Usage
    """Of all parts, in the same time."""
    peak_mib: float
    rest: Reading
    """Of the operator, over `--rest` seconds in which nothing changed."""
    rest_requests: ApiServerReading
    rest_usage: Usage
    one_more: Mapping[str, Waits]
    """By stage, of one deployment that is applied when all others rest."""
    failover: Failover
    after_failover: Mapping[str, Waits]
    """The same, with the new leader."""
    others_cores: float
    """Cores that processes of no part in it took meanwhile: with them the waits are longer."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a trial needs."""

    api: Client
    start_operator: Callable[[bool], AbstractContextManager[Operator]]
    """With whether it leads at once."""
    parts: Mapping[str, psutil.Process]
    """Processes of the control plane and the nodes, by name."""
    has_anchor: bool
    """Whether nodes call a pod ready that serves nothing."""
    say: Callable[[object], None]
    """Shows what is known so far: a trial takes long."""


async def run_trial(cluster: Cluster, case: Case, rest_s: float) -> Outcome:
    """Apply, watch, wait until all is at rest, then wait `rest_s` more. Raises TimeoutError."""
    api = cluster.api
    await _wait_for_nodes(api, case)
    anchor = await measure_anchor(api, case.pods) if cluster.has_anchor else None
    cluster.say(anchor)
    seen = Sightings()
    with cluster.start_operator(True) as leader:
        parts = {**cluster.parts, "operator": leader.process, "benchmark": psutil.Process()}
        watch = asyncio.create_task(api.follow(WORKERS, seen.listed, seen.saw))
        try:
            # Its watches come up in the seconds after it begins to lead.
            await rest(leader)
            before, requests, used = leader.read(), await read_requests(api), measure_usage(parts)
            foreign_s = count_foreign_s(parts)
            async with asyncio.timeout(case.limit_s):
                applied = await apply_all(api, case)
                await seen.all_ready(case.pods)
                settled = await rest(leader)
            work, settled_requests = settled - before, await read_requests(api)
            foreign_s, settled_usage = count_foreign_s(parts) - foreign_s, measure_usage(parts)
            cluster.say((waits := seen.compute_waits(applied), work, leader.peak_mib))
            cluster.say((settled_requests - requests, _subtract(settled_usage, used)))
            await asyncio.sleep(rest_s)
            idle = leader.read() - settled
            rest_requests, rest_usage = await read_requests(api), measure_usage(parts)
            cluster.say((idle, _subtract(rest_usage, settled_usage)))
            one_more = await apply_one_more(api, case, seen, "one-more")
            await rest(leader)
            with cluster.start_operator(False) as standby:
                cluster.say(failover := await fail_over(leader, standby))
                after = await apply_one_more(api, case, seen, "after-failover")
        finally:
            watch.cancel()
        peak_mib = leader.peak_mib
    return Outcome(
        case=case,
        anchor=anchor,
        waits=_by_name(waits),
        work=work,
        requests=settled_requests - requests,
        usage=_subtract(settled_usage, used),
        peak_mib=peak_mib,
        rest=idle,
        rest_requests=rest_requests - settled_requests,
        rest_usage=_subtract(rest_usage, settled_usage),
        one_more=_by_name(one_more),
        failover=failover,
        after_failover=_by_name(after),
        others_cores=foreign_s / work.at_s,
    )


async def apply_all(api: Client, case: Case) -> dict[str, float]:
    """Create every deployment; when each was sent, by name."""
    applied: dict[str, float] = {}
    slots = asyncio.Semaphore(AT_ONCE)

    async def apply(name: str) -> None:
        async with slots:
            applied[name] = time.monotonic()
            await api.post(DEPLOYMENTS, manifest(name, case))

    await asyncio.gather(*(apply(f"chat-{n}") for n in range(case.deployments)))
    return applied


async def apply_one_more(api: Client, case: Case, seen: Sightings, name: str) -> dict[Stage, Waits]:
    """Create one deployment and wait for its workers."""
    count = len(seen.times[Stage.READY]) + case.prefill + case.decode
    applied = {name: time.monotonic()}
    async with asyncio.timeout(case.limit_s):
        await api.post(DEPLOYMENTS, manifest(name, case))
        await seen.all_ready(count)
    return seen.compute_waits(applied)


async def fail_over(leader: Operator, standby: Operator) -> Failover:
    """Kill the leader, and wait until the standby has taken over and rests."""
    filled = standby.read()
    leader.kill()
    killed = time.monotonic()
    await poll(lambda: asyncio.to_thread(standby.leads), FAILOVER_LIMIT_S, 0.1)
    leading = time.monotonic()
    async with asyncio.timeout(FAILOVER_LIMIT_S):
        settled = await rest(standby)
    return Failover(
        filled_s=standby.started_s,
        filled_cpu_s=filled.cpu_s,
        leading_s=leading - killed,
        settled_s=time.monotonic() - leading - SETTLED_S,
        work=settled - filled,
        peak_mib=standby.peak_mib,
    )


async def rest(operator: Operator) -> Reading:
    """Wait until the operator has written nothing for SETTLED_S, and nothing is queued."""
    async with asyncio.timeout(MAX_SETTLING_S):
        reading, since = await asyncio.to_thread(operator.read), time.monotonic()
        while time.monotonic() - since < SETTLED_S:
            await asyncio.sleep(POLL_S)
            newer = await asyncio.to_thread(operator.read)
            if newer.writes != reading.writes or newer.queued:
                since = time.monotonic()
            reading = newer
    return reading


async def read_requests(api: Client) -> ApiServerReading:
    """What the API server has done so far."""
    return parse(await api.read("/metrics"), time.monotonic())


def measure_usage(parts: Mapping[str, psutil.Process]) -> Usage:
    """CPU time and memory of each part; of one with children, their sum."""
    families = {
        name: [part, *part.children(recursive=True)] if name == "nodes" else [part]
        for name, part in parts.items()
    }
    return Usage(
        {name: sum(map(_count_cpu_s, family)) for name, family in families.items()},
        {
            name: sum(each.memory_info().rss for each in family) / 2**20
            for name, family in families.items()
        },
    )


def count_foreign_s(parts: Mapping[str, psutil.Process]) -> float:
    """CPU seconds of this machine since its start, less those of the parts."""
    total = psutil.cpu_times()
    busy = total.user + total.nice + total.system + total.irq + total.softirq
    return busy - sum(measure_usage(parts).cpu_s.values())


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


async def _wait_for_nodes(api: Client, case: Case) -> None:
    """Until all are ready, and tainted by no controller."""

    async def are_usable() -> bool:
        nodes = (await api.get("/api/v1/nodes"))["items"]
        return sum(map(_is_usable, nodes)) == case.nodes

    await poll(are_usable, case.limit_s, 1.0)


def _is_usable(node: Manifest) -> bool:
    return is_ready(node) and not node["spec"].get("taints")


def _count_cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _subtract(after: Usage, before: Usage) -> Usage:
    """CPU time in between, memory at the end."""
    return Usage(
        {name: after.cpu_s[name] - before.cpu_s[name] for name in after.cpu_s}, after.rss_mib
    )


def _by_name(waits: Mapping[Stage, Waits]) -> dict[str, Waits]:
    return {stage.value: each for stage, each in waits.items()}
