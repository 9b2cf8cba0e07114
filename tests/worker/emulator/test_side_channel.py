"""KV hand-off between two engines over the side channel, and every way in which it is refused."""

import asyncio

import pytest

from cleave_worker.emulator.sequence import EngineRequest

PROMPT = {"prompt": [11, 12, 13, 14] * 30, "max_tokens": 20, "ignore_eos": True}


def with_params(params: dict, **more: object) -> dict:
    return {**PROMPT, "kv_transfer_params": params, **more}


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 31, 32, 33, 700])
async def test_a_handed_off_request_equals_a_colocated_one(serve, num_tokens: int) -> None:
    one, other, third = await serve("A"), await serve("B"), await serve("C")
    body = {**PROMPT, "prompt": [n % 97 + 5 for n in range(num_tokens)]}
    params = await one.prefill(body)
    text = await other.text({**body, "kv_transfer_params": params})
    assert text == await third.text(body)
    await one.until(lambda: one.num_used_blocks == 0)


async def test_the_handoff_looks_like_nixls(serve) -> None:
    server = await serve("eng-a")
    ask = {"do_remote_decode": True, "do_remote_prefill": False}
    _, answer = await server.post(with_params(ask, max_tokens=1), **{"X-Request-Id": "R"})
    params = answer["kv_transfer_params"]
    assert params["remote_request_id"].startswith("cmpl-R-0-")
    assert params["remote_engine_id"] == "eng-a"
    assert [len(group) for group in params["remote_block_ids"]] == [8]
    assert params["remote_num_tokens"] == 120
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert params["transfer_mode"] == "pull"
    assert server.num_used_blocks == 8


async def test_the_decode_side_computes_only_the_last_prompt_token(serve) -> None:
    one, other = await serve("A"), await serve("B")
    await other.text(with_params(await one.prefill(PROMPT)))
    samples = await other.samples()
    assert samples["vllm:iteration_tokens_total_sum"] == 20
    assert samples['vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'] == 120
    assert samples['vllm:prompt_tokens_by_source_total{source="local_compute"}'] == 0
    assert samples["vllm:external_prefix_cache_hits_total"] == 120
    assert samples["vllm:nixl_xfer_time_seconds_count"] == 1
    assert samples["vllm:nixl_bytes_transferred_sum"] == 128 * 819_200


async def test_usage_has_the_cached_tokens_of_the_engine_that_computed_the_prompt(serve) -> None:
    one, other = await serve("A"), await serve("B", shows_prompt_details=True)
    details = []
    for _ in range(2):
        _, answer = await other.post(with_params(await one.prefill(PROMPT)))
        details.append(answer["usage"]["prompt_tokens_details"])
    assert details == [{"cached_tokens": 0}, {"cached_tokens": 112}]


async def test_a_prefix_that_the_decode_side_has_is_not_pulled_again(serve) -> None:
    one, other = await serve("A"), await serve("B")
    longer = {**PROMPT, "prompt": [*PROMPT["prompt"], *range(5, 40)]}
    text = await one.text(longer)
    await other.text(PROMPT)
    assert text == await other.text({**longer, "kv_transfer_params": await one.prefill(longer)})
    samples = await other.samples()
    assert samples['vllm:prompt_tokens_by_source_total{source="local_cache_hit"}'] == 112
    assert samples['vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'] == 43


async def test_both_directions_work_at_once(serve) -> None:
    one, other = await serve("A"), await serve("B")

    async def through(first, second, start: int) -> tuple[str, str]:
        body = {**PROMPT, "prompt": [n % 90 + start for n in range(100)]}
        text = await second.text({**body, "kv_transfer_params": await first.prefill(body)})
        return text, await first.text(body)

    pairs = await asyncio.gather(
        *(through(one, other, n) for n in range(5, 15)),
        *(through(other, one, n) for n in range(20, 30)),
    )
    assert all(handed_off == colocated for handed_off, colocated in pairs)
    await one.until(lambda: one.num_used_blocks == other.num_used_blocks == 0)


async def test_kv_of_another_prompt_is_refused_and_counted(serve) -> None:
    one, other = await serve("A"), await serve("B")
    params = await one.prefill({**PROMPT, "prompt": [99] * 120})
    assert "of another prompt" in await refused(other, params)
    assert (await one.samples())["vllm:emulated_foreign_pulls_total"] == 1
    assert await other.text(PROMPT) == await one.text(PROMPT), "nothing of it stays in the cache"


async def test_unasked_for_kv_of_another_prompt_gives_wrong_tokens(serve, monkeypatch) -> None:
    """A reader that does not say which prompt it means gets what plain NIXL would give it."""
    one, other = await serve("A"), await serve("B")
    monkeypatch.setattr(EngineRequest, "prompt_digest", b"")
    params = await one.prefill({**PROMPT, "prompt": [99] * 120})
    wrong = await other.text(with_params(params))
    right = await one.text(PROMPT)
    assert wrong != right
    assert await other.text(PROMPT) != right, "it poisons the prefix cache, too"


async def refused(server, params: dict) -> str:
    status, answer = await server.post(with_params(params))
    assert status == 500
    assert answer["error"]["type"] == "InternalServerError"
    assert server.num_used_blocks == 0
    assert (await server.samples())["vllm:nixl_num_failed_transfers_total"] == 1
    return answer["error"]["message"]


async def test_a_handoff_from_itself_is_refused(serve) -> None:
    one = await serve("A")
    params = await one.prefill(PROMPT)
    status, answer = await one.post(with_params(params))
    assert status == 500
    assert "itself" in answer["error"]["message"]


async def test_a_handoff_of_another_boot_is_refused(serve) -> None:
    one, other = await serve("A"), await serve("B")
    params = await one.prefill(PROMPT)
    assert "old" in await refused(other, {**params, "remote_engine_id": "old"})


async def test_a_handoff_is_good_for_one_pull(serve) -> None:
    one, other, third = await serve("A"), await serve("B"), await serve("C")
    params = await one.prefill(PROMPT)
    await other.text(with_params(params))
    await one.until(lambda: one.num_used_blocks == 0)
    assert "no KV is leased" in await refused(third, params)


async def test_blocks_of_another_request_are_refused(serve) -> None:
    one, other = await serve("A"), await serve("B")
    params = await one.prefill(PROMPT)
    foreign = [[block + 1000 for block in params["remote_block_ids"][0]]]
    assert "do not belong" in await refused(other, {**params, "remote_block_ids": foreign})


async def test_a_truncated_handoff_is_refused(serve) -> None:
    one, other = await serve("A"), await serve("B")
    params = await one.prefill(PROMPT)
    short = [params["remote_block_ids"][0][:-1]]
    assert "7 blocks offered" in await refused(other, {**params, "remote_block_ids": short})


async def test_an_unreachable_prefill_instance_fails_the_request(serve) -> None:
    one, other = await serve("A"), await serve("B")
    params = await one.prefill(PROMPT)
    await one.engine.stop()
    assert "cannot be reached" in await refused(other, params)


async def test_a_host_that_is_no_name_fails_the_request(serve) -> None:
    one, other = await serve("A"), await serve("B")
    params = await one.prefill(PROMPT)
    assert "cannot be reached" in await refused(other, {**params, "remote_host": "a." + "b" * 99})


@pytest.mark.parametrize("port", [0, 65536, float("inf"), "x", None])
async def test_a_port_that_is_none_is_a_bad_request(serve, port: object) -> None:
    one, other = await serve("A"), await serve("B")
    params = {**await one.prefill(PROMPT), "remote_port": port}
    status, answer = await other.post(with_params(params))
    assert (status, answer["error"]["param"]) == (400, "kv_transfer_params")


async def test_a_prefill_instance_that_dies_during_the_transfer_fails_the_request(serve) -> None:
    one, other = await serve("A"), await serve("B", latency_ms=500_000)
    params = await one.prefill(PROMPT)
    request = asyncio.create_task(other.post(with_params(params)))
    await other.until(lambda: other.engine._pulls)
    await asyncio.sleep(0.1)
    await one.engine.stop()
    status, answer = await request
    assert (status, "was lost" in answer["error"]["message"]) == (500, True)


async def test_a_failed_pull_is_recomputed_where_the_policy_says_so(serve) -> None:
    one, other = await serve("A"), await serve("B", recompute_on_failure=True)
    params = await one.prefill(PROMPT)
    text = await other.text(with_params({**params, "remote_engine_id": "old"}))
    assert text == await one.text(PROMPT)
    assert other.engine.metrics.prompt_tokens_by_source["local_compute"] == 120


async def test_a_stream_whose_pull_fails_ends_in_an_error_event(serve) -> None:
    one, other = await serve("A"), await serve("B")
    params = {**await one.prefill(PROMPT), "remote_engine_id": "old"}
    body = with_params(params, stream=True)
    async with other.session.post(other.url + "/v1/completions", json=body) as response:
        assert response.status == 200
        error, done, end = (await response.text()).split("\n\n")
    assert '"code":500' in error
    assert (done, end) == ("data: [DONE]", "")


async def test_an_unclaimed_prefill_is_freed_after_its_lease(serve) -> None:
    one, other = await serve("A", lease_s=0.2), await serve("B")
    params = await one.prefill(PROMPT)
    assert one.num_used_blocks == 8
    await one.until(lambda: one.num_used_blocks == 0)
    assert one.engine.metrics.kv_expired == 1
    assert "no KV is leased" in await refused(other, params)


async def test_heartbeats_keep_the_lease_of_a_request_that_waits_its_turn(serve) -> None:
    one = await serve("A", lease_s=1.2)
    other = await serve("B", lease_s=1.2, num_blocks=128)
    async with other.session.post(other.url + "/emulator/faults", json={"hang": True}):
        pass
    # The whole cache is taken by a request of the hanging engine, so the hand-off has to wait.
    big = asyncio.create_task(other.post({"prompt": [5] * 2040, "max_tokens": 2}))
    await other.until(lambda: other.engine.scheduler.running)
    request = asyncio.create_task(other.post(with_params(await one.prefill(PROMPT))))
    await asyncio.sleep(2.5)
    assert one.num_used_blocks == 8
    async with other.session.delete(other.url + "/emulator/faults"):
        pass
    status, answer = await request
    assert (status, answer["choices"][0]["text"]) == (200, await one.text(PROMPT))
    assert (await big)[0] == 200


async def test_a_client_that_leaves_before_the_pull_frees_the_prefill_side(serve) -> None:
    one, other = await serve("A"), await serve("B", latency_ms=500_000)
    params = await one.prefill(PROMPT)
    request = asyncio.create_task(other.post(with_params(params)))
    await other.until(lambda: other.engine._pulls)
    request.cancel()
    await one.until(lambda: one.num_used_blocks == other.num_used_blocks == 0)
    assert one.engine.metrics.kv_expired == 0


async def test_without_a_kv_connector_everything_is_computed_locally(serve, config) -> None:
    one = await serve("A")
    params = await one.prefill(PROMPT)
    one.engine.side_channel, side_channel = None, one.engine.side_channel
    assert await one.text(with_params(params)) == await one.text(PROMPT)
    _, answer = await one.post(with_params({"do_remote_decode": True}, max_tokens=1))
    assert answer["kv_transfer_params"] is None
    one.engine.side_channel = side_channel


async def test_the_transfer_takes_as_long_as_its_bytes(serve) -> None:
    one, other = await serve("A"), await serve("B", bandwidth_gbps=20, latency_ms=0)
    params = await one.prefill(PROMPT)
    started = asyncio.get_running_loop().time()
    await other.text(with_params(params, max_tokens=1))
    expected_s = 128 * 819_200 * 8 / 20e9 * other.engine.config.time_scale
    assert asyncio.get_running_loop().time() - started >= expected_s


async def test_nonsense_on_the_side_channel_is_dropped(serve) -> None:
    one, other = await serve("A"), await serve("B")
    params = await one.prefill(PROMPT)
    for nonsense in (b"\xff\xff\xff\xff", b"\0\0\0\x02hi", b"\0"):
        reader, writer = await asyncio.open_connection("127.0.0.1", params["remote_port"])
        writer.write(nonsense)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
    assert await other.text(with_params(params)) == await one.text(PROMPT)
