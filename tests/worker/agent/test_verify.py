"""The KV self-test against engines whose answers are scripted."""

import json
import random
from collections.abc import Callable

import pytest

from cleave_worker.agent import http, verify
from cleave_worker.agent.verify import (
    Endpoint,
    Transfer,
    TransferError,
    random_prompt,
    verify_transfer,
)

P = Endpoint("p", "http://p", "boot-p", 2048)
D = Endpoint("d", "http://d", "boot-d", 512)


class Engines:
    """Both engines: the continuation is a function of the prompt unless told otherwise."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict, dict]] = []
        self.hand_off: dict | None = {"remote_engine_id": "boot-p", "remote_block_ids": [[1]]}
        self.decoded: Callable[[str], str] = lambda right: right
        self.status = 200
        self.stream_end = "data: [DONE]\n\n"
        self.tells = True
        self.pulled_bytes = iter([1e6, 5e6, 9e6, 13e6, 17e6, 21e6])

    async def request(self, method, url, payload=None, *, seconds, headers=None) -> http.Answer:
        if method == "GET":
            return http.Answer(200, self.metrics(), 1.0)
        self.asked.append((url, payload, headers or {}))
        right = payload["prompt"][:4]
        if url.startswith("http://d"):
            if self.status != 200:
                return http.Answer(self.status, b'{"error": {"message": "no such KV"}}', 1.0)
            pieces = [{"choices": [{"text": piece}]} for piece in self.decoded(right)]
            lines = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces)
            return http.Answer(200, (lines + self.stream_end).encode(), 12.5)
        content = {"choices": [{"text": right}], "kv_transfer_params": self.hand_off}
        return http.Answer(200, json.dumps(content).encode(), 1.0)

    def metrics(self) -> bytes:
        """Of a decode engine that pulls 2 MB/s."""
        if not self.tells:
            return b""
        pulled = next(self.pulled_bytes)
        labels = '{engine="0",model_name="m m"}'
        return (
            f"vllm:nixl_bytes_transferred_count{labels} 7\n"
            f"vllm:nixl_bytes_transferred_sum{labels} {pulled}\n"
            f"vllm:nixl_xfer_time_seconds_sum{labels} {pulled / 2e6}\n"
        ).encode()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    both = Engines()
    monkeypatch.setattr(verify.http, "request", both.request)
    return both


async def run() -> Transfer:
    return await verify_transfer(P, D, "m", seconds=1, random_words=random.Random(7))


async def test_equal_tokens_pass_and_the_hand_off_is_measured(engines: Engines) -> None:
    assert await run() == Transfer(12.5, 2e6)
    reference, prefill, decode = engines.asked
    assert reference[1]["prompt"] == prefill[1]["prompt"] == decode[1]["prompt"]
    assert prefill[1]["max_tokens"] == 1
    assert prefill[1]["kv_transfer_params"]["do_remote_decode"] is True
    assert decode[1]["kv_transfer_params"] == engines.hand_off
    assert prefill[2]["X-Request-Id"] == decode[2]["X-Request-Id"]


async def test_wrong_tokens_every_time_fail(engines: Engines) -> None:
    engines.decoded = lambda right: right[::-1] + "x"
    with pytest.raises(TransferError, match="other tokens, 3 times of 3"):
        await run()
    prompts = {body["prompt"] for _, body, _ in engines.asked}
    assert len(prompts) == 3


async def test_one_match_after_a_near_tie_passes(engines: Engines) -> None:
    answers = iter(["nope", None])
    engines.decoded = lambda right: next(answers) or right
    assert await run() == Transfer(12.5, 2e6)


async def test_an_engine_that_does_not_say_what_it_pulled_passes_without_a_rate(
    engines: Engines,
) -> None:
    engines.tells = False
    assert await run() == Transfer(12.5, 0.0)


async def test_a_hand_off_of_an_earlier_boot_fails(engines: Engines) -> None:
    engines.hand_off = {"remote_engine_id": "boot-before"}
    with pytest.raises(TransferError, match="boot-before"):
        await run()


async def test_an_engine_without_kv_transfer_fails(engines: Engines) -> None:
    engines.hand_off = None
    with pytest.raises(TransferError, match="no KV hand-off"):
        await run()


async def test_an_error_of_the_decode_engine_is_told(engines: Engines) -> None:
    engines.status = 500
    with pytest.raises(TransferError, match="d answered 500: no such KV"):
        await run()


async def test_a_stream_that_breaks_off_fails(engines: Engines) -> None:
    engines.stream_end = ""
    with pytest.raises(TransferError, match="broke off"):
        await run()


async def test_the_prompt_fits_the_smaller_engine(engines: Engines) -> None:
    await run()
    assert len(engines.asked[0][1]["prompt"]) < D.max_model_len


def test_two_prompts_are_never_alike() -> None:
    words = random.Random(7)
    assert random_prompt(words, 300) != random_prompt(words, 300)
    assert 290 < len(random_prompt(words, 300)) <= 300
