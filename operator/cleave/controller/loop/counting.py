"""What the gateways of each deployment count, looked at now and then.

Used by the controller. A page costs a request and some milliseconds of reading, so there are bounds
on both; what comes of it are windows (`cleave.traffic.window`), of which the last few are kept.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from cleave.controller.instances import base_url
from cleave.rpc import http
from cleave.traffic.counts import Counts, CountsError, read_page
from cleave.traffic.total import PATIENCE_S, Total
from cleave.traffic.window import Window, between, join

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

MOST_WINDOWS = 128
"""Kept of each deployment: half an hour at a window in 15 s, as `Scaling.calm_s` may ask for."""
LATELY = 4
"""Windows, a minute of them likewise."""
TIMEOUT_S = 2.0
_FORGET_S = 900.0
"""Between two looks that are so far apart anything may have happened."""
_PATH = "/metrics"
_PAGE_LIMIT = 4 << 20
_AT_ONCE = 16
"""Pages under way at a time, of all deployments together."""

Fetch = Callable[[str], Awaitable[str]]
"""The page at a URL. Raises http.HttpError."""


async def fetch(url: str) -> str:
    """The page at `url`. Raises http.HttpError."""
    return (await http.get(url, seconds=TIMEOUT_S, limit=_PAGE_LIMIT)).decode(errors="replace")


@dataclass(slots=True)
class _Kept:
    total: Total = field(default_factory=Total)
    num_looks: int = 0
    stirred_s: float | None = None
    """When a request was seen last, or the watch began."""
    windows: deque[Window] = field(default_factory=lambda: deque(maxlen=MOST_WINDOWS))


class Counting(Generic[K]):
    """What was counted, by deployment. `now` is Unix time, as in status."""

    def __init__(self, now: Callable[[], float], fetch: Fetch = fetch) -> None:
        self._now, self._fetch = now, fetch
        self._kept: dict[K, _Kept] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def windows(self, key: K) -> tuple[Window, ...]:
        """The last windows, oldest first."""
        kept = self._kept.get(key)
        return tuple(kept.windows) if kept else ()

    def lately(self, key: K) -> Window | None:
        """About the last minute; None: nothing is known of it."""
        windows = self.windows(key)[-LATELY:]
        is_old = not windows or self._now() - windows[-1].end_s > PATIENCE_S
        return None if is_old else join(windows)

    def in_flight(self, key: K) -> float:
        """Requests that waited or ran at the last look."""
        kept = self._kept.get(key)
        return kept.total.counts.in_flight if kept and kept.total.counts else 0.0

    def quiet_s(self, key: K) -> float:
        """Seconds since a request was seen last, or the watch began."""
        kept = self._kept.get(key)
        return 0.0 if kept is None or kept.stirred_s is None else self._now() - kept.stirred_s

    def stir(self, key: K) -> None:
        """A request was seen."""
        self._kept.setdefault(key, _Kept()).stirred_s = self._now()

    def is_news(self, key: K) -> bool:
        """Whether there is a new minute of windows, so that it is time to decide."""
        return self._kept[key].num_looks % LATELY == 0

    def forget(self, key: K) -> None:
        """The deployment is gone."""
        self._kept.pop(key, None)

    async def look(self, key: K, gateways: Collection[str]) -> bool:
        """Ask the gateways at these addresses; whether a window has come of it. Never raises."""
        found = await asyncio.gather(*(self._read(address) for address in gateways))
        pages = {address: page for address, page in zip(gateways, found, strict=True) if page}
        kept = self._kept.setdefault(key, _Kept())
        before = kept.total.counts
        if before is not None and self._now() - before.at_s > _FORGET_S:
            # It was not this operator that led, or nobody answered.
            before, kept.total = None, Total()
            kept.windows.clear()
        kept.total = kept.total.add(frozenset(gateways), pages, self._now())
        if kept.stirred_s is None or self.in_flight(key):
            self.stir(key)
        if before is None or kept.total.counts is None or kept.total.counts is before:
            return False
        window = between(before, kept.total.counts)
        if window is not None:
            kept.windows.append(window)
            kept.num_looks += 1
            if window.num_requests:
                self.stir(key)
        return window is not None

    async def _read(self, address: str) -> Counts | None:
        try:
            async with self._slots:
                page = await self._fetch(base_url(address) + _PATH)
            # Away from the loop: a page takes milliseconds to read.
            return await asyncio.to_thread(read_page, page, self._now())
        except (http.HttpError, CountsError) as error:
            log.debug("the gateway at %s: %s", address, error)
            return None
