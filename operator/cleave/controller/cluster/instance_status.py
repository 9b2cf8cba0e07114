"""Fetches the gateways' view of instances, before the operator decides.

Everything here only improves decisions (which instance has the least load, how fast the KV path
is); none of them waits for it. A gateway that does not respond in time, or with something else, is
ignored. Gateways disagree, since each receives an agent's reports at another moment and sends its
own requests.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from cleave.manifests.labels import INTERNAL_PORT
from cleave.rpc import http_client
from cleave.rpc.fleet_status import FleetInstance, FleetStatus

TIMEOUT_S = 2.0
PATH = "/fleet"
_MAX_GATEWAYS = 8
"""Gateways queried at a time; more would add no information."""
_PAGE_LIMIT = 16 << 20
_CONNECTED_STATES = ("heard", "stale")


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
    urls: Collection[str], timeout_s: float = TIMEOUT_S
) -> Mapping[str, FleetInstance] | None:
    """Fetch instances by name from the gateways at `urls` (http://HOST:PORT); None: none responds.

    Never raises.
    """
    pages = await asyncio.gather(
        *(_fetch_page(url, timeout_s) for url in sorted(urls)[:_MAX_GATEWAYS])
    )
    responses = [page for page in pages if page is not None]
    return merge(responses) if responses else None


def merge(pages: Iterable[FleetStatus]) -> Mapping[str, FleetInstance]:
    """Merge the views of several gateways: the freshest of each instance."""
    views: dict[str, list[FleetInstance]] = {}
    for page in pages:
        for instance in page.instances:
            views.setdefault(instance.name, []).append(instance)
    return {name: _merge_views(instance_views) for name, instance_views in sorted(views.items())}


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
    slowest = min(good, key=lambda instance: instance.kv_path.bytes_per_s or float("inf"))
    which = f" (the slowest of {len(good)})" if len(good) > 1 else ""
    return KvPaths(
        len(good), len(by_name), f"{slowest.kv_path.transport}, {slowest.kv_path.detail}{which}"
    )


def _merge_views(views: list[FleetInstance]) -> FleetInstance:
    """The freshest view; requests in flight are added up over the gateways."""
    freshest = min(
        views, key=lambda view: (view.contact not in _CONNECTED_STATES, view.report_age_s)
    )
    return msgspec.structs.replace(
        freshest,
        requests_in_flight=sum(view.requests_in_flight for view in views),
        pending_tokens=max(view.pending_tokens for view in views),
    )


async def _fetch_page(url: str, timeout_s: float) -> FleetStatus | None:
    try:
        body = await http_client.get(url + PATH, seconds=timeout_s, limit=_PAGE_LIMIT)
        return msgspec.json.decode(body, type=FleetStatus)
    except (http_client.HttpError, msgspec.DecodeError):
        return None
