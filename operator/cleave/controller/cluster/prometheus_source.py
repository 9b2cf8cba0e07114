"""Reads the counters of gateways from Prometheus, which has scraped them.

Used by the traffic scraper, where the operator has a Prometheus. What is hard: a query gives each
counter's newest sample without its time. Two polls may find one scrape, or skip one, so rates over
the time of polls would be wrong by as much; the time of each gateway's scrape comes with the query.
"""

import asyncio
import math
import re
import ssl
import time
from collections import defaultdict
from collections.abc import Callable, Collection

import httpx
import msgspec
from prometheus_client.samples import Sample

from cleave.traffic.counters import NAME_STARTS, START, GatewayCounters, build_counters
from cleave.traffic.prometheus import decode_series

TIMEOUT_S = 5.0
RETRY_S = 30.0
"""How long one that did not respond is not asked: else deployments wait for it in turn."""
MAX_RESPONSE_BYTES = 16 << 20
_PATH = "/api/v1/query"
_LABELS = ("le", "outcome", "missed", "slo", "threshold")
"""Those that `build_counters` tells apart; models and tenants are summed by Prometheus."""
_SAMPLED = "cleave_sampled"
"""Label of the series with the time of a scrape."""


class PrometheusError(RuntimeError):
    """There is no usable response; one sentence with the server."""


class PrometheusSource:
    """One Prometheus, or what speaks its API."""

    def __init__(
        self, url: str, token: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`token`: a bearer token; empty: none."""
        self.url, token = url.rstrip("/"), token.strip()
        self._clock, self._retry_at = clock, -math.inf
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._tls = ssl.create_default_context()

    async def read_counters(self, instances: Collection[str]) -> dict[str, GatewayCounters]:
        """The newest counters of gateways by `instance`, which are their host:port; a gateway that
        Prometheus does not have is left out. Raises PrometheusError."""
        silence = PrometheusError(f"Prometheus at {self.url}: no response within {TIMEOUT_S:g} s")
        if self._clock() < self._retry_at:
            raise silence
        try:
            # httpx's own timeout begins anew with each part of a response.
            async with asyncio.timeout(TIMEOUT_S):
                status, body = await self._fetch(build_query(instances))
            # In a thread: hundreds of gateways take a tenth of a second.
            return await asyncio.to_thread(parse_counters, body, status)
        except (TimeoutError, httpx.TimeoutException):
            self._retry_at = self._clock() + RETRY_S
            raise silence from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise PrometheusError(f"Prometheus at {self.url}: {error}") from error

    async def _fetch(self, query: str) -> tuple[int, bytes]:
        """Status and body of a response. Raises HTTPError, InvalidURL and PrometheusError."""
        body = bytearray()
        # Redirects are not followed: the token is for this server.
        async with (
            httpx.AsyncClient(verify=self._tls, timeout=TIMEOUT_S) as client,
            client.stream(
                "GET", self.url + _PATH, params={"query": query}, headers=self._headers
            ) as response,
        ):
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_RESPONSE_BYTES:
                    limit = f"{MAX_RESPONSE_BYTES >> 20} MiB"
                    raise PrometheusError(f"Prometheus at {self.url}: the response is over {limit}")
        return response.status_code, bytes(body)


def build_query(instances: Collection[str]) -> str:
    """The newest samples of what `build_counters` reads, and when they were scraped."""
    found = _format_text("|".join(map(re.escape, sorted(instances))))
    names = _format_text("|".join(f"{start}.*" for start in NAME_STARTS))
    by = ", ".join(("__name__", "job", "instance", *_LABELS))
    # Without a label of its own `or` would take it for a counter without labels.
    sampled = f'label_replace(timestamp({START}{{instance=~{found}}}), "{_SAMPLED}", "1", "", "")'
    return (
        f"sum by ({by}) ({{__name__=~{names}, instance=~{found}}})"
        f" or max by (job, instance, {_SAMPLED}) ({sampled})"
    )


def parse_counters(body: bytes, status: int) -> dict[str, GatewayCounters]:
    """Counters by instance from a response; of several jobs that scrape one, the first counts.
    Raises ValueError."""
    samples: dict[tuple[str, str], dict[str, list[Sample]]] = {}
    sampled_s: dict[tuple[str, str], float] = {}
    for each in decode_series(body, _PATH, status):
        labels = each.metric
        target = labels.get("instance", ""), labels.get("job", "")
        value = float(each.value[1]) if each.value else math.nan
        if not math.isfinite(value):
            raise ValueError(f"{each.value!r} is no sample of a counter")
        if _SAMPLED in labels:
            sampled_s[target] = value
            continue
        name = labels.get("__name__", "")
        # Prometheus leaves out labels whose value is empty.
        sample = Sample(name, {**dict.fromkeys(_LABELS[1:], ""), **labels}, value)
        samples.setdefault(target, defaultdict(list))[name].append(sample)
    counters: dict[str, GatewayCounters] = {}
    for target in sorted(samples.keys() & sampled_s.keys()):
        counters.setdefault(target[0], build_counters(samples[target], sampled_s[target]))
    return counters


def _format_text(text: str) -> str:
    """A PromQL string; they are quoted like JSON's."""
    return msgspec.json.encode(text).decode()
