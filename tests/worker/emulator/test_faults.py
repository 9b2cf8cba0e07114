"""Injected faults: each is visible to a client as an error, a delay or a wrong token."""

import asyncio

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from cleave_worker.access.engine_access import EngineAccess
from cleave_worker.emulator.api import EmulatorApi
from cleave_worker.emulator.engine import EmulatedEngine

PROMPT = {"prompt": [11, 12, 13, 14] * 30, "max_tokens": 20, "ignore_eos": True}


async def inject(server, **faults: object) -> None:
    url = server.url + "/emulator/faults"
    async with server.session.post(url, json=faults) as response:
        assert response.status == 200, await response.text()


async def clear(server) -> None:
    async with server.session.delete(server.url + "/emulator/faults") as response:
        assert response.status == 200


async def test_faults_are_off_by_default(config) -> None:
    engine = EmulatedEngine(config)
    await engine.start()
    async with TestClient(TestServer(EmulatorApi(engine).build_application())) as client:
        assert (await client.post("/emulator/faults", json={"refuse": True})).status == 404
        assert (await client.delete("/emulator/faults")).status == 404
    await engine.stop()


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"slow": 0}', b'{"explode": true}'])
async def test_a_fault_that_is_not_understood_is_refused(serve, body: bytes) -> None:
    server = await serve()
    async with server.session.post(server.url + "/emulator/faults", data=body) as response:
        assert response.status == 400


async def test_a_refusing_engine_answers_503_until_cleared(serve) -> None:
    server = await serve()
    await inject(server, refuse=True)
    status, answer = await server.post(PROMPT)
    assert (status, answer["error"]["code"]) == (503, 503)
    await clear(server)
    assert (await server.post(PROMPT))[0] == 200


async def test_a_hanging_engine_answers_health_but_makes_no_token(serve) -> None:
    server = await serve()
    await inject(server, hang=True)
    request = asyncio.create_task(server.post(PROMPT))
    await asyncio.sleep(0.3)
    assert not request.done()
    async with server.session.get(server.url + "/health") as response:
        assert response.status == 200
    await inject(server, hang=False)
    assert (await request)[0] == 200


async def test_a_slow_engine_takes_longer(serve) -> None:
    server = await serve(time_scale=0.1)
    await inject(server, slow=10)
    started = asyncio.get_running_loop().time()
    await server.post({**PROMPT, "max_tokens": 5})
    assert asyncio.get_running_loop().time() - started > 5 * 0.019


async def hand_over(one, other, prompt: list[int]) -> tuple[int, str]:
    """(status, text or message) of a prompt that is computed in one and decoded in the other."""
    body = {**PROMPT, "prompt": prompt}
    status, answer = await other.post({**body, "kv_transfer_params": await one.prefill(body)})
    return status, answer["choices"][0]["text"] if status == 200 else answer["error"]["message"]


async def test_the_requested_number_of_handoffs_is_corrupted(serve) -> None:
    one, other = await serve("A"), await serve("B")
    await inject(one, wrong_kv=1)
    same = []
    for token in (21, 22):
        text = await one.text({**PROMPT, "prompt": [token] * 50})
        same.append(await hand_over(one, other, [token] * 50) == (200, text))
    assert same == [False, True]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("corrupt_handoff", "is not what the prefill instance wrote"),
        ("stale_handoff", "is not what the prefill instance wrote"),
        ("short_handoff", "unexpected response"),
    ],
)
async def test_a_transfer_that_delivers_other_blocks_fails_once(serve, fault, message) -> None:
    one, other = await serve("A"), await serve("B")
    await inject(one, **{fault: 1})
    status, said = await hand_over(one, other, [21] * 50)
    assert (status, message in said) == (500, True), said
    assert (await other.samples())["vllm:nixl_num_failed_transfers_total"] == 1
    text = await one.text({**PROMPT, "prompt": [22] * 50})
    assert await hand_over(one, other, [22] * 50) == (200, text)


async def test_corrupt_blocks_are_computed_anew_where_the_policy_says_so(serve) -> None:
    one, other = await serve("A"), await serve("B", recompute_on_failure=True)
    await inject(one, corrupt_handoff=1)
    text = await one.text({**PROMPT, "prompt": [21] * 50})
    assert await hand_over(one, other, [21] * 50) == (200, text)
    assert (await other.samples())["vllm:emulated_corrupt_transfers_total"] == 1


async def test_an_empty_handoff_gives_the_right_tokens_and_counts_no_byte(serve) -> None:
    one, other = await serve("A"), await serve("B")
    await inject(other, empty_handoff=1)
    text = await one.text({**PROMPT, "prompt": [21] * 50})
    assert await hand_over(one, other, [21] * 50) == (200, text)
    counted = await other.samples()
    assert counted["vllm:nixl_bytes_transferred_sum"] == 0
    assert counted["vllm:nixl_num_failed_transfers_total"] == 0
    text = await one.text({**PROMPT, "prompt": [22] * 50})
    assert await hand_over(one, other, [22] * 50) == (200, text)
    # Whole blocks of 16 tokens.
    per_token = other.engine.config.shape.kv_bytes_per_token
    assert (await other.samples())["vllm:nixl_bytes_transferred_sum"] == 64 * per_token
    await one.until(lambda: one.num_used_blocks == 0)


async def test_swapped_handoffs_are_those_of_the_prefills_before(serve) -> None:
    one, other = await serve("A"), await serve("B")
    await one.prefill({**PROMPT, "prompt": [20] * 50})
    await inject(one, swap_handoff=1)
    status, said = await hand_over(one, other, [21] * 50)
    assert (status, "of another prompt" in said) == (500, True), said
    assert (await hand_over(one, other, [22] * 50))[0] == 200


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_a_dropped_stream_ends_after_so_many_tokens(serve, count: int) -> None:
    server = await serve()
    await inject(server, drop=count)
    body = {**PROMPT, "stream": True}
    async with server.session.post(server.url + "/v1/completions", json=body) as response:
        for _ in range(count):
            assert (await response.content.readline()).startswith(b"data: ")
            await response.content.readline()
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.read()
    await server.until(lambda: server.num_used_blocks == 0)


async def test_a_dead_loop_fails_all_requests_and_health(serve, monkeypatch, caplog) -> None:
    server = await serve()

    def explode(step: object) -> list:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(server.engine.scheduler, "complete", explode)
    status, answer = await server.post(PROMPT)
    assert (status, answer["error"]["message"]) == (500, "the engine is dead")
    async with server.session.get(server.url + "/health") as response:
        assert response.status == 503
    assert (await server.post(PROMPT))[0] == 503
    assert "out of memory" in caplog.text


async def test_faults_need_no_key_where_they_are_allowed(config) -> None:
    engine = EmulatedEngine(config)
    await engine.start()
    api = EmulatorApi(engine, fault_injection=True, access=EngineAccess("secret"))
    async with TestClient(TestServer(api.build_application())) as client:
        assert (await client.post("/emulator/faults", json={"slow": 2})).status == 200
        assert (await client.get("/v1/models")).status == 401
    await engine.stop()
