"""What an engine says about itself, as the agent reads it."""

import json
import socket

import pytest
from aiohttp import web

from cleave.rpc.http_client import HttpError
from cleave.rpc.pull_counters import PullCounters
from cleave_worker.agent import engine_api

PAGE = 'vllm:cache_config_info{block_size="32",x="y"} 1.0\n'
NIXL = """
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 700.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 300.0
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="m"} 0.5
vllm:nixl_bytes_transferred_bucket{engine="0",le="2048.0",model_name="m"} 1.0
vllm:nixl_bytes_transferred_count{engine="0",model_name="m"} 3.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 1.5e+06
vllm:nixl_num_failed_transfers_total{engine="0",model_name="m"} 2.0
"""
OWN = """
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 300.0
cleave_kv_pull_seconds_sum{engine="0",model_name="m",transport="gloo"} 0.25
cleave_kv_pull_seconds_sum{engine="0",model_name="m",transport="shared memory"} 0.25
cleave_kv_pulled_bytes_total{engine="0",model_name="m",transport="gloo"} 1.0e+06
cleave_kv_pulled_bytes_total{engine="0",model_name="m",transport="shared memory"} 500000.0
cleave_kv_lost_total{engine="0",model_name="m",reason="boot"} 0.0
cleave_kv_lost_total{engine="0",model_name="m",reason="expired"} 7.0
cleave_kv_lost_total{engine="0",model_name="m",reason="peer_lost"} 2.0
"""
BASE = {"id": "m", "parent": None, "max_model_len": 2048}


@pytest.fixture
async def served():
    """An engine that lists these models; its URL."""
    runners = []

    async def serve(
        cards: object, page: str = PAGE, status: int = 200, template: object = repr
    ) -> str:
        async def answer(request: web.Request) -> web.Response:
            pages = {
                "/v1/models": json.dumps({"data": cards}),
                "/version": '{"version": "1.2"}',
                "/metrics": page,
            }
            return web.Response(text=pages[request.path], status=status)

        async def tokenize(request: web.Request) -> web.Response:
            options = (await request.json())["chat_template_kwargs"]
            return web.Response(text=template(options))

        app = web.Application()
        app.router.add_post("/tokenize", tokenize)
        app.router.add_get("/{path:.*}", answer)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runners[-1].addresses[0][1]}"

    yield serve
    for runner in runners:
        await runner.cleanup()


async def test_adapters_are_the_models_that_have_a_parent(served) -> None:
    adapters = [{"id": name, "parent": "m", "max_model_len": None} for name in ("sql", "law")]
    url = await served([BASE, {**BASE, "id": "m2"}, *adapters])
    facts = await engine_api.fetch_info(url, "vllm", 16, 5.0)
    assert facts.adapters == ("sql", "law")
    assert (facts.engine, facts.max_model_len, facts.kv_block_size) == ("vllm 1.2", 2048, 32)


@pytest.mark.parametrize("cards", [[BASE], [], None])
async def test_an_engine_without_adapters_has_none(served, cards: object) -> None:
    assert (await engine_api.fetch_info(await served(cards), "vllm", 16, 5.0)).adapters == ()


@pytest.mark.parametrize(
    ("template", "always"),
    [
        (lambda options: str(options["enable_thinking"]), False),
        (lambda options: options["reasoning_effort"], False),
        (lambda _: "", True),
        # It takes an effort that it does not know for the greatest.
        (lambda options: options["reasoning_effort"].replace("none", "max"), True),
    ],
)
async def test_a_template_whose_prompt_stays_the_same_does_not_switch_thinking_off(
    served, template, always: bool
) -> None:
    url = await served([BASE], template=template)
    assert (await engine_api.fetch_info(url, "vllm", 16, 5.0)).always_thinks is always
    assert not (await engine_api.fetch_info(url, "emulated", 16, 5.0)).always_thinks


async def test_an_engine_that_is_slow_to_render_a_chat_still_says_what_it_serves(
    served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(method: str, url: str, *args: object, **options: object) -> object:
        if url.endswith("/tokenize"):
            raise HttpError("no answer within 5 s")
        return await request(method, url, *args, **options)

    request = engine_api.request
    monkeypatch.setattr(engine_api, "request", ask)
    facts = await engine_api.fetch_info(await served([BASE]), "vllm", 16, 5.0)
    assert (facts.engine, facts.always_thinks) == ("vllm 1.2", False)


@pytest.mark.parametrize(("page", "way"), [(NIXL, ""), (OWN, "gloo")])
async def test_what_was_pulled_is_counted_whichever_the_connector(served, page, way) -> None:
    found = await engine_api.fetch_pull_counters(await served([BASE], page), 5.0)
    assert found == PullCounters(1.5e6, 0.5, num_tokens=300, num_failed=2, transport=way)


async def test_an_engine_without_such_counters_counts_nothing(served) -> None:
    assert await engine_api.fetch_pull_counters(await served([BASE]), 5.0) is None


async def test_a_page_of_metrics_that_fails_does_not_say_that_nothing_is_counted(served) -> None:
    url = await served([BASE], status=503)
    with pytest.raises(HttpError, match="answers 503"):
        await engine_api.fetch_pull_counters(url, 5.0)


async def test_a_port_is_known_to_be_served_by_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        assert await engine_api.is_listening("127.0.0.1", port, 10)
    assert not await engine_api.is_listening("127.0.0.1", port, 10)
    assert not await engine_api.is_listening("127.0.0.1", 0, 10)
