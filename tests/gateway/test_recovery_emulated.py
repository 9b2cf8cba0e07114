"""A failed KV pull as an engine really reports it, seen through the gateway."""

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from cleave.perf import latency, model
from cleave_worker.emulator.api import Api
from cleave_worker.emulator.config import EngineConfig, KvTransfer
from cleave_worker.emulator.engine import Engine
from cleave_worker.emulator.scheduler import Limits

NO_PORT = 1
"""Nobody listens there."""


@pytest.fixture
async def decode_url() -> AsyncIterator[str]:
    """An emulated engine."""
    profile = latency.load("distserve/opt-13b/tp1")
    config = EngineConfig(
        served_model_name="m",
        shape=model.load("opt-13b"),
        profile=profile,
        max_model_len=2048,
        limits=Limits(max_num_seqs=64, max_num_batched_tokens=512),
        block_size=16,
        num_blocks=1_000,
        time_scale=0.02,
        kv_transfer=KvTransfer("boot-d", "127.0.0.1", 0),
    )
    engine = Engine(config)
    runner = web.AppRunner(
        Api(engine).application(), handler_cancellation=True, shutdown_timeout=0.01
    )
    await engine.start()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await engine.stop()
    await runner.cleanup()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
async def test_kv_that_is_gone_is_computed_anew_and_the_client_sees_nothing(
    pair, decode_url, stream, chat
) -> None:
    async def offer_what_is_gone(engine, request, writer):
        handoff = engine.handoff() | {
            "remote_block_ids": [list(range(20))],
            "remote_request_id": "r",
            "remote_port": NO_PORT,
            "remote_num_tokens": 200,
        }
        engine.send_json(writer, engine.prefill_answer() | {"kv_transfer_params": handoff})

    prompt = "word " * 100
    asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    pair.engines["p"].script = offer_what_is_gone
    pair.state(pair.engines["d"], engine_url=decode_url)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    response = await pair.ask({"model": "m", "max_tokens": 4, "stream": stream} | asked, path)
    assert response.status == 200
    assert b"error" not in response.body
    assert pair.context.metrics.retries == {("decode", "status"): 1}
    assert pair.context.metrics.requests == {("m", "ok"): 1}
    await pair.until_idle()
