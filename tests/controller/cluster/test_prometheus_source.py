"""The gateways' counters from a server that speaks Prometheus' API.

e2e/test_prometheus_source.py asks a real one.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from cleave.controller.cluster import prometheus_source
from cleave.controller.cluster.prometheus_source import (
    PrometheusError,
    PrometheusSource,
    build_query,
)

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
GATEWAY = "10.0.0.1:8081"


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Answer], Awaitable[str]]]:
    """Starts a server; its URL."""
    runners: list[web.AppRunner] = []

    async def start(answer: Answer) -> str:
        application = web.Application()
        application.router.add_get("/prefix/api/v1/query", answer)
        runners.append(runner := web.AppRunner(application, shutdown_timeout=0.01))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}/prefix/"

    yield start
    for runner in runners:
        await runner.cleanup()


def sample(name: str, value: float, **labels: str) -> dict[str, object]:
    named = {"__name__": name} if name else {}
    return {
        "metric": {"instance": GATEWAY, "job": "a", **named, **labels},
        "value": [0, f"{value}"],
    }


def result(*series: dict[str, object]) -> web.Response:
    return web.json_response({"status": "success", "data": {"result": series}})


SAMPLED = sample("", 990.5, cleave_sampled="1")


async def test_counters_have_the_time_of_their_scrape_and_labels_without_a_value(serve) -> None:
    queries = []

    async def answer(request: web.Request) -> web.Response:
        queries.append((request.headers["Authorization"], request.query["query"]))
        return result(
            sample("cleave_gateway_requests_total", 9, outcome="ok"),
            sample("cleave_gateway_requests_total", 2, outcome="refused"),
            sample("cleave_gateway_slo_total", 5),
            sample("cleave_gateway_slo_total", 3, missed="ttft"),
            sample("cleave_gateway_request_prompt_tokens_bucket", 4, le="256"),
            sample("cleave_gateway_request_prompt_tokens_bucket", 9, le="+Inf"),
            sample("cleave_gateway_request_prompt_tokens_sum", 2_000),
            sample("process_start_time_seconds", 7),
            SAMPLED,
        )

    source = PrometheusSource(await serve(answer), " token\n")
    counters = (await source.read_counters([GATEWAY]))[GATEWAY]
    assert (counters.at_s, counters.started_s, counters.requests) == (990.5, 7, 9)
    assert (counters.measured, counters.attained) == (8, 5)
    assert (counters.prompts.num, counters.prompts.total) == (9, 2_000)
    assert queries == [("Bearer token", build_query([GATEWAY]))]


async def test_of_two_jobs_that_scrape_a_gateway_one_counts(serve) -> None:
    async def answer(_: web.Request) -> web.Response:
        others = (sample("cleave_gateway_requests_total", 8, job="b"), {**SAMPLED})
        others[1]["metric"] = {**SAMPLED["metric"], "job": "b"}
        return result(sample("cleave_gateway_requests_total", 9), SAMPLED, *others)

    counters = await PrometheusSource(await serve(answer)).read_counters([GATEWAY])
    assert counters[GATEWAY].requests == 9


async def test_a_gateway_without_samples_is_left_out(serve) -> None:
    async def answer(_: web.Request) -> web.Response:
        return result()

    assert await PrometheusSource(await serve(answer)).read_counters([GATEWAY]) == {}


async def test_each_way_to_fail_is_one_error_with_the_server(serve, monkeypatch) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"status": "error", "error": "too many samples"}, status=422)

    async def log_in(_: web.Request) -> web.Response:
        raise web.HTTPFound("http://elsewhere/login")

    async def flood(_: web.Request) -> web.Response:
        return web.Response(body=b"x" * 2_000)

    async def hang(_: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return result()

    async def lie(_: web.Request) -> web.Response:
        return result({"metric": {}, "value": [0, "many"]})

    async def count_nothing(_: web.Request) -> web.Response:
        return result(sample("cleave_gateway_requests_total", math.nan), SAMPLED)

    monkeypatch.setattr(prometheus_source, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(prometheus_source, "MAX_RESPONSE_BYTES", 1_000)
    for answer, reason in (
        (refuse, "answered 422: too many samples"),
        (log_in, "answered 302, not as Prometheus does"),
        (flood, "the response is over"),
        (hang, "no response within 0.2 s"),
        (lie, "could not convert string to float: 'many'"),
        (count_nothing, "'nan'. is no sample of a counter"),
    ):
        url = await serve(answer)
        with pytest.raises(PrometheusError, match=f"^Prometheus at {url[:-1]}: .*{reason}"):
            await PrometheusSource(url).read_counters([GATEWAY])
    with pytest.raises(PrometheusError, match=r"^Prometheus at http://127\.0\.0\.1:1: "):
        await PrometheusSource("http://127.0.0.1:1").read_counters([GATEWAY])


async def test_one_that_does_not_respond_is_left_alone_for_a_while(serve, monkeypatch) -> None:
    """Else a hundred deployments would wait for it one after another, at each poll."""
    now_s, queries = 100.0, 0

    async def hang(_: web.Request) -> web.Response:
        nonlocal queries
        queries += 1
        await asyncio.sleep(60)
        return result()

    monkeypatch.setattr(prometheus_source, "TIMEOUT_S", 0.2)
    source = PrometheusSource(await serve(hang), clock=lambda: now_s)
    for wait_s, expected in ((0.0, 1), (0.1, 1), (29.8, 1), (0.2, 2)):
        now_s += wait_s
        with pytest.raises(PrometheusError, match=r"no response within 0\.2 s"):
            await source.read_counters([GATEWAY])
        assert queries == expected


def test_addresses_are_no_patterns() -> None:
    assert r'instance=~"10\\.0\\.0\\.1:8081|\\[fd00::1\\]:8081"' in build_query(
        ["[fd00::1]:8081", GATEWAY]
    )
