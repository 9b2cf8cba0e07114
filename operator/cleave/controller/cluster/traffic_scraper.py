"""Scrapes the gateways of each deployment and turns their counters into traffic windows.

Used by the controller. A scrape costs a request and some milliseconds of parsing, so both are
bounded. Counters become windows (`cleave.traffic.window`), of which the last `MOST_WINDOWS` are
kept.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cleave.controller.cluster.instance_status import base_url
from cleave.rpc import http_client
from cleave.traffic.counter_sum import PATIENCE_S, Total
from cleave.traffic.counters import Counts, CountsError, read_page
from cleave.traffic.window import Window, between, join

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

MOST_WINDOWS = 128
"""Windows kept per deployment: half an hour at 15 s each, the longest `Scaling.calm_s`."""
LATELY = 4
"""Windows that make up a recent minute, at 15 s each."""
TIMEOUT_S = 2.0
_FORGET_S = 900.0
"""After a gap of this length between two scrapes the windows are dropped."""
_PATH = "/metrics"
_PAGE_LIMIT = 4 << 20
_AT_ONCE = 16
"""Most concurrent requests, of all deployments together."""

Fetch = Callable[[str], Awaitable[str]]
"""Returns the page at a URL. Raises http.HttpError."""


async def fetch(url: str) -> str:
    """Return the page at `url`. Raises http.HttpError."""
    return (await http_client.get(url, seconds=TIMEOUT_S, limit=_PAGE_LIMIT)).decode(
        errors="replace"
    )


@dataclass(slots=True)
class _Kept:
    total: Total = field(default_factory=Total)
    num_looks: int = 0
    stirred_s: float | None = None
    """Time of the last observed request, or of the first scrape."""
    windows: deque[Window] = field(default_factory=lambda: deque(maxlen=MOST_WINDOWS))


class Counting(Generic[K]):
    """Traffic windows by deployment. `now` returns Unix time, as in the status."""

    def __init__(self, now: Callable[[], float], fetch: Fetch = fetch) -> None:
        self._now, self._fetch = now, fetch
        self._kept: dict[K, _Kept] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def windows(self, key: K) -> tuple[Window, ...]:
        """Return the kept windows, oldest first."""
        state = self._kept.get(key)
        return tuple(state.windows) if state else ()

    def lately(self, key: K) -> Window | None:
        """Return about the last minute; None: it was not observed."""
        windows = self.windows(key)[-LATELY:]
        is_old = not windows or self._now() - windows[-1].end_s > PATIENCE_S
        return None if is_old else join(windows)

    def in_flight(self, key: K) -> float:
        """Return the requests that waited or ran at the last scrape."""
        state = self._kept.get(key)
        return state.total.counts.in_flight if state and state.total.counts else 0.0

    def quiet_s(self, key: K) -> float:
        """Seconds since the last observed request, or since the first scrape."""
        state = self._kept.get(key)
        return 0.0 if state is None or state.stirred_s is None else self._now() - state.stirred_s

    def stir(self, key: K) -> None:
        """Record that a request was observed now."""
        self._kept.setdefault(key, _Kept()).stirred_s = self._now()

    def is_news(self, key: K) -> bool:
        """Whether another minute of windows is complete, so that it is time to decide."""
        return self._kept[key].num_looks % LATELY == 0

    def forget(self, key: K) -> None:
        """Drop the windows of a deployment that is gone."""
        self._kept.pop(key, None)

    async def look(self, key: K, gateways: Collection[str]) -> bool:
        """Scrape the gateways at these addresses; returns whether there is a new window.

        Never raises.
        """
        results = await asyncio.gather(*(self._read(address) for address in gateways))
        pages = {address: page for address, page in zip(gateways, results, strict=True) if page}
        state = self._kept.setdefault(key, _Kept())
        previous = state.total.counts
        if previous is not None and self._now() - previous.at_s > _FORGET_S:
            # Another operator led meanwhile, or no gateway answered.
            previous, state.total = None, Total()
            state.windows.clear()
        state.total = state.total.add(frozenset(gateways), pages, self._now())
        if state.stirred_s is None or self.in_flight(key):
            self.stir(key)
        if previous is None or state.total.counts is None or state.total.counts is previous:
            return False
        window = between(previous, state.total.counts)
        if window is not None:
            state.windows.append(window)
            state.num_looks += 1
            if window.num_requests:
                self.stir(key)
        return window is not None

    async def _read(self, address: str) -> Counts | None:
        try:
            async with self._slots:
                page = await self._fetch(base_url(address) + _PATH)
            # In a thread: a page takes milliseconds to parse.
            return await asyncio.to_thread(read_page, page, self._now())
        except (http_client.HttpError, CountsError) as error:
            log.debug("the gateway at %s: %s", address, error)
            return None
