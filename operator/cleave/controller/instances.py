"""What the gateways know of the instances: asked by the operator before it decides.

Everything here is a hint that makes decisions better (which instance is the emptiest, what the KV
path is worth); none of them waits for it. A gateway that does not answer within the time-out, or
answers something else, has said nothing. What is hard: gateways disagree, for each hears an agent
at its own moment and sends it requests of its own.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from cleave.pods.labels import INTERNAL_PORT
from cleave.rpc import http
from cleave.rpc.fleet_page import FleetPage, Instance

__all__ = [
    "Instance",
    "KvPaths",
    "ask",
    "base_url",
    "count_requests",
    "merge",
    "summarize_kv_paths",
]

TIMEOUT_S = 2.0
PATH = "/fleet"
_MAX_GATEWAYS = 8
"""Asked at once; that many tell as much as all of them."""
_PAGE_LIMIT = 16 << 20
_HEARD = ("heard", "stale")


@dataclass(frozen=True, slots=True)
class KvPaths:
    """What the KV self-tests of some instances found."""

    verified: int
    total: int
    message: str
    """For people: `nixl over tcp, p-0 -> d-0: 10.49 MB for 2,560 tokens in 0.012 s, 0.87 GB/s (the
    slowest of 4)`; or why a path is not verified."""


def base_url(address: str) -> str:
    """Where a gateway at this IP address answers the operator."""
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{INTERNAL_PORT}"


async def ask(urls: Collection[str], timeout_s: float = TIMEOUT_S) -> Mapping[str, Instance] | None:
    """Instances by name as the gateways at `urls` (http://HOST:PORT) see them; None: none answers.

    Never raises.
    """
    pages = await asyncio.gather(*(_ask(url, timeout_s) for url in sorted(urls)[:_MAX_GATEWAYS]))
    answers = [page for page in pages if page is not None]
    return merge(answers) if answers else None


def merge(pages: Iterable[FleetPage]) -> Mapping[str, Instance]:
    """One view of many: of each instance what the gateway said that heard it last."""
    views: dict[str, list[Instance]] = {}
    for page in pages:
        for instance in page.instances:
            views.setdefault(instance.name, []).append(instance)
    return {name: _merge_views(seen) for name, seen in sorted(views.items())}


def count_requests(instance: Instance) -> int:
    """Requests that run or wait there: what a drain has to wait for."""
    return max(instance.num_running + instance.num_waiting, instance.requests_in_flight)


def summarize_kv_paths(instances: Iterable[Instance]) -> KvPaths:
    """What the tests found, in a sentence: the slowest path, or the first that does not work."""
    told = sorted(instances, key=lambda instance: instance.name)
    good = [instance for instance in told if instance.kv_path.verified]
    bad = [instance for instance in told if not instance.kv_path.verified]
    if bad:
        first = bad[0]
        reason = first.kv_path.detail or first.reason or f"is {first.state or 'not known'}"
        count = f"{len(bad)} of {len(told)} instances are not verified"
        return KvPaths(len(good), len(told), f"{count}: {first.name}: {reason}")
    if not good:
        return KvPaths(0, 0, "no gateway knows an instance yet")
    slowest = min(good, key=lambda instance: instance.kv_path.bytes_per_s or float("inf"))
    which = f" (the slowest of {len(good)})" if len(good) > 1 else ""
    return KvPaths(
        len(good), len(told), f"{slowest.kv_path.transport}, {slowest.kv_path.detail}{which}"
    )


def _merge_views(seen: list[Instance]) -> Instance:
    """The freshest view; what each gateway sends there adds up."""
    best = min(seen, key=lambda view: (view.contact not in _HEARD, view.report_age_s))
    return msgspec.structs.replace(
        best,
        requests_in_flight=sum(view.requests_in_flight for view in seen),
        pending_tokens=max(view.pending_tokens for view in seen),
    )


async def _ask(url: str, timeout_s: float) -> FleetPage | None:
    try:
        body = await http.get(url + PATH, seconds=timeout_s, limit=_PAGE_LIMIT)
        return msgspec.json.decode(body, type=FleetPage)
    except (http.HttpError, msgspec.DecodeError):
        return None
