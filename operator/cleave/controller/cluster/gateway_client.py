"""Client of the gateways: their reports about each deployment's instances, merged and cached.

Used by the controller before it decides. The reports only improve decisions (which instance has the
least load, how fast the KV path is); none of them waits for one. A gateway that does not respond in
time, or with something else, is ignored. Gateways disagree, since each receives an agent's reports
at another moment and sends its own requests. A refresh costs a request per gateway; so it happens
when the set of ready instances has changed, before a decision that depends on load, and otherwise
every `_MAX_AGE_S` seconds; sooner while instances start, as their agents say what they do and why
an engine has failed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import msgspec

from cleave.api.role import Role
from cleave.manifests.labels import INTERNAL_PORT
from cleave.rpc import http_client
from cleave.rpc.fleet_status import (
    MAX_CLOSED,
    MAX_INSTANCES,
    MAX_REPORT_BRACES,
    MAX_REPORTS,
    FleetInstance,
    FleetStatus,
    KvPairs,
)
from cleave.rpc.weights_report import merge_weights

K = TypeVar("K", bound=Hashable)

TIMEOUT_S = 2.0
PATH = "/fleet"
_MAX_GATEWAYS = 8
"""Gateways queried at a time; more would add no information."""
_PAGE_LIMIT = 4 << 20
_MAX_OBJECTS = 5 * MAX_INSTANCES + MAX_REPORTS * MAX_REPORT_BRACES
"""JSON objects in a page: an instance has four, its texts hold few braces, and gateways bound those
of reports. Bounds the time that decoding takes, during which nothing else runs."""
_CONNECTED = ("fresh", "stale")
_MAX_AGE_S = 45.0
_FIRST_INCOMPLETE_AGE_S = 1.0
"""How long the first incomplete response is used; doubles with each further one."""
_STARTING_AGE_S = 10.0
"""How long a response is used while instances are not ready."""
_FRESH_AGE_S = 2.0

InstancesByPod = Mapping[str, FleetInstance] | None
"""Instances by pod; None: no gateway has responded yet."""
EngineCounts = Mapping[str, int]
"""Number of engines by pod; a pod that is not named has one."""
FetchInstances = Callable[[Collection[str], EngineCounts], Awaitable[InstancesByPod]]


@dataclass(frozen=True, slots=True)
class KvPaths:
    """Summary of the KV self-tests of some instances."""

    verified: int
    total: int
    message: str
    """Example: `nixl over tcp, p-0 -> d-0: 10.49 MB for 2,560 tokens in 0.012 s, 0.87 GB/s (the
    slowest of 4)`; or why a path is not verified."""


def build_base_url(address: str) -> str:
    """Return the URL of a gateway's internal port, from its IP address."""
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{INTERNAL_PORT}"


async def fetch_instances(
    urls: Collection[str], engine_counts: EngineCounts, timeout_s: float = TIMEOUT_S
) -> InstancesByPod:
    """Fetch instances by name from gateways at `urls`; None: none responds. Never raises."""
    selected = sorted(urls)[:_MAX_GATEWAYS]
    pages = await asyncio.gather(*(_fetch_page(url, timeout_s) for url in selected))
    responses = [page for page in pages if page is not None]
    return merge(responses, engine_counts) if responses else None


def merge(pages: Iterable[FleetStatus], engine_counts: EngineCounts) -> Mapping[str, FleetInstance]:
    """Merge the views of several gateways: the freshest of each instance, and one for each pod."""
    views: dict[str, list[FleetInstance]] = {}
    for page in pages:
        for instance in page.instances:
            views.setdefault(instance.name, []).append(instance)
    merged = [_merge_views(instance_views) for _, instance_views in sorted(views.items())]
    return {
        pod: _merge_members(pod, group, engine_counts.get(pod, 1))
        for pod, group in _group_by_pod(merged).items()
    }


def count_requests(instance: FleetInstance) -> int:
    """Running and waiting requests of an instance, which its drain has to wait for."""
    return max(instance.num_running + instance.num_waiting, instance.requests_in_flight)


def summarize_kv_paths(instances: Iterable[FleetInstance]) -> KvPaths:
    """Summarize the self-tests: the slowest path, or the first that does not work."""
    by_name = sorted(instances, key=lambda instance: instance.name)
    good = [instance for instance in by_name if instance.kv_path.verified]
    bad = [instance for instance in by_name if not instance.kv_path.verified]
    if bad:
        first = bad[0]
        reason = first.kv_path.detail or first.reason or f"is {first.state or 'not known'}"
        count = f"{len(bad)} of {len(by_name)} instances are not verified"
        return KvPaths(len(good), len(by_name), f"{count}: {first.name}: {reason}")
    if not good:
        return KvPaths(0, 0, "no gateway knows an instance yet")
    slowest = find_slowest_kv_path(good) or good[0]
    which = f" (the slowest of {len(good)})" if len(good) > 1 else ""
    text = f"{slowest.kv_path.transport}, {slowest.kv_path.detail}{which}"
    return KvPaths(len(good), len(by_name), text)


def find_slowest_kv_path(instances: Iterable[FleetInstance]) -> FleetInstance | None:
    """The instance whose verified path was the slowest; None: no engine reported a duration."""
    timed = (each for each in instances if each.kv_path.verified and each.kv_path.bytes_per_s > 0)
    return min(timed, key=lambda each: (each.kv_path.bytes_per_s, each.name), default=None)


def _merge_views(views: list[FleetInstance]) -> FleetInstance:
    """The freshest view; requests in flight are added up over the gateways."""
    freshest = min(views, key=lambda each: (each.contact not in _CONNECTED, each.report_age_s))
    return msgspec.structs.replace(
        freshest,
        requests_in_flight=sum(view.requests_in_flight for view in views),
        pending_tokens=max(view.pending_tokens for view in views),
    )


def _group_by_pod(instances: Iterable[FleetInstance]) -> dict[str, list[FleetInstance]]:
    """The instances of each pod; those of a cell are named POD.ROLE-NUMBER, data-parallel ranks
    POD.rank-NUMBER."""
    groups: dict[str, list[FleetInstance]] = {}
    for instance in instances:
        groups.setdefault(instance.name.partition(".")[0], []).append(instance)
    return groups


def _merge_members(pod: str, members: list[FleetInstance], count: int) -> FleetInstance:
    """A cell in one pod as one mixed instance, or data-parallel ranks as one of their role: open if
    all `count` are known and open."""
    if len(members) == 1 and members[0].name == pod:
        return members[0]
    paths = [each for each in members if not each.kv_path.verified]
    roles = {each.role for each in members}
    worst = paths[0] if paths else find_slowest_kv_path(members) or members[0]
    return msgspec.structs.replace(
        worst,
        name=pod,
        role=roles.pop() if len(roles) == 1 else Role.MIXED.value,
        home="",
        selectable=len(members) >= count and all(map(_is_complete, members)),
        num_running=sum(each.num_running for each in members),
        num_waiting=sum(each.num_waiting for each in members),
        pending_tokens=sum(each.pending_tokens for each in members),
        requests_in_flight=sum(each.requests_in_flight for each in members),
        restarts=max(each.restarts for each in members),
        model_report=next((each.model_report for each in members if each.model_report), ""),
        # They read the same files.
        model_digest=next((each.model_digest for each in members if each.model_digest), ""),
        weights=merge_weights((each.weights_read_s, each.weights) for each in members),
        weights_read_s=max(each.weights_read_s for each in members),
        weights_fault=next((each.weights_fault for each in members if each.weights_fault), ""),
        adapters_digest=_merge_digests({each.adapters_digest for each in members}),
        adapters_pending=max(each.adapters_pending for each in members),
        adapter_fault=next((each.adapter_fault for each in members if each.adapter_fault), ""),
        kv_pairs=_merge_pairs([each.kv_pairs for each in members if each.kv_pairs.total]),
    )


def _merge_digests(digests: Collection[str]) -> str:
    """The digest that all members of a pod report; one that no list has where they differ."""
    return "/".join(sorted(digests))


def _merge_pairs(parts: list[KvPairs]) -> KvPairs:
    """The pairs of all decode engines of a cell."""
    measured = [each for each in parts if each.bytes_per_s > 0]
    slowest = min(measured, key=lambda each: each.bytes_per_s, default=KvPairs())
    return KvPairs(
        total=sum(each.total for each in parts),
        proven=sum(each.proven for each in parts),
        closed=tuple(name for each in parts for name in each.closed)[:MAX_CLOSED],
        num_closed=sum(each.num_closed for each in parts),
        oldest_s=max((each.oldest_s for each in parts), default=0.0),
        bytes_per_s=slowest.bytes_per_s,
        pull_ms=slowest.pull_ms,
        reason=next((each.reason for each in parts if each.reason), ""),
    )


async def _fetch_page(url: str, timeout_s: float) -> FleetStatus | None:
    try:
        body = await http_client.get(url + PATH, seconds=timeout_s, limit=_PAGE_LIMIT)
    except http_client.HttpError:
        return None
    return decode_page(body)


def decode_page(body: bytes) -> FleetStatus | None:
    """Decode a gateway's page; None: it is invalid or has too many objects."""
    if body.count(b"{") > _MAX_OBJECTS:
        return None
    try:
        page = msgspec.json.decode(body, type=FleetStatus)
    except msgspec.DecodeError:
        return None
    return page if len(page.instances) <= MAX_INSTANCES else None


@dataclass(frozen=True, slots=True)
class _CachedInstances:
    at_s: float
    ready: frozenset[str]
    instances: InstancesByPod
    incomplete_count: int
    """Consecutive incomplete responses."""
    has_starting: bool
    """Whether there were instances that were not ready."""

    @property
    def valid_s(self) -> float:
        """Seconds for which the response is used."""
        longest_s = _STARTING_AGE_S if self.has_starting else _MAX_AGE_S
        if not self.incomplete_count:
            return longest_s
        return min(longest_s, _FIRST_INCOMPLETE_AGE_S * 2.0 ** (self.incomplete_count - 1))


class GatewayClient(Generic[K]):
    """The last response of the gateways, by deployment."""

    def __init__(self, clock: Callable[[], float], fetch: FetchInstances = fetch_instances) -> None:
        self._clock, self._fetch = clock, fetch
        self._cached: dict[K, _CachedInstances] = {}

    def get_cached(self, key: K) -> InstancesByPod:
        """Return the cached response."""
        cached = self._cached.get(key)
        return cached.instances if cached else None

    async def get_or_refresh(
        self,
        key: K,
        gateways: Collection[str],
        ready: frozenset[str],
        engine_counts: EngineCounts,
        *,
        has_starting: bool = False,
    ) -> InstancesByPod:
        """Return the cached response, refreshed when old or when other pods are `ready` (names).
        `has_starting`: there are instances that are not ready."""
        cached = self._cached.get(key)
        if cached and cached.ready == ready and self._clock() - cached.at_s < cached.valid_s:
            return cached.instances
        return await self._refresh(key, gateways, ready, engine_counts, has_starting)

    def get_retry_delay_s(self, key: K) -> float | None:
        """Seconds until a retry of an incomplete response; None: it is complete and no instance
        starts."""
        cached = self._cached.get(key)
        if cached is None or not (cached.incomplete_count or cached.has_starting):
            return None
        return cached.valid_s

    async def get_fresh(
        self, key: K, gateways: Collection[str], engine_counts: EngineCounts
    ) -> InstancesByPod:
        """Return a response that is at most `_FRESH_AGE_S` seconds old."""
        cached = self._cached.get(key)
        if cached and self._clock() - cached.at_s < _FRESH_AGE_S:
            return cached.instances
        ready = cached.ready if cached else frozenset()
        has_starting = cached is not None and cached.has_starting
        return await self._refresh(key, gateways, ready, engine_counts, has_starting)

    def forget(self, key: K) -> None:
        """Drop the response: the deployment was deleted, or its instances have changed."""
        self._cached.pop(key, None)

    async def _refresh(
        self,
        key: K,
        gateways: Collection[str],
        ready: frozenset[str],
        engine_counts: EngineCounts,
        has_starting: bool,
    ) -> InstancesByPod:
        if not gateways or not (ready or has_starting):
            if (cached := self._cached.get(key)) is not None:
                # Nothing more is expected of them.
                self._cached[key] = replace(cached, has_starting=False, incomplete_count=0)
            return self.get_cached(key)
        response = await self._fetch([*map(build_base_url, gateways)], engine_counts)
        instances_now = self.get_cached(key) if response is None else response
        previous, incomplete_count = self._cached.get(key), 0
        if not all(_is_complete((instances_now or {}).get(name)) for name in ready):
            before = previous.incomplete_count if previous and previous.ready == ready else 0
            incomplete_count = min(before + 1, 8)
        self._cached[key] = _CachedInstances(
            self._clock(), ready, instances_now, incomplete_count, has_starting
        )
        return instances_now


def _is_complete(instance: FleetInstance | None) -> bool:
    """Whether the instance receives requests and, unless mixed, its KV path is verified."""
    if instance is None or not instance.selectable:
        return False
    return instance.role == Role.MIXED or instance.kv_path.verified
