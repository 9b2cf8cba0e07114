"""Reads the counters of each deployment's gateways and turns them into traffic windows.

Used by the controller. The counters come from Prometheus, where the operator has one, and what that
does not have from the gateways themselves; everything after that is the same. A scrape costs a
request and some milliseconds of parsing, so both are bounded, and what has not changed is not
parsed again. Counters become windows (`cleave.traffic.window`), of which the last `MAX_WINDOWS` are
kept.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from cleave.controller.cluster.gateway_client import build_base_url
from cleave.controller.cluster.prometheus_source import PrometheusError, PrometheusSource
from cleave.rpc import http_client
from cleave.traffic.counter_sum import MISSING_TIMEOUT_S, CounterSum
from cleave.traffic.counters import (
    CountsError,
    GatewayCounters,
    parse_metrics_page,
    select_lines,
)
from cleave.traffic.window import TrafficWindow, compute_window, join_windows

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

MAX_WINDOWS = 128
"""Windows kept per deployment: half an hour at 15 s each, the longest `Scaling.calm_s`."""
RECENT_WINDOWS = 4
"""Windows that make up a recent minute, at 15 s each."""
TIMEOUT_S = 2.0
_RESET_AFTER_S = 900.0
"""After a gap of this length between two scrapes the windows are dropped."""
_PATH = "/metrics"
_PAGE_LIMIT = 4 << 20
_MAX_CONCURRENT = 16
"""Most concurrent requests, of all deployments together."""

Fetch = Callable[[str], Awaitable[str]]
"""Returns the page at a URL. Raises http.HttpError."""


async def fetch(url: str) -> str:
    """Return the page at `url`. Raises http.HttpError."""
    page = await http_client.get(url, seconds=TIMEOUT_S, limit=_PAGE_LIMIT)
    return page.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class _ReadPage:
    """A gateway's page as it was read last."""

    digest: int
    """Hash of its lines."""
    counters: GatewayCounters


@dataclass(slots=True)
class _DeploymentTraffic:
    total: CounterSum = field(default_factory=CounterSum)
    pages: dict[str, _ReadPage] = field(default_factory=dict)
    """By address, those of the last scrape."""
    num_windows: int = 0
    last_request_s: float | None = None
    """Time of the last observed request, or of the first scrape."""
    windows: deque[TrafficWindow] = field(default_factory=lambda: deque(maxlen=MAX_WINDOWS))
    fault: str | None = None
    """What Prometheus did not have in the last scrape; empty: nothing; None: it was not asked."""


class TrafficScraper(Generic[K]):
    """Traffic windows by deployment. `now` returns Unix time, as in the status."""

    def __init__(
        self,
        now: Callable[[], float],
        fetch: Fetch = fetch,
        prometheus: PrometheusSource | None = None,
    ) -> None:
        self._now, self._fetch, self._prometheus = now, fetch, prometheus
        self._state: dict[K, _DeploymentTraffic] = {}
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)

    def get_windows(self, key: K) -> tuple[TrafficWindow, ...]:
        """Return the kept windows, oldest first."""
        state = self._state.get(key)
        return tuple(state.windows) if state else ()

    def get_recent(self, key: K) -> TrafficWindow | None:
        """Return about the last minute; None: it was not observed."""
        windows = self.get_windows(key)[-RECENT_WINDOWS:]
        is_old = not windows or self._now() - windows[-1].end_s > MISSING_TIMEOUT_S
        return None if is_old else join_windows(windows)

    def get_in_flight(self, key: K) -> float:
        """Return the requests that waited or ran at the last scrape."""
        state = self._state.get(key)
        return state.total.counts.in_flight if state and state.total.counts else 0.0

    def get_idle_s(self, key: K) -> float:
        """Seconds since the last observed request, or since the first scrape."""
        state = self._state.get(key)
        if state is None or state.last_request_s is None:
            return 0.0
        return self._now() - state.last_request_s

    def get_prometheus_fault(self, key: K) -> str | None:
        """Return what Prometheus did not have in the last scrape; empty: nothing; None: it was not
        asked."""
        state = self._state.get(key)
        return state.fault if state else None

    def record_request(self, key: K) -> None:
        """Record that a request was observed now."""
        self._state.setdefault(key, _DeploymentTraffic()).last_request_s = self._now()

    def is_minute_complete(self, key: K) -> bool:
        """Whether another minute of windows is complete, so that scaling should decide again."""
        return self._state[key].num_windows % RECENT_WINDOWS == 0

    def forget(self, key: K) -> None:
        """Drop the windows of a deleted deployment."""
        self._state.pop(key, None)

    async def scrape(self, key: K, gateways: Collection[str]) -> bool:
        """Scrape these gateways; returns whether there is a new window. Never raises."""
        known = self._state[key].pages if key in self._state else {}
        found, fault = await self._read_prometheus(gateways)
        others = [address for address in gateways if address not in found]
        results = await asyncio.gather(
            *(self._read_page(address, known.get(address)) for address in others)
        )
        state = self._state.setdefault(key, _DeploymentTraffic())
        state.fault = fault
        state.pages = {each: page for each, page in zip(others, results, strict=True) if page}
        found |= {address: page.counters for address, page in state.pages.items()}
        previous = state.total.counts
        if previous is not None and self._now() - previous.at_s > _RESET_AFTER_S:
            # Another operator led meanwhile, or no gateway responded.
            previous, state.total = None, CounterSum()
            state.windows.clear()
        # Of those that Prometheus has not scraped again since, the sum waits for the next counters.
        pages = {each: page for each, page in found.items() if state.total.is_newer(each, page)}
        at_s = fmean(page.at_s for page in pages.values()) if pages else self._now()
        state.total = state.total.add(frozenset(gateways), pages, at_s)
        if state.last_request_s is None or self.get_in_flight(key):
            self.record_request(key)
        if previous is None or state.total.counts is None or state.total.counts is previous:
            return False
        window = compute_window(previous, state.total.counts)
        if window is not None:
            state.windows.append(window)
            state.num_windows += 1
            if window.num_requests:
                self.record_request(key)
        return window is not None

    async def _read_prometheus(
        self, gateways: Collection[str]
    ) -> tuple[dict[str, GatewayCounters], str | None]:
        """Recent counters by address, and what is missing; None: there is no Prometheus."""
        if self._prometheus is None:
            return {}, None
        addresses = {urlsplit(build_base_url(each)).netloc: each for each in gateways}
        try:
            async with self._slots:
                counters = await self._prometheus.read_counters(addresses)
        except PrometheusError as error:
            return {}, str(error)
        now_s = self._now()
        found = {
            addresses[each]: page
            for each, page in counters.items()
            # Later ones would hide those of the gateway itself.
            if each in addresses and abs(now_s - page.at_s) <= MISSING_TIMEOUT_S
        }
        missing = [each for each, address in addresses.items() if address not in found]
        if not missing:
            return found, ""
        which = f"{min(missing)} and {len(missing) - 1} others" if missing[1:] else missing[0]
        return found, (
            f"Prometheus at {self._prometheus.url} has no counters with instance {which} of the "
            f"last {MISSING_TIMEOUT_S:g} s"
        )

    async def _read_page(self, address: str, previous: _ReadPage | None) -> _ReadPage | None:
        try:
            async with self._slots:
                page = await self._fetch(build_base_url(address) + _PATH)
            lines, now_s = select_lines(page), self._now()
            digest = hash(lines)
            if previous is not None and previous.digest == digest:
                return replace(previous, counters=replace(previous.counters, at_s=now_s))
            # In a thread: a page takes milliseconds to parse.
            return _ReadPage(digest, await asyncio.to_thread(parse_metrics_page, lines, now_s))
        except (http_client.HttpError, CountsError) as error:
            log.debug("the gateway at %s: %s", address, error)
            return None
