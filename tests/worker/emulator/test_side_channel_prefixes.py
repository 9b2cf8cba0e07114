"""Beginnings of prompts pulled from another engine's prefix cache, and every way in which that
fails: then they are computed, and the tokens are the same."""

import asyncio

import pytest

from cleave_worker.emulator.sequence import PrefixSource
from cleave_worker.emulator.side_channel import KvTransferError

PROMPT = [n % 97 + 5 for n in range(120)]
BODY = {"max_tokens": 40, "ignore_eos": True}
WITH_IDS = {"return_token_ids": True}


def point_to(server, **changes: object) -> dict[str, object]:
    """Where the prefix is."""
    channel = server.engine.side_channel
    place = {"engine_id": channel.config.engine_id, "host": "127.0.0.1", "port": channel._port}
    return place | changes


async def prefill(server, prompt: list[int], source: dict | None = None, **more: object) -> dict:
    """kv_transfer_params of a prefill."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    if source is not None:
        params["prefix_source"] = source
    body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": params, **more}
    status, answer = await server.post(body)
    assert status == 200, answer
    return answer["kv_transfer_params"]


async def decode(server, prompt: list[int], params: dict, **more: object) -> list[int]:
    """The tokens of an answer whose prompt was computed elsewhere."""
    body = {"prompt": prompt, "kv_transfer_params": params, **BODY, **WITH_IDS, **more}
    status, answer = await server.post(body)
    assert status == 200, answer
    return answer["choices"][0]["token_ids"]


async def compute(server, prompt: list[int]) -> list[int]:
    """The tokens of an answer that one engine computes alone."""
    status, answer = await server.post({"prompt": prompt, **BODY, **WITH_IDS})
    assert status == 200, answer
    return answer["choices"][0]["token_ids"]


def get_counts(server) -> tuple[int, int, int]:
    """Prompt tokens (computed, pulled, found) of an engine."""
    sources = server.engine.metrics.prompt_tokens_by_source
    names = ("local_compute", "external_kv_transfer", "local_cache_hit")
    return tuple(int(sources[name]) for name in names)  # type: ignore[return-value]


async def test_the_next_turn_pulls_prompt_and_answer_from_the_decode_engine(serve) -> None:
    first, second, decoding = await serve("P1"), await serve("P2"), await serve("D")
    reference = await serve("R")
    answer = await decode(decoding, PROMPT, await prefill(first, PROMPT))
    following = [*PROMPT, *answer, *range(20, 70)]
    params = await prefill(second, following, point_to(decoding))
    # Of 120 + 40 tokens the last has no KV: nine full blocks.
    assert get_counts(second) == (len(following) - 144, 144, 0)
    assert await decode(decoding, following, params) == await compute(reference, following)
    assert decoding.num_used_blocks == second.num_used_blocks == first.num_used_blocks == 0


async def test_a_prefill_engine_pulls_from_another_one_only_what_it_lacks(serve) -> None:
    first, second, reference = await serve("P1"), await serve("P2"), await serve("R")
    await compute(first, PROMPT)
    await compute(second, PROMPT[:64])
    longer = [*PROMPT, *range(20, 40)]
    before = get_counts(second)
    params = await prefill(second, longer, point_to(first))
    after = get_counts(second)
    assert tuple(now - then for now, then in zip(after, before, strict=True)) == (28, 48, 64)
    assert await decode(first, longer, params) == await compute(reference, longer)


async def test_what_was_pulled_is_cached(serve) -> None:
    first, second = await serve("P1"), await serve("P2")
    tokens = await compute(first, PROMPT)
    await prefill(second, [*PROMPT, 7], point_to(first))
    assert await compute(second, PROMPT) == tokens
    assert get_counts(second)[2] == 112


async def test_nothing_is_requested_where_all_is_cached(serve) -> None:
    first, second = await serve("P1"), await serve("P2")
    await compute(second, PROMPT)
    await first.engine.stop()
    await prefill(second, PROMPT, point_to(first))
    assert second.engine.metrics.failed_transfers == 0


async def expect_computed(server, reference, source: dict) -> None:
    """A prompt that cannot be pulled is computed, and nothing is left of the attempt."""
    params = await prefill(server, PROMPT, source)
    assert get_counts(server) == (120, 0, 0)
    assert server.engine.metrics.failed_transfers == 1
    assert await decode(reference, PROMPT, params) == await compute(server, PROMPT)
    assert server.num_used_blocks == 0


async def test_a_source_that_is_lost_costs_only_time(serve) -> None:
    source, server, reference = await serve("S"), await serve("P"), await serve("R")
    await compute(source, PROMPT)
    place = point_to(source)
    await source.engine.stop()
    await expect_computed(server, reference, place)


async def test_a_source_that_dies_during_the_transfer_costs_only_time(serve) -> None:
    source, server = await serve("S"), await serve("P", latency_ms=500_000)
    reference = await serve("R")
    await compute(source, PROMPT)
    pulling = asyncio.create_task(expect_computed(server, reference, point_to(source)))
    await source.until(lambda: source.num_used_blocks > 0)
    await source.engine.stop()
    await pulling


async def test_another_boot_of_the_source_is_refused(serve) -> None:
    source, server, reference = await serve("S"), await serve("P"), await serve("R")
    await compute(source, PROMPT)
    await expect_computed(server, reference, point_to(source, engine_id="old"))


async def test_an_engine_is_no_source_of_its_own(serve) -> None:
    server, reference = await serve("P"), await serve("R")
    await expect_computed(server, reference, point_to(server))


async def test_what_the_source_has_evicted_is_computed(serve) -> None:
    source, server = await serve("S", num_blocks=12, max_model_len=180), await serve("P")
    reference = await serve("R")
    await compute(source, PROMPT)
    await compute(source, [3] * 120)
    params = await prefill(server, PROMPT, point_to(source))
    # The end of a prompt is evicted first: two of its seven full blocks are left.
    assert get_counts(server) == (88, 32, 0)
    assert await decode(reference, PROMPT, params) == await compute(server, PROMPT)


async def test_the_cache_of_another_tenant_is_not_found(serve) -> None:
    source, server = await serve("S"), await serve("P")
    body = {"prompt": PROMPT, **BODY, "cache_salt": "one"}
    await source.text(body)
    await prefill(server, PROMPT, point_to(source), cache_salt="other")
    assert get_counts(server) == (120, 0, 0)
    await prefill(server, PROMPT, point_to(source), cache_salt="one")
    assert get_counts(server) == (128, 112, 0)


@pytest.mark.parametrize("fault", ["corrupt_handoff", "short_handoff"])
async def test_damaged_blocks_are_not_used(serve, fault: str) -> None:
    source, server, reference = await serve("S"), await serve("P"), await serve("R")
    await compute(source, PROMPT)
    await source.post({fault: 1}, "/emulator/faults")
    await expect_computed(server, reference, point_to(source))


async def test_blocks_whose_lease_ended_while_they_were_read_are_not_used(serve) -> None:
    source, server = await serve("S", lease_s=0.05), await serve("P", latency_ms=20_000)
    reference = await serve("R")
    await compute(source, PROMPT)
    await expect_computed(server, reference, point_to(source))
    assert source.engine.metrics.kv_expired == 1


async def test_blocks_are_not_reused_while_they_are_read(serve) -> None:
    source = await serve("S", num_blocks=20, max_model_len=200)
    server, reference = await serve("P", latency_ms=20_000), await serve("R")
    await compute(source, PROMPT)
    pulling = asyncio.create_task(prefill(server, PROMPT, point_to(source)))
    await source.until(lambda: source.num_used_blocks > 0)
    assert source.num_used_blocks == 7
    await compute(source, [3] * 120)
    params = await pulling
    assert get_counts(server) == (8, 112, 0)
    assert await decode(reference, PROMPT, params) == await compute(source, PROMPT)


async def test_an_aborted_request_ends_the_lease(serve) -> None:
    source, server = await serve("S"), await serve("P", latency_ms=500_000)
    await compute(source, PROMPT)
    pulling = asyncio.create_task(prefill(server, PROMPT, point_to(source)))
    await source.until(lambda: source.num_used_blocks > 0)
    pulling.cancel()
    await source.until(lambda: source.num_used_blocks == 0)
    await server.until(lambda: server.num_used_blocks == 0)


async def test_a_name_of_a_lease_is_taken_once(serve) -> None:
    source, server = await serve("S"), await serve("P", latency_ms=500_000)
    await compute(source, PROMPT)
    pulling = asyncio.create_task(prefill(server, PROMPT, point_to(source)))
    await source.until(lambda: source.num_used_blocks > 0)
    channel, place = server.engine.side_channel, PrefixSource(**point_to(source))
    for _ in range(3):  # the end of a connection that was refused ends no lease of another one
        channel._num_prefix_pulls = 0
        with pytest.raises(KvTransferError, match="is taken"):
            await channel.pull_prefix(place, [b"key"], lambda _: 0.0)
    assert source.num_used_blocks > 0
    pulling.cancel()


@pytest.mark.parametrize(
    "source", [{}, {"engine_id": "A", "host": "h", "port": 0}, "elsewhere", {"port": "x"}]
)
async def test_a_source_that_is_none_is_a_bad_request(serve, source: object) -> None:
    server = await serve("P")
    params = {"do_remote_decode": True, "prefix_source": source}
    status, answer = await server.post({"prompt": PROMPT, "kv_transfer_params": params})
    assert (status, answer["error"]["param"]) == (400, "kv_transfer_params")


async def test_an_engine_without_connector_ignores_the_source(serve) -> None:
    server = await serve("P", kv_transfer=None)
    body = {"prompt": PROMPT, **BODY}
    params = {"prefix_source": {"engine_id": "S", "host": "127.0.0.1", "port": 9}}
    assert await server.text({**body, "kv_transfer_params": params}) == await server.text(body)
