"""The KV self-test against engines whose answers are scripted."""

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from cleave.policy.kv_transfer_sample import TransferSample, make_random_prompt
from cleave_worker.agent import engine_api
from cleave_worker.agent.kv_self_test import (
    Endpoint,
    InconclusiveError,
    KvTestError,
    MissingCountersError,
    verify_transfer,
)

P = Endpoint("p", "http://p", "boot-p", 8192)
D = Endpoint("d", "http://d", "boot-d", 4096)
BLOCK, BYTES = 16, 1000
"""Tokens of a block of KV, bytes of a token; a token is two characters."""


class Engines:
    """Both engines: the continuation is a function of the prompt by default."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict, dict]] = []
        self.engine_id = "boot-p"
        self.hands_off = True
        self.decoded: Callable[[str], str] = lambda right: right
        self.status = 200
        self.prefill_ms = 1.0
        self.stream_end = "data: [DONE]\n\n"
        self.counts_bytes = True
        self.moved: Callable[[int], int] = lambda num_blocks: num_blocks
        """How many of a prompt's blocks are pulled."""
        self.others = iter(())
        """Tokens of others that are pulled beside each hand-off."""
        self.uncounted = iter(())
        """Tokens of others whose bytes come beside a hand-off, and which are counted later."""
        self.lost_meanwhile = iter(())
        """Hand-offs of others that are lost during each prefill."""
        self.waits = iter(())
        """How long the first prefills take, ms."""
        self.prefilled: list[int] = []
        self.pulled_bytes = self.pulled_tokens = self.lost = 0

    async def request(
        self, method, url, payload=None, *, seconds, headers=None
    ) -> engine_api.EngineResponse:
        if method == "GET":
            return engine_api.EngineResponse(200, self.metrics(), 1.0)
        self.requests.append((url, payload, headers or {}))
        right = payload["prompt"][:4]
        if url.startswith("http://d"):
            return self.decode(payload, right)
        content, prefill_ms = {"choices": [{"text": right}]}, self.prefill_ms
        if payload.get("kv_transfer_params"):
            tokens = len(payload["prompt"]) // 2
            blocks = [list(range(-(-tokens // BLOCK)))]
            content["usage"] = {"prompt_tokens": tokens}
            self.lost += next(self.lost_meanwhile, 0)
            prefill_ms = next(self.waits, self.prefill_ms)
            self.prefilled.append(tokens)
            if self.hands_off:
                params = {"remote_engine_id": self.engine_id, "remote_block_ids": blocks}
                content["kv_transfer_params"] = params
        return engine_api.EngineResponse(200, json.dumps(content).encode(), prefill_ms)

    def decode(self, payload: dict, right: str) -> engine_api.EngineResponse:
        if self.status != 200:
            return engine_api.EngineResponse(
                self.status, b'{"error": {"message": "no such KV"}}', 1.0
            )
        (blocks,) = payload["kv_transfer_params"]["remote_block_ids"]
        others = next(self.others, 0)
        self.pulled_bytes += self.moved(len(blocks)) * BLOCK * BYTES + others * BYTES
        self.pulled_bytes += next(self.uncounted, 0) * BYTES
        self.pulled_tokens += len(payload["prompt"]) // 2 + others
        pieces = [{"choices": [{"text": piece}]} for piece in self.decoded(right)]
        lines = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces)
        return engine_api.EngineResponse(200, (lines + self.stream_end).encode(), 12.5)

    def metrics(self) -> bytes:
        """Of a decode engine that pulls 2 MB/s, and has pulled before."""
        if not self.counts_bytes:
            return b"vllm:num_requests_running 0\n"
        pulled = 10**6 + self.pulled_bytes
        labels = 'engine="0",model_name="m m"'
        source = 'vllm:prompt_tokens_by_source_total{%s,source="%s"} %s\n'
        return (
            f"vllm:nixl_bytes_transferred_count{{{labels}}} 7\n"
            f"vllm:nixl_bytes_transferred_sum{{{labels}}} {pulled}\n"
            f"vllm:nixl_xfer_time_seconds_sum{{{labels}}} {pulled / 2e6}\n"
            + source % (labels, "local_compute", 5e6)
            + source % (labels, "external_kv_transfer", 2000 + self.pulled_tokens)
            + f"vllm:nixl_num_failed_transfers_total{{{labels}}} {3 + self.lost}\n"
        ).encode()

    def prompts(self) -> list[str]:
        """Of all hand-offs, in their order."""
        return [body["prompt"] for url, body, _ in self.requests if url.startswith("http://d")]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    both = Engines()
    monkeypatch.setattr(engine_api, "request", both.request)
    return both


async def run(decode: Endpoint = D) -> TransferSample:
    return await verify_transfer(P, decode, "m", seconds=1, random_words=random.Random(7))


async def test_equal_tokens_and_bytes_in_proportion_pass_and_are_measured(engines: Engines) -> None:
    passed = await run()
    assert (passed.num_tokens, passed.num_blocks) == (2560, 160)
    assert (passed.num_bytes, passed.first_token_ms) == (2560 * BYTES, 12.5)
    assert passed.bytes_per_s == pytest.approx(2e6)
    assert passed.describe() == "2.56 MB for 2,560 tokens in 1.28 s, 0.002 GB/s"
    prefill, decode, reference = engines.requests[-3:]
    assert reference[1]["prompt"] == prefill[1]["prompt"] == decode[1]["prompt"]
    assert prefill[1]["max_tokens"] == 1
    assert prefill[1]["kv_transfer_params"]["do_remote_decode"] is True
    assert decode[1]["kv_transfer_params"]["remote_engine_id"] == "boot-p"
    assert prefill[2]["X-Request-Id"] == decode[2]["X-Request-Id"]


async def test_wrong_tokens_every_time_fail(engines: Engines) -> None:
    engines.decoded = lambda right: right[::-1] + "x"
    with pytest.raises(KvTestError, match="other tokens, 3 times of 3"):
        await run()
    assert len(set(engines.prompts())) == 3


async def test_one_match_after_a_near_tie_passes(engines: Engines) -> None:
    answers = iter(["nope"])
    engines.decoded = lambda right: next(answers, right)
    assert (await run()).num_tokens >= 2560


async def test_right_tokens_without_a_byte_fail(engines: Engines) -> None:
    engines.moved = lambda _: 0
    with pytest.raises(KvTestError, match="d pulled no byte of the KV of 200 prompt tokens"):
        await run()


@pytest.mark.parametrize("most", [13, 128])
async def test_bytes_of_a_part_of_the_long_prompt_fail(engines: Engines, most: int) -> None:
    """Of its first block, or of the chunk that one step computes."""
    engines.moved = lambda num_blocks: min(num_blocks, most)
    with pytest.raises(KvTestError, match=r"KV of 2,560 prompt tokens, too few beside"):
        await run()


async def test_an_engine_that_counts_no_bytes_cannot_be_verified(engines: Engines) -> None:
    engines.counts_bytes = False
    with pytest.raises(
        MissingCountersError, match="d counts no bytes of KV: its /metrics has neither"
    ):
        await run()
    assert not engines.requests


async def test_others_handoffs_beside_the_test_fail_nothing(engines: Engines) -> None:
    engines.others = itertools.cycle([90_000, 0])
    passed = await run()
    assert len(engines.prompts()) == 6
    assert passed.num_bytes == 2560 * BYTES


async def test_kv_that_others_lose_during_the_prefill_is_not_of_the_test(engines: Engines) -> None:
    engines.lost_meanwhile = itertools.repeat(1)
    engines.others = itertools.cycle([90_000, 0])
    assert (await run()).num_bytes == 2560 * BYTES


@pytest.mark.parametrize("later", [[90_000], [90_000, 0, 70_000, 0, 80_000, 0]])
async def test_bytes_of_others_that_are_counted_later_show_nothing(
    engines: Engines, later: list[int]
) -> None:
    engines.uncounted = iter(later)
    if len(later) == 1:
        assert (await run()).num_bytes == 2560 * BYTES
    else:
        with pytest.raises(InconclusiveError, match="different number of bytes per block"):
            await run()


async def test_bytes_of_others_do_not_stand_for_kv_that_is_lost(engines: Engines) -> None:
    def lose(_: int) -> int:
        engines.lost += 1
        return 0

    engines.moved, engines.others = lose, itertools.repeat(90_000)
    with pytest.raises(InconclusiveError, match="d counted 2 failed transfers of several"):
        await run()


async def test_a_path_that_truncates_kv_fails_and_a_busy_engine_does_not(engines: Engines) -> None:
    engines.moved = lambda num_blocks: min(num_blocks, 100)
    engines.lost_meanwhile = itertools.repeat(1)
    with pytest.raises(KvTestError, match="too few beside") as caught:
        await run()
    assert not isinstance(caught.value, InconclusiveError)


async def test_a_slow_engine_gets_a_prompt_that_it_computes_in_time(engines: Engines) -> None:
    engines.prefill_ms = 100.0
    assert (await run()).num_tokens == 200 * 2


@pytest.mark.parametrize("waits", [[900.0], [100.0, 900.0]])
async def test_first_requests_that_wait_make_no_prompt_short(
    engines: Engines, waits: list[float]
) -> None:
    engines.waits = iter(waits)
    passed = await run()
    assert len(engines.prefilled) == len(waits) + 2
    assert passed.num_tokens >= 2560
    assert not passed.caveat


async def test_a_test_without_a_longer_prompt_says_so(engines: Engines) -> None:
    engines.prefill_ms = 900.0
    passed = await run()
    assert passed.num_tokens in {199, 200}
    assert passed.describe().endswith(", no longer prompt was tested")


async def test_a_handoff_of_an_earlier_boot_fails(engines: Engines) -> None:
    engines.engine_id = "boot-before"
    with pytest.raises(KvTestError, match="boot-before"):
        await run()


async def test_an_engine_without_kv_transfer_fails(engines: Engines) -> None:
    engines.hands_off = False
    with pytest.raises(KvTestError, match="no KV handoff"):
        await run()


async def test_an_error_of_the_decode_engine_is_reported(engines: Engines) -> None:
    engines.status = 500
    with pytest.raises(KvTestError, match="d answered 500: no such KV"):
        await run()


async def test_a_stream_that_breaks_off_fails(engines: Engines) -> None:
    engines.stream_end = ""
    with pytest.raises(KvTestError, match="broke off"):
        await run()


@pytest.mark.parametrize("length", [40, 512, 2048])
async def test_prompts_fit_the_smaller_engine(engines: Engines, length: int) -> None:
    passed = await run(replace(D, max_model_len=length))
    assert passed.num_tokens + 4 < length
    assert passed.num_tokens > 0.8 * (length - 16) or length == 40


def test_two_prompts_are_never_alike() -> None:
    words = random.Random(7)
    assert make_random_prompt(words, 300) != make_random_prompt(words, 300)
    assert 290 < len(make_random_prompt(words, 300)) <= 300
