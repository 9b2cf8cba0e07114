"""Polls gateways for requests that wait while a deployment is scaled to zero.

Used by the controller, every second. A gateway's `/health` is small while it knows no instance, so
many deployments may be scaled to zero. A gateway that does not respond counts as 0 and is polled
again a second later.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable
from typing import Generic, TypeVar

import msgspec

from cleave.controller.cluster.instance_status import build_base_url
from cleave.rpc import http_client

K = TypeVar("K", bound=Hashable)

PERIOD_S = 1.0
TIMEOUT_S = 2.0
_PATH = "/health"
_PAGE_LIMIT = 1 << 20

Fetch = Callable[[str], Awaitable[bytes]]
"""Returns the page at a URL. Raises http.HttpError."""


class _HealthResponse(msgspec.Struct, frozen=True):
    requests_in_flight: int = 0


async def fetch(url: str) -> bytes:
    """Return the page at `url`. Raises http.HttpError."""
    return await http_client.get(url, seconds=TIMEOUT_S, limit=_PAGE_LIMIT)


class Activator(Generic[K]):
    """Waiting requests of each deployment that is scaled to zero."""

    def __init__(self, fetch: Fetch = fetch) -> None:
        self._fetch = fetch
        self._waiting: dict[K, int] = {}

    def get_waiting(self, key: K) -> int:
        """Return the requests that waited at the last poll."""
        return self._waiting.get(key, 0)

    def forget(self, key: K) -> None:
        """Drop a deployment that runs again or was deleted."""
        self._waiting.pop(key, None)

    async def poll(self, key: K, gateways: Collection[str]) -> int:
        """Poll the gateways at these addresses for waiting requests. Never raises."""
        counts = await asyncio.gather(*(self._fetch_waiting(address) for address in gateways))
        self._waiting[key] = sum(counts)
        return self._waiting[key]

    async def _fetch_waiting(self, address: str) -> int:
        try:
            body = await self._fetch(build_base_url(address) + _PATH)
            return msgspec.json.decode(body, type=_HealthResponse).requests_in_flight
        except (http_client.HttpError, msgspec.DecodeError):
            return 0
