"""What an engine says about itself, as the agent reads it."""

import json

import pytest
from aiohttp import web

from cleave_worker.agent import engine_api

BASE = {"id": "m", "parent": None, "max_model_len": 2048}


@pytest.fixture
async def served():
    """An engine that lists these models; its URL."""
    runners = []

    async def serve(cards: object) -> str:
        async def answer(request: web.Request) -> web.Response:
            pages = {
                "/v1/models": json.dumps({"data": cards}),
                "/version": '{"version": "1.2"}',
                "/metrics": 'vllm:cache_config_info{block_size="32",x="y"} 1.0\n',
            }
            return web.Response(text=pages[request.path])

        app = web.Application()
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
    facts = await engine_api.facts(url, "vllm", 16, 5.0)
    assert facts.adapters == ("sql", "law")
    assert (facts.engine, facts.max_model_len, facts.kv_block_size) == ("vllm 1.2", 2048, 32)


@pytest.mark.parametrize("cards", [[BASE], [], None])
async def test_an_engine_without_adapters_has_none(served, cards: object) -> None:
    assert (await engine_api.facts(await served(cards), "vllm", 16, 5.0)).adapters == ()
