"""Windows of traffic from gateways' pages: bounded, under any behaviour of the gateways."""

import asyncio

import pytest

from cleave.controller.cluster import traffic_scraper
from cleave.controller.cluster.prometheus_source import PrometheusError
from cleave.controller.cluster.traffic_scraper import MAX_WINDOWS, RECENT_WINDOWS, TrafficScraper
from cleave.rpc import http_client
from cleave.traffic.counters import GatewayCounters, parse_metrics_page

PERIOD_S = 15.0
GATEWAYS = ("10.0.0.1", "fd00::1")


class Gateways:
    """Pages by URL; none: does not answer."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.requests = {"http://10.0.0.1:8081/metrics": 0, "http://[fd00::1]:8081/metrics": 0}
        self.under_way = self.most = 0

    async def fetch(self, url: str) -> str:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        if url not in self.requests:
            raise http_client.HttpError("refused")
        count = self.requests[url]
        return (
            f'cleave_gateway_requests_total{{model="m",outcome="ok"}} {count}\n'
            "process_start_time_seconds 7\n"
        )


@pytest.fixture
def gateways() -> Gateways:
    return Gateways()


@pytest.fixture
def scraper(gateways: Gateways) -> TrafficScraper[str]:
    return TrafficScraper(lambda: gateways.now_s, gateways.fetch)


async def turn(scraper: TrafficScraper[str], gateways: Gateways, more: int = 0) -> bool:
    gateways.now_s += PERIOD_S
    for url in gateways.requests:
        gateways.requests[url] += more
    return await scraper.scrape("chat", GATEWAYS)


async def test_two_looks_make_a_window_of_all_gateways(
    scraper: TrafficScraper[str], gateways: Gateways
) -> None:
    assert not await turn(scraper, gateways, 100)
    assert scraper.get_recent("chat") is None
    assert await turn(scraper, gateways, 30)
    (window,) = scraper.get_windows("chat")
    assert (window.num_requests, window.length_s, window.rate) == (60, PERIOD_S, 4)


async def test_a_gateway_that_does_not_answer_holds_the_window_open(
    scraper: TrafficScraper[str], gateways: Gateways
) -> None:
    await turn(scraper, gateways)
    silent = gateways.requests.pop("http://[fd00::1]:8081/metrics")
    assert not await turn(scraper, gateways, 30)
    gateways.requests["http://[fd00::1]:8081/metrics"] = silent + 30
    assert await turn(scraper, gateways, 0)
    (window,) = scraper.get_windows("chat")
    assert (window.num_requests, window.length_s) == (60, 2 * PERIOD_S)


async def test_only_what_has_changed_is_parsed(
    scraper: TrafficScraper[str], gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []

    def parse(page: str, at_s: float) -> GatewayCounters:
        parsed.append(page)
        return parse_metrics_page(page, at_s)

    monkeypatch.setattr(traffic_scraper, "parse_metrics_page", parse)
    await turn(scraper, gateways)
    await turn(scraper, gateways)
    assert len(parsed) == len(GATEWAYS)
    await turn(scraper, gateways, 30)
    assert len(parsed) == 2 * len(GATEWAYS)
    idle, busy = scraper.get_windows("chat")
    assert (idle.num_requests, idle.length_s) == (0, PERIOD_S)
    assert (busy.num_requests, busy.length_s) == (60, PERIOD_S)


async def test_a_page_of_something_else_is_no_answer(
    scraper: TrafficScraper[str], gateways: Gateways
) -> None:
    async def fetch(_: str) -> str:
        return "<html>"

    other: TrafficScraper[str] = TrafficScraper(lambda: gateways.now_s, fetch)
    assert not await turn(other, gateways)
    assert not await turn(other, gateways)
    assert other.get_windows("chat") == ()


async def test_the_last_minute_is_reported_and_a_bounded_number_of_windows_stored(
    scraper: TrafficScraper[str], gateways: Gateways
) -> None:
    for _ in range(MAX_WINDOWS + 9):
        await turn(scraper, gateways, 15)
    assert len(scraper.get_windows("chat")) == MAX_WINDOWS
    lately = scraper.get_recent("chat")
    assert lately is not None
    assert (lately.length_s, lately.rate) == (RECENT_WINDOWS * PERIOD_S, 2)
    gateways.now_s += 100
    assert scraper.get_recent("chat") is None
    scraper.forget("chat")
    assert scraper.get_windows("chat") == ()


async def test_what_was_counted_long_ago_is_forgotten(
    scraper: TrafficScraper[str], gateways: Gateways
) -> None:
    for _ in range(3):
        await turn(scraper, gateways, 15)
    gateways.now_s += 3600
    assert not await turn(scraper, gateways, 15)
    assert scraper.get_windows("chat") == ()
    assert await turn(scraper, gateways, 15)


async def test_few_pages_are_under_way_at_a_time(
    scraper: TrafficScraper[str], gateways: Gateways
) -> None:
    keys = [f"chat-{number}" for number in range(50)]
    await asyncio.gather(*(scraper.scrape(key, GATEWAYS) for key in keys))
    assert gateways.most <= 16


async def test_it_has_been_quiet_since_the_last_request(
    scraper: TrafficScraper[str], gateways: Gateways
) -> None:
    assert scraper.get_idle_s("chat") == 0
    await turn(scraper, gateways)
    for _ in range(3):
        await turn(scraper, gateways)
    assert scraper.get_idle_s("chat") == 3 * PERIOD_S
    await turn(scraper, gateways, 1)
    assert scraper.get_idle_s("chat") == 0
    await turn(scraper, gateways)
    assert scraper.get_idle_s("chat") == PERIOD_S
    scraper.record_request("chat")
    assert scraper.get_idle_s("chat") == 0


class Prometheus:
    """Counters by instance, or an error."""

    url = "http://prometheus"

    def __init__(self) -> None:
        self.counters: dict[str, GatewayCounters] = {}
        self.fault = ""

    async def read_counters(self, instances: object) -> dict[str, GatewayCounters]:
        if self.fault:
            raise PrometheusError(self.fault)
        return dict(self.counters)

    def scrape(self, gateways: Gateways, age_s: float) -> None:
        """Take the counters as they are now for those of some seconds ago."""
        for url, count in gateways.requests.items():
            address = url.removeprefix("http://").removesuffix("/metrics")
            at_s = gateways.now_s - age_s
            self.counters[address] = GatewayCounters(at_s=at_s, started_s=7, requests=count)


@pytest.fixture
def prometheus() -> Prometheus:
    return Prometheus()


@pytest.fixture
def asking(gateways: Gateways, prometheus: Prometheus) -> TrafficScraper[str]:
    return TrafficScraper(lambda: gateways.now_s, gateways.fetch, prometheus)


async def test_windows_of_prometheus_end_when_it_has_scraped(
    asking: TrafficScraper[str], gateways: Gateways, prometheus: Prometheus
) -> None:
    """Polls every 15 s find a scrape every 30 s: no window is empty, none has twice the rate."""
    for turns in range(9):
        gateways.now_s += PERIOD_S
        for url in gateways.requests:
            gateways.requests[url] += 30
        if turns % 2 == 0:
            prometheus.scrape(gateways, age_s=3.0)
        await asking.scrape("chat", GATEWAYS)
    assert gateways.most == 0, "no gateway is asked itself"
    assert asking.get_prometheus_fault("chat") == ""
    windows = asking.get_windows("chat")
    assert [(each.length_s, each.rate) for each in windows] == [(30.0, 4.0)] * 4


async def test_what_prometheus_does_not_have_is_read_from_the_gateway(
    asking: TrafficScraper[str], gateways: Gateways, prometheus: Prometheus
) -> None:
    for _ in range(3):
        gateways.now_s += PERIOD_S
        for url in gateways.requests:
            gateways.requests[url] += 30
        prometheus.scrape(gateways, age_s=0.0)
        del prometheus.counters["[fd00::1]:8081"]
        await asking.scrape("chat", GATEWAYS)
    assert [each.num_requests for each in asking.get_windows("chat")] == [60.0, 60.0]
    assert asking.get_prometheus_fault("chat") == (
        "Prometheus at http://prometheus has no counters with instance [fd00::1]:8081 of the last "
        "60 s"
    )


async def test_the_source_may_change_without_a_gap_or_a_burst(
    asking: TrafficScraper[str], gateways: Gateways, prometheus: Prometheus
) -> None:
    faults = []
    for turns in range(13):
        gateways.now_s += PERIOD_S
        # As a scrape of some seconds ago has counted.
        prometheus.scrape(gateways, age_s=5.0)
        for url in gateways.requests:
            gateways.requests[url] += 30
        prometheus.fault = "away" if 4 <= turns < 8 else ""
        await asking.scrape("chat", GATEWAYS)
        faults.append(asking.get_prometheus_fault("chat"))
    assert faults == [""] * 4 + ["away"] * 4 + [""] * 5
    windows = asking.get_windows("chat")
    counted = sum(each.num_requests for each in windows)
    assert counted == 2 * 30 * 12
    assert max(each.rate for each in windows) <= 60 / (PERIOD_S - 5.0) * 1.01


async def test_old_samples_of_prometheus_are_no_traffic_of_now(
    asking: TrafficScraper[str], gateways: Gateways, prometheus: Prometheus
) -> None:
    prometheus.scrape(gateways, age_s=0.0)
    for _ in range(7):
        await turn(asking, gateways, 30)
    assert asking.get_recent("chat") is not None
    assert "of the last 60 s" in asking.get_prometheus_fault("chat")


async def test_samples_of_a_time_to_come_do_not_hide_the_gateways_own(
    asking: TrafficScraper[str], gateways: Gateways, prometheus: Prometheus
) -> None:
    prometheus.scrape(gateways, age_s=-3_600.0)
    for _ in range(3):
        await turn(asking, gateways, 30)
    assert [each.num_requests for each in asking.get_windows("chat")] == [60.0, 60.0]
    assert "of the last 60 s" in asking.get_prometheus_fault("chat")
