"""Large answers: collected in pieces, searched as they arrive, changed without being copied."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.gateway.http.headers import CONTENT_TYPE, JSON_TYPE
from cleave.gateway.upstream.answers import read_usage
from cleave.gateway.upstream.collected_answer import (
    HANDOFF_KEY,
    MAX_DECODED_BYTES,
    MAX_HANDOFF_BYTES,
    PART_BYTES,
    USAGE_KEY,
    CollectedAnswer,
    join_handoff,
)
from cleave.gateway.upstream.engine_errors import cut_error, is_rejection
from cleave.gateway.upstream.kv_transfer_params import HandoffError, strip_answer, strip_handoff
from cleave.gateway.upstream.model_names import ModelNames

LONG = b"x" * MAX_DECODED_BYTES
USUAL = b'{"model":"e","choices":[{"text":"%b"}],"usage":{"prompt_tokens":7}%b}'
NULL = b',"kv_transfer_params":null'


def collect(body: bytes, size: int) -> CollectedAnswer:
    answer = CollectedAnswer(body[:size])
    for at in range(size, len(body), size):
        answer.add(body[at : at + size])
    return answer


def strip(body: bytes, size: int = 4_000) -> bytes:
    return b"".join(strip_answer(collect(body, size).take()))


words = st.lists(st.sampled_from([HANDOFF_KEY, USAGE_KEY, b'"', b"kv_", b"a" * 30]), max_size=12)


@given(words.map(b"".join), st.integers(1, 40))
def test_keys_are_found_wherever_pieces_end(body: bytes, size: int) -> None:
    answer = collect(body, size)
    assert answer.num_handoffs == body.count(HANDOFF_KEY)
    assert answer.handoff_at == body.rfind(HANDOFF_KEY)
    assert answer.usage_at == body.rfind(USAGE_KEY)
    assert answer.take() == body


@settings(max_examples=20)
@given(st.integers(0, 3 * PART_BYTES), st.integers(0, 3 * PART_BYTES), st.integers(1, 9))
def test_any_part_of_a_large_answer_can_be_read(begin: int, end: int, size: int) -> None:
    body = bytes(range(251)) * (2 * PART_BYTES // 251)
    answer = collect(body, size * 100_000)
    assert answer.take() is answer
    assert answer.read(begin, end) == body[begin:end]


@pytest.mark.parametrize("after", [b"", b',"prompt_logprobs":null'])
def test_an_empty_handoff_is_taken_out_of_a_large_answer(after: bytes) -> None:
    body = USUAL % (LONG, NULL + after)
    assert strip(body) == USUAL % (LONG, after) == strip_handoff(body)


@pytest.mark.parametrize(
    "end", [NULL + NULL, b',"kv_transfer_params":{"a":1}', b',"a":[{"kv_transfer_params":1}]',
            b', "kv_transfer_params" : null', b',"a":"kv_transfer_params"'],
)  # fmt: skip
def test_any_other_handoff_in_a_large_answer_is_refused(end: bytes) -> None:
    with pytest.raises(HandoffError):
        strip(USUAL % (LONG, end))


def test_a_large_answer_without_one_passes_as_it_is() -> None:
    body = USUAL % (LONG, b"")
    assert strip(body) == body


@pytest.mark.parametrize("text", [b"x", LONG])
def test_a_large_answer_names_the_model_that_the_client_sent(text: bytes) -> None:
    names, body = ModelNames("client", "e"), USUAL % (text, NULL)
    pieces = names.restore_first(strip_answer(collect(body, 4_000).take()))
    assert b"".join(pieces) == (USUAL % (text, b"")).replace(b'"e"', b'"client"')


def test_a_large_error_is_one_by_its_ends() -> None:
    for end, is_one in ((b"}", True), (b"]", False)):
        body = b'{"error":{"message":"%b"}' % LONG + end
        cut = cut_error(collect(body, 4_000).take())
        assert is_rejection(cut) is is_one
        assert len(cut) < len(body)
    assert cut_error(b"{}") == b"{}"


def test_an_answer_with_a_handoff_is_joined_unless_it_is_too_long() -> None:
    for size in (1, MAX_DECODED_BYTES, MAX_HANDOFF_BYTES):
        assert join_handoff(collect(b"a" * size, 4_000).take()) == b"a" * size
    assert join_handoff(collect(b"a" * (MAX_HANDOFF_BYTES + 1), 4_000).take()) is None


def test_no_step_of_a_large_answer_takes_long() -> None:
    piece = json.dumps(["kv_transfer_param", {"usage": {}}] * 100, separators=(",", ":")).encode()
    headers = {CONTENT_TYPE: JSON_TYPE}

    def measure() -> float:
        steps, began = [0.0], time.thread_time()

        def end_step() -> None:
            nonlocal began
            steps.append(time.thread_time() - began)
            began = time.thread_time()

        answer = CollectedAnswer(b'{"choices":[')
        for _ in range((32 << 20) // len(piece)):
            answer.add(piece)
            end_step()
        answer.add(b'],"usage":{}}')
        body = answer.take()
        read_usage(headers, body, is_completion=True)
        strip_answer(body)
        end_step()
        return max(steps)

    assert min(measure() for _ in range(3)) < 0.005


@pytest.mark.parametrize("size", [1, 7, 100, 4_096])
@pytest.mark.parametrize("filler", [0, 20_000, MAX_DECODED_BYTES])
def test_an_escaped_handoff_is_refused_wherever_pieces_end(size: int, filler: int) -> None:
    if filler > 20_000 > size * 1_000:
        size = 4_000
    key = b"".join(b"\\u%04x" % each for each in b"kv_transfer_params")
    body = b'{"choices":[],"x":"%b","%b":{"a":1},"usage":{}}' % (b"x" * filler, key)
    answer = collect(body, size).take()
    with pytest.raises(HandoffError):
        strip_answer(answer)
    plain = body.replace(key, b"\\u0061bc")
    assert b"".join(strip_answer(collect(plain, size).take())) == plain
