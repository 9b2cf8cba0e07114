"""The operator's windows of traffic from a real Prometheus, beside those from the gateway."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from cleave.controller.cluster import gateway_client
from cleave.controller.cluster.prometheus_source import PrometheusSource
from cleave.controller.cluster.traffic_scraper import TrafficScraper
from cleave.traffic.window import TrafficWindow, join_windows

from e2e.support.deployments import Deployment, deployed, emulated
from e2e.support.prometheus import find_programs, running

pytestmark = pytest.mark.timeout(300)
POLL_S = 1.0
SCRAPE_INTERVAL = "2s"
WATCHED_S = 30.0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(emulated("chat", 1, 1), tmp_path_factory.mktemp("fleet"), 180) as deployment:
        yield deployment


async def test_both_sources_give_the_same_rate_lengths_and_latencies(
    fleet: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And when Prometheus ends, the windows go on, without a burst."""
    if (programs := find_programs(build=False)) is None:
        pytest.skip("no Prometheus here: `make tools` builds it")
    gateway = urlsplit(fleet.url)
    monkeypatch.setattr(gateway_client, "INTERNAL_PORT", gateway.port)
    host = (gateway.hostname or "",)
    jobs = [{"job_name": "gateways", "static_configs": [{"targets": [gateway.netloc]}]}]
    with running(programs, tmp_path / "prometheus", jobs, interval=SCRAPE_INTERVAL) as prometheus:
        asking = TrafficScraper[str](time.time, prometheus=PrometheusSource(prometheus.url))
        scraping = TrafficScraper[str](time.time)
        async with loaded(fleet.url):
            await poll((asking, scraping), host, WATCHED_S)
        both = [whole(each.get_windows("chat")) for each in (asking, scraping)]
        assert asking.get_prometheus_fault("chat") == ""
    assert_similar(*both)
    counted = len(asking.get_windows("chat"))
    async with loaded(fleet.url):
        await poll((asking, scraping), host, 6.0)
    assert str(asking.get_prometheus_fault("chat")).startswith(f"Prometheus at {prometheus.url}: ")
    assert len(asking.get_windows("chat")) >= counted + 3
    assert_similar(*(whole(each.get_windows("chat")) for each in (asking, scraping)))


def whole(windows: tuple[TrafficWindow, ...]) -> TrafficWindow:
    return join_windows(windows)


def assert_similar(one: TrafficWindow, other: TrafficWindow) -> None:
    """Their beginnings and ends are up to a scrape apart."""
    assert one.rate == pytest.approx(other.rate, rel=0.05)
    assert one.prompts.mean == pytest.approx(other.prompts.mean, rel=0.02)
    assert one.outputs.mean == pytest.approx(other.outputs.mean, rel=0.02)
    assert one.ttft_p50_ms == pytest.approx(other.ttft_p50_ms, rel=0.1)
    assert one.attainment == pytest.approx(other.attainment, abs=0.05)


@contextlib.asynccontextmanager
async def loaded(url: str):
    """Ten streams a second, of two lengths."""
    asks: set[asyncio.Task[None]] = set()

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        words, tokens = (20, 8) if number % 2 else (200, 24)
        body = {"model": "chat", "prompt": "word " * words, "max_tokens": tokens, "stream": True}
        answer = await client.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200

    async def send(client: httpx.AsyncClient) -> None:
        for number in range(10_000):
            asks.add(asyncio.create_task(ask(client, number)))
            await asyncio.sleep(0.1)

    async with httpx.AsyncClient() as client:
        sending = asyncio.create_task(send(client))
        # From the start of the load on; before it the rate was another one.
        await asyncio.sleep(3)
        yield
        sending.cancel()
        await asyncio.gather(*asks)


async def poll(
    scrapers: tuple[TrafficScraper[str], ...], host: tuple[str, ...], for_s: float
) -> None:
    end_s = time.monotonic() + for_s
    while time.monotonic() < end_s:
        await asyncio.gather(*(each.scrape("chat", host) for each in scrapers))
        await asyncio.sleep(POLL_S)
