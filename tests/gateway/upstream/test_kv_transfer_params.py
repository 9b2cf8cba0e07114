"""Hand-offs are read from the right boot only and never reach a client."""

import json
import time

import pytest

from cleave.gateway.http.completion_request import KV_REQUEST_PARAMS
from cleave.gateway.upstream.kv_transfer_params import (
    HandoffError,
    build_prefix_source_params,
    contains_handoff,
    contains_origin,
    count_blocks,
    read_handoff,
    strip_handoff,
)
from cleave.router.instance import Target

REQUEST = b"5e1f-1"
HANDOFF = (
    b'{"remote_engine_id":"boot-1", "remote_request_id":"chatcmpl-5e1f-1-82a6113c",'
    b' "remote_block_ids":[[2, 3]], "later": 1.50}'
)
SECRET = b'data: {"text":"a","kv_transfer_params": {"remote_engine_id":"e"}}\n\n'


def answer(handoff: bytes) -> bytes:
    return b'{"usage":{"prompt_tokens":7},"kv_transfer_params":%b}' % handoff


def test_the_hand_off_is_passed_on_byte_for_byte() -> None:
    handoff, tokens = read_handoff(answer(HANDOFF), "boot-1", REQUEST)
    assert (bytes(handoff), tokens) == (HANDOFF, 7)


@pytest.mark.parametrize("boot_id", ["boot-2", ""])
def test_a_hand_off_of_another_boot_is_refused(boot_id: str) -> None:
    with pytest.raises(HandoffError, match="boot-1"):
        read_handoff(answer(HANDOFF), boot_id, REQUEST)


@pytest.mark.parametrize("name", ["chatcmpl-5e1f-1", "cmpl-5e1f-1-0", "cmpl-5e1f-1-0-82a6113c"])
def test_a_hand_off_names_the_request_in_the_engines_own_ways(name: str) -> None:
    handoff = HANDOFF.replace(b"chatcmpl-5e1f-1-82a6113c", name.encode())
    assert read_handoff(answer(handoff), "boot-1", REQUEST)[0] is not None


@pytest.mark.parametrize("name", ["cmpl-5e1f-12-0", "cmpl-95e1f-1-0", "cmpl-5e1f-2-0", ""])
def test_a_hand_off_of_another_request_is_refused(name: str) -> None:
    handoff = HANDOFF.replace(b"chatcmpl-5e1f-1-82a6113c", name.encode())
    with pytest.raises(HandoffError, match="another request"):
        read_handoff(answer(handoff), "boot-1", REQUEST)


@pytest.mark.parametrize("handoff", [b"{}", b"1", b'"x"', b"[]", b'{"remote_engine_id":3}'])
def test_a_hand_off_that_names_no_engine_is_refused(handoff: bytes) -> None:
    with pytest.raises(HandoffError):
        read_handoff(answer(handoff), "boot-1", REQUEST)


def test_a_source_of_the_prefix_is_added_to_the_usual_request_for_kv() -> None:
    source = Target("d1", "10.0.0.7", 80, "", "boot-d1", 0, prefix_port=5_600)
    params = json.loads(bytes(build_prefix_source_params(source)))
    place = params.pop("prefix_source")
    assert place == {"engine_id": "boot-d1", "host": "10.0.0.7", "port": 5_600}
    assert params == json.loads(bytes(KV_REQUEST_PARAMS))
    with_key = Target("d1", "10.0.0.7", 80, "", "boot-d1", 0, prefix_port=5_600, kv_key="secret")
    params = json.loads(bytes(build_prefix_source_params(with_key)))
    assert params["prefix_source"] == {**place, "key": "secret"}


def test_no_handoff_differs_from_a_wrong_one() -> None:
    assert read_handoff(answer(b"null"), "boot-1", REQUEST) == (None, 7)
    assert read_handoff(b"{}", "boot-1", REQUEST) == (None, 0)


def test_an_answer_that_is_not_json_is_refused() -> None:
    with pytest.raises(HandoffError):
        read_handoff(b"<html>", "boot-1", REQUEST)


@pytest.mark.parametrize(
    ("ids", "count"),
    [("null", 0), ("[]", 0), ("[[]]", 0), ("[[7]]", 1), ("[[1, 2],[3]]", 3), ("[[1,2,3],[ ]]", 3)],
)
def test_blocks_of_all_groups_are_counted(ids: str, count: int) -> None:
    body = b'{"kv_transfer_params":{"remote_block_ids":%b}}' % ids.encode()
    assert count_blocks(body) == count


def test_stripping_keeps_everything_else_byte_for_byte() -> None:
    body = b'{"id":"a","choices":[{"text":"\\u00e9 1.0 "}],"kv_transfer_params":null,"x":1.50}'
    assert strip_handoff(body) == b'{"id":"a","choices":[{"text":"\\u00e9 1.0 "}],"x":1.50}'


def test_stripping_removes_equal_keys_all_of_them() -> None:
    body = b'{"kv_transfer_params":{"a":1},"id":1,"kv_transfer_params":{"a":2}}'
    assert strip_handoff(body) == b'{"id":1}'


def test_an_answer_without_one_is_not_touched() -> None:
    body = b'{ "id" : 1 }'
    assert strip_handoff(body) is body


def test_one_that_lies_deeper_is_refused() -> None:
    with pytest.raises(HandoffError):
        strip_handoff(b'{"choices":[{"kv_transfer_params": {"a":1}}]}')


def test_an_answer_that_only_speaks_of_it_passes() -> None:
    body = json.dumps({"text": '{"kv_transfer_params": 1}', "kv_transfer_params": None}).encode()
    assert json.loads(strip_handoff(body)) == {"text": '{"kv_transfer_params": 1}'}


def test_an_event_with_a_handoff_differs_from_text_that_mentions_one() -> None:
    assert contains_handoff(SECRET)
    for text in ('"kv_transfer_params":', "kv_transfer_params", 'x "kv_transfer_params": {}'):
        event = b"data: " + json.dumps({"text": text}).encode() + b"\n\n"
        assert not contains_handoff(event), text


@pytest.mark.parametrize("key", ["kv_transf\\u0065r_params", "\\u006Bv\\u005ftransfer_params"])
def test_a_handoff_is_taken_out_or_refused_however_its_key_is_spelled(key: str) -> None:
    outside = b'{"choices":[],"%b":{"remote_host":"h"},"usage":{}}' % key.encode()
    assert json.loads(strip_handoff(outside)) == {"choices": [], "usage": {}}
    with pytest.raises(HandoffError):
        strip_handoff(b'{"choices":[{"%b" :{"remote_host":"h"}}]}' % key.encode())


def test_an_answer_of_very_many_members_is_refused_quickly() -> None:
    members = b",".join(b'"%x":0' % each for each in range(48_000))
    body, costs = b'{"kv_transfer_params":{"a":1},%b}' % members, []
    for _ in range(3):
        begun = time.thread_time()
        with pytest.raises(HandoffError):
            strip_handoff(body)
        costs.append(time.thread_time() - begun)
    assert min(costs) < 0.005


def test_an_error_that_quotes_a_handoff_is_one_however_it_is_spelled() -> None:
    assert contains_origin(b'{"message":"remote_engine_id"}')
    assert contains_origin(b'{"message":"r\\u0065mote_engine_id"}')
    assert contains_origin(b'{"message":"\\u0061' + b"x" * (1 << 15) + b'"}')
    assert not contains_origin(b'{"message":"\\u0000 remote"}')
