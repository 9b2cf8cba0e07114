"""Reading a request and writing it anew for engines."""

import json
import time
from codecs import BOM_UTF8

import msgspec
import pytest

from cleave.gateway.http import completion_request
from cleave.gateway.http.completion_request import (
    MAX_FIELDS,
    MAX_XARGS_BYTES,
    CompletionRequest,
    encode_fields,
    get_cache_salt,
    get_prompt_text,
    set_cache_salt,
    set_targets,
)
from cleave.gateway.http.errors import GatewayError
from cleave.gateway.http.large_json import MIN_BYTES, SLICE_BYTES
from cleave.gateway.http.prompt_tokens import MAX_PROMPTS
from cleave.policy.prefix_cache import hash_blocks, hash_first_block
from cleave.policy.request_targets import TPOT_KEY, TTFT_KEY
from cleave.time_slices import Steps

from tests.support.completions import (
    build_colocated_body,
    build_decode_body,
    build_prefill_body,
    parse_completion,
    parse_engine_request,
)

MAX_STEP_S = 0.005
"""What may block the event loop, in CPU time."""

CHAT, COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"


def get_path(body: bytes) -> bytes:
    return CHAT if b'"messages"' in body else COMPLETIONS


def parse(body: bytes):
    return parse_completion(get_path(body), body)


def chat(**fields: object):
    return parse(json.dumps({"model": "m", "messages": [], **fields}).encode())


def read(**fields: object):
    return parse(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


@pytest.mark.parametrize("size", [1, MIN_BYTES])
def test_a_byte_order_mark_is_skipped(size: int) -> None:
    body = json.dumps({"model": "m", "prompt": "h" * size}).encode()
    assert build_colocated_body(parse(BOM_UTF8 + body)) == build_colocated_body(parse(body))


@pytest.mark.parametrize("body", [BOM_UTF8 * 2 + b"{}", b" " + BOM_UTF8 + b"{}", BOM_UTF8[:2]])
def test_only_one_byte_order_mark_at_the_very_beginning_is_skipped(body: bytes) -> None:
    with pytest.raises(GatewayError, match="JSON object"):
        parse(body)


def test_values_reach_the_engine_byte_for_byte() -> None:
    body = b'{"model":"m", "prompt":"h\\u0069", "logit_bias":{"1" : 1.50, "2":1e3, "3":-0}}'
    whole = build_colocated_body(parse(body))
    assert b'"prompt":"h\\u0069"' in whole
    assert b'"logit_bias":{"1" : 1.50, "2":1e3, "3":-0}' in whole


def test_prefill_computes_one_token_and_keeps_its_kv() -> None:
    completion = read(
        stream=True, stream_options={"include_usage": True}, max_tokens=50, min_tokens=3, top_k=5
    )
    assert json.loads(build_prefill_body(completion)) == {
        "model": "m",
        "prompt": "hi",
        "top_k": 5,
        "stream": False,
        "max_tokens": 1,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


def test_prefill_overrides_the_newer_name_of_the_limit_too() -> None:
    prefill = json.loads(build_prefill_body(chat(max_completion_tokens=50)))
    assert (prefill["max_tokens"], prefill["max_completion_tokens"]) == (1, 1)


def test_decode_is_the_original_plus_exactly_the_hand_off() -> None:
    handoff = b'{"remote_block_ids": [[1, 2]],  "x":1.0}'
    completion = read(stream=True, max_tokens=50)
    decode = build_decode_body(completion, msgspec.Raw(handoff))
    assert handoff in decode
    body = json.loads(decode)
    del body["kv_transfer_params"]
    assert body == json.loads(build_colocated_body(completion))


@pytest.mark.parametrize(
    "smuggled",
    [
        b'"kv_transfer_params":{"remote_engine_id":"e"}',
        b'"kv_transfer_params":1,"kv_transfer_params":{"remote_engine_id":"e"}',
        b'"kv_transf\\u0065r_params":{"remote_engine_id":"e"}',
        b'"vllm_xargs":{"kv_transfer_params":"remote_engine_id"}',
        b'"vllm_xargs":{"kv_\\u0074ransfer_params":"remote_engine_id"}',
        b'"vllm_xargs":{"kv_transfer_params":1},"vllm_xargs":{"kv_transfer_params":"remote_engine_id"}',
    ],
)
def test_no_client_can_bring_a_hand_off(smuggled: bytes) -> None:
    completion = parse(b'{"model":"m","prompt":"hi",' + smuggled + b"}")
    whole = build_colocated_body(completion)
    assert b"remote_engine_id" not in whole
    assert b"params" not in whole
    decoded = json.loads(build_prefill_body(completion))
    assert decoded["kv_transfer_params"]["remote_engine_id"] is None


@pytest.mark.parametrize("size", [0, 1 << 20], ids=["small", "large"])
@pytest.mark.parametrize(
    "fault",
    [
        b'"vllm_xargs":{"x":NaN,"kv_transfer_params":0}',
        b'"vllm_xargs":{"x":-Infinity,"kv_transfer_params":0}',
        b'"vllm_xargs":{"x":"\\ud800","kv_transfer_params":0}',
        b'"vllm_xargs":{"x\xed\xa0\x80":1,"kv_transfer_params":0}',
        b'"vllm_xargs":{"x":1e999,"kv_transfer_params":0}',
        b'"vllm_xargs":{"x":{},"kv_transfer_params":0}',
        b'"vllm_xargs":{"x":null,"kv_transfer_params":0}',
        b'"vllm_xargs":{"x":1,"kv_transfer_params":{}}',
        b'"vllm_xargs":["kv_transfer_params"]',
        b'"temperature":NaN',
        b'"stop":["\\udc00"]',
        b'"stop":["\\ud83d","\\ude00"]',
        b'"stop":["\xed\xa0\x80"]',
        b'"stop":["\xff"]',
        b'"logit_bias":{"1":Infinity}',
        b'"stop":["a",NaN]',
        b'"future":NaN',
    ],
)
def test_what_only_the_parser_of_engines_takes_is_refused(fault: bytes, size: int) -> None:
    for after in (b"", b"\n"):
        body = b'{"model":"m",%b%b,"prompt":"%b"}' % (fault, after, b"p" * size)
        with pytest.raises(GatewayError) as refused:
            parse(body)
        assert refused.value.status == 400
        # As the prompt of a chat.
        with pytest.raises(GatewayError):
            parse(body.replace(b'"prompt":', b'"messages":'))


@pytest.mark.parametrize("name", ["ec_transfer_params", "kv_cache_report_mode", TPOT_KEY])
@pytest.mark.parametrize("size", [0, 1 << 20], ids=["small", "large"])
def test_no_client_sets_what_engines_do_with_kv(name: str, size: int) -> None:
    fields = {"model": "m", "prompt": "p" * size, name: 0, "vllm_xargs": {name: 0, "a": [1, "x"]}}
    body = json.dumps(fields).encode()
    sent = json.loads(build_colocated_body(parse(body)))
    assert sent == {"model": "m", "prompt": "p" * size, "vllm_xargs": {"a": [1, "x"]}}


def test_a_short_list_of_prompts_in_a_large_body_that_is_malformed_is_refused() -> None:
    body = b'{"model":"m","prompt":["a" 1],"user":"%b"}' % (b"u" * MIB)
    with pytest.raises(GatewayError, match="prompt: JSON is malformed"):
        parse(body)


def test_other_engine_arguments_pass() -> None:
    completion = read(vllm_xargs={"session_id": "s", "kv_transfer_params": "x"})
    assert json.loads(build_colocated_body(completion))["vllm_xargs"] == {"session_id": "s"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"vllm_xargs": None}, {}),
        ({"vllm_xargs": {}}, {}),
        ({"vllm_xargs": {"session_id": "s"}}, {"session_id": "s"}),
        ({"vllm_xargs": {TTFT_KEY: 9e9, TPOT_KEY: 1, "a": 1}}, {"a": 1}),
    ],
    ids=str,
)
def test_engines_get_the_gateways_targets_beside_the_clients_arguments(given, expected) -> None:
    completion = set_targets(read(**given), -1234.6, 0.5)
    found = json.loads(build_decode_body(completion, msgspec.Raw(b"{}")))["vllm_xargs"]
    assert found == expected | {TTFT_KEY: -1234.6, TPOT_KEY: 0.5}
    rest = json.loads(build_colocated_body(set_targets(read(**given), None, 0.5)))["vllm_xargs"]
    assert rest == expected | {TPOT_KEY: 0.5}


def test_no_client_sets_its_own_targets() -> None:
    completion = read(vllm_xargs={TTFT_KEY: 9e9, TPOT_KEY: 1})
    assert json.loads(build_colocated_body(completion))["vllm_xargs"] == {}


@pytest.mark.parametrize("given", [7, "text", [1], {"a": None}, {"a": {}}, {"a": [[]]}], ids=str)
def test_arguments_that_no_engine_takes_are_refused(given) -> None:
    with pytest.raises(
        GatewayError, match="vllm_xargs must be an object whose values are"
    ) as refused:
        read(vllm_xargs=given)
    assert (refused.value.status, refused.value.param) == (400, "vllm_xargs")


def test_of_equal_keys_the_last_one_counts_and_is_the_only_one_sent() -> None:
    completion = parse(b'{"model":"a","model":"m","prompt":"hi"}')
    assert completion.model == "m"
    assert build_colocated_body(completion).count(b'"model"') == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"echo": True, "logprobs": 1},
        {"prompt_logprobs": 0},
        {"use_beam_search": True},
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        # Invalid ones: an engine shall say so itself, before another has worked for nothing.
        {"max_tokens": -1},
        {"max_tokens": 0},
        {"max_tokens": "5"},
        {"max_tokens": True},
        {"min_tokens": 9, "max_tokens": 3},
        {"stream_options": {"include_usage": True}},
    ],
    ids=str,
)
def test_what_cannot_be_split_is_recognised(fields: dict) -> None:
    assert not read(**fields).can_disaggregate


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=str
)
def test_a_forced_call_of_a_tool_cannot_be_split(choice: object) -> None:
    assert not chat(tool_choice=choice).can_disaggregate


def test_an_echoed_chat_cannot_be_split_as_its_prompt_has_log_probabilities() -> None:
    assert not chat(echo=True).can_disaggregate
    assert chat(echo=False).can_disaggregate


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 1},
        {"n": None},
        {"echo": True},
        {"logprobs": 3},
        {"prompt_logprobs": None},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"prompt": ["a"]},
        {"prompt": [1, 2, 3]},
        {"prompt": [[1, 2, 3]]},
        {"min_tokens": 2, "max_tokens": 3},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"max_tokens": None},
    ],
    ids=str,
)
def test_what_can_be_split_is(fields: dict) -> None:
    assert read(**fields).can_disaggregate


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("x" * 400, 100),
        ([5] * 100, 100),
        ([[5] * 100], 100),
        (["x" * 400], 100),
        (["x" * 200, "y" * 200], 100),
    ],
    ids=["text", "token ids", "list of token ids", "list of one text", "two texts"],
)
def test_prompt_tokens_are_estimated(prompt: object, tokens: int) -> None:
    assert read(prompt=prompt).prompt_tokens == pytest.approx(tokens, abs=3)


def test_prompt_tokens_of_a_chat_are_estimated_from_its_messages() -> None:
    messages = [{"role": "user", "content": "x" * 4_000}]
    completion = parse(json.dumps({"model": "m", "messages": messages}).encode())
    assert completion.prompt_tokens == pytest.approx(1_000, abs=20)


def test_the_limit_is_read_from_either_name() -> None:
    assert read(max_tokens=5).output_tokens == 5
    assert chat(max_completion_tokens=6).output_tokens == 6
    assert read().output_tokens == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[1]", None),
        (b'"text"', None),
        (b'{"model":"m"} trailing', None),
        (b'{"model":"m","prompt":}', None),
        (b"\xff\xfe", None),
        (b'{"\xff":1}', None),
        (b"[" * 100_000, None),
        (b'{"model":"m","a":' + b"[" * 100_000, None),
        (b'{"prompt":"hi"}', "model"),
        (b'{"model":7}', "model"),
        (b'{"model":null}', "model"),
        (b'{"model":"m","stream":"yes"}', "stream"),
        (b'{"model":"m","stream":1}', "stream"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_no_request_is_refused_with_the_field_at_fault(body: bytes, param) -> None:
    with pytest.raises(GatewayError) as refused:
        parse(body)
    assert refused.value.status == 400
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"prompt_embeds": ["AAAA"] * 50}, 50),
        ({"prompt": None, "prompt_embeds": ["AAAA"] * 50}, 50),
        ({"prompt": "a", "prompt_embeds": ["AAAA"] * 50}, 51),
        ({"prompt": ["a", "b"], "prompt_embeds": "AAAA"}, 3),
        ({"prompt_embeds": ["AAAA"]}, 1),
        ({"prompt_embeds": ["A" * 100_000] * 3}, 3),
    ],
    ids=str,
)
def test_each_embedded_prompt_of_a_list_counts(fields: dict[str, object], count: int) -> None:
    body = {"model": "m", "stream": True, "temperature": 0, "max_tokens": 5, **fields}
    completion = parse(json.dumps(body).encode())
    assert completion.report is not None
    assert (completion.report.num_prompts, completion.report.num_choices) == (count, count)
    assert (completion.can_disaggregate, completion.can_continue) == (False, False)


def test_a_single_embedded_prompt_is_one_and_lists_are_bounded() -> None:
    body = {"model": "m", "prompt_embeds": "AAAA", "max_tokens": 5}
    completion = parse(json.dumps(body).encode())
    assert completion.report is not None
    assert (completion.report.num_prompts, completion.can_disaggregate) == (1, True)
    with pytest.raises(GatewayError, match="prompt_embeds is a list of more than 1024 prompts"):
        parse(json.dumps(body | {"prompt_embeds": ["A"] * 1_025}).encode())


MIB = 1 << 20


def fill(before: bytes, unit: bytes, after: bytes, size: int = 4 * MIB) -> bytes:
    """A body of `size` bytes, or nearly."""
    return before + unit * ((size - len(before) - len(after)) // len(unit)) + after


HOSTILE = {
    "text": fill(b'{"model":"m","prompt":"', b"a 1 ", b'"}'),
    "escapes": fill(b'{"model":"m","prompt":"', b"\\\\", b'"}'),
    "token ids": fill(b'{"model":"m","prompt":[', b"1,", b"1]}"),
    "prompts": fill(b'{"model":"m","prompt":[', b'"",', b'""]}'),
    "prompts of token ids": fill(b'{"model":"m","prompt":[', b"[1],", b"[1]]}"),
    "equal fields": fill(b'{"model":"m","prompt":"a",', b'"k":1,', b'"k":1}'),
    "fields": b'{"model":"m","prompt":"a",%b}' % b",".join(b'"k%d":1' % n for n in range(300_000)),
    "messages": fill(b'{"model":"m","messages":[', b"{},", b"{}]}"),
    "parts": fill(b'{"model":"m","messages":[{"content":[', b'{"type":"text"},', b"{}]}]}"),
    "nesting": fill(b'{"model":"m","messages":[', b"[" * 900 + b"]" * 900 + b",", b"1]}"),
    "stop": fill(b'{"model":"m","prompt":"a","stream":true,"stop":[', b'"",', b'""]}'),
    "tools": fill(b'{"model":"m","prompt":"a","stream":true,"tools":[', b'{"a":{}},', b"{}]}"),
    "n": fill(b'{"model":"m","prompt":"a","n":[', b"{},", b"{}]}"),
    "max_tokens": fill(b'{"model":"m","prompt":"a","max_tokens":[', b"[],", b"1]}"),
    "stream_options": fill(b'{"model":"m","prompt":"a","stream_options":[', b"[],", b"1]}"),
    "logit_bias": b'{"model":"m","prompt":"a","logit_bias":{%b}}'
    % b",".join(b'"%d":1' % n for n in range(300_000)),
    "vllm_xargs": b'{"model":"m","prompt":"a","vllm_xargs":{%b}}'
    % b",".join(b'"%d":1' % n for n in range(300_000)),
    "equal vllm_xargs": fill(b'{"model":"m","prompt":"a","vllm_xargs":{', b'"k":1,', b'"k":1}}'),
    "model": fill(b'{"prompt":"a","model":"', b"\\u00e9", b'"}'),
    "seed": fill(b'{"model":"m","prompt":"a","stream":true,"seed":', b"9", b"}"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_step_of_reading_a_body_takes_long(name: str) -> None:
    body = HOSTILE[name]
    for read_it in (
        lambda: completion_request.parse_completion(get_path(body), body),
        lambda: completion_request.parse_engine_request(b"/tokenize", body, str),
    ):
        # The least of three times, as the machine may interrupt any.
        longest = [measure_longest_step(read_it()) for _ in range(3)]
        assert min(longest) < MAX_STEP_S


def measure_longest_step(steps: Steps[CompletionRequest]) -> float:
    longest_s = 0.0
    while True:
        began = time.thread_time()
        try:
            next(steps)
        except (StopIteration, GatewayError):
            return max(longest_s, time.thread_time() - began)
        longest_s = max(longest_s, time.thread_time() - began)


@pytest.mark.parametrize("size", [0, MIB])
@pytest.mark.parametrize("count", [MAX_FIELDS, MAX_FIELDS + 1])
def test_a_request_has_a_bounded_number_of_fields(count: int, size: int) -> None:
    request = {"model": "m", "prompt": "a" * size}
    body = json.dumps({f"k{number}": 1 for number in range(count - 2)} | request).encode()
    if count == MAX_FIELDS:
        assert json.loads(build_colocated_body(parse(body))) == request
        return
    with pytest.raises(GatewayError, match="the body has more than 1024 fields"):
        parse(body)


def test_arguments_of_the_engine_have_a_bounded_length() -> None:
    assert read(vllm_xargs={"k": "a" * (MAX_XARGS_BYTES - 100)})
    with pytest.raises(GatewayError, match="vllm_xargs is longer than 16384 bytes"):
        read(vllm_xargs={"k": "a" * MAX_XARGS_BYTES})


FACTS = (
    "can_disaggregate",
    "can_continue",
    "model",
    "output_tokens",
    "prompt_tokens",
    "stream",
)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a, b " * 300_000},
        {"prompt": ["a, b", "c" * 1_200_000], "stream": True},
        {"prompt": [[1, 2, 3], list(range(200_000))], "min_tokens": 2},
        {"prompt": list(range(200_000)), "max_tokens": 7},
        {"messages": [{"role": "user", "content": "\\\u00e9" * 200_000}], "stream": True},
        {"prompt": "a", "tools": [{}] * 400_000, "stream": True, "kv_transfer_params": {"a": 1}},
        {"prompt": "a" * 1_100_000, "vllm_xargs": {"kv_transfer_params": 1, "k": 2}},
    ],
)
@pytest.mark.interpreted
def test_a_large_body_is_read_alike_in_slices_and_at_once(
    fields: dict[str, object], monkeypatch
) -> None:
    body = json.dumps({"model": "m", **fields}).encode()
    steps = sum(1 for _ in completion_request.parse_completion(get_path(body), body))
    assert steps >= len(body) // SLICE_BYTES
    in_slices, other = parse(body), parse_engine_request(b"/tokenize", body, "m")
    monkeypatch.setattr(completion_request, "MIN_BYTES", len(body))
    at_once = parse(body)
    assert build_colocated_body(in_slices) == build_colocated_body(at_once)
    for name in FACTS:
        assert getattr(in_slices, name) == getattr(at_once, name), name
    assert build_colocated_body(other) == build_colocated_body(
        parse_engine_request(b"/tokenize", body, "m")
    )


@pytest.mark.interpreted
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_refused_alike_in_slices_and_at_once(name: str, monkeypatch) -> None:
    body = HOSTILE[name]

    def read_outcome() -> tuple[int, str | None] | None:
        try:
            parse(body)
        except GatewayError as error:
            return error.status, error.param
        return None

    in_slices = read_outcome()
    monkeypatch.setattr(completion_request, "MIN_BYTES", len(body))
    assert read_outcome() == in_slices


@pytest.mark.parametrize("size", [10, 20_000])
def test_large_values_reach_engines_from_where_they_lie(size: int) -> None:
    fields = {"model": "m", "prompt": "a" * size, "suffix": "b" * size, "n": 1}
    completion = parse(json.dumps(fields).encode())
    pieces = encode_fields(completion.fields)
    assert json.loads(b"".join(pieces)) == fields
    assert sum(isinstance(each, memoryview) for each in pieces) == (2 if size > 10 else 0)
    only = {"prompt": completion.fields["prompt"]}
    assert json.loads(b"".join(encode_fields(only))) == {"prompt": "a" * size}


@pytest.mark.parametrize("prompt", ["a, b", [1, 2, 3]])
def test_a_completion_has_a_bounded_number_of_prompts(prompt: object) -> None:
    completion = read(prompt=[prompt] * MAX_PROMPTS)
    assert json.loads(build_colocated_body(completion))["prompt"] == [prompt] * MAX_PROMPTS
    assert completion.prompt_tokens > MAX_PROMPTS
    with pytest.raises(GatewayError, match="prompt is a list of more than 1024 prompts") as refused:
        read(prompt=[prompt] * (MAX_PROMPTS + 1))
    assert (refused.value.status, refused.value.param) == (400, "prompt")


def test_a_prompt_that_is_nested_too_deeply_is_refused() -> None:
    said = set()
    # At some depth the body is still read and its prompt no more: the stack of the test decides at
    # which, and there is none where functions are compiled.
    for depth in range(700, 1_001):
        try:
            parse(b'{"model":"m","prompt":[%b%b]}' % (b"[" * depth, b"]" * depth))
        except GatewayError as error:
            said.add((error.status, error.param))
    assert (400, None) in said
    assert said <= {(400, None), (400, "prompt")}


@pytest.mark.parametrize("first", [b"1", b"-1"])
def test_token_ids_are_one_prompt_however_they_are_written(first: bytes) -> None:
    body = b'{"model":"m","prompt":[' + b" " * 100 + first + b", 1" * 4_999 + b"]}"
    assert parse(body).prompt_tokens == 5_000
    assert parse(body).can_disaggregate


def test_long_values_tie_a_request_to_its_engine_and_pass_as_they_are() -> None:
    tools = [{"type": "function", "function": {"name": "f" * 2_000}}]
    completion = chat(stream=True, tools=tools)
    assert (completion.can_continue, completion.can_disaggregate) == (False, True)
    assert json.loads(build_colocated_body(completion))["tools"] == tools


def test_a_name_of_a_model_has_a_bounded_length() -> None:
    with pytest.raises(GatewayError, match="model is longer than 4096 bytes"):
        read(model="m" * 5_000)


@pytest.mark.parametrize("own", [{}, {"cache_salt": None}, {"cache_salt": "x"}])
def test_a_client_cannot_choose_another_tenants_salt(own: dict) -> None:
    salts = []
    for tenant in ("one", "two"):
        completion = read(**own)
        set_cache_salt(completion, tenant)
        for body in (build_prefill_body(completion), build_colocated_body(completion)):
            salts.append(json.loads(body)["cache_salt"])
    assert salts[0] == salts[1] != salts[2] == salts[3]
    assert ("one" in salts) is (not own.get("cache_salt"))
    forged = read(cache_salt="one")
    set_cache_salt(forged, "two")
    assert json.loads(build_colocated_body(forged))["cache_salt"] != "one"


def test_prompts_share_cached_kv_only_with_an_equal_salt() -> None:
    salts = [get_cache_salt(read(**fields)) for fields in ({}, {"cache_salt": "a"}, {"tools": []})]
    assert salts == [b"", b'"a"', b""]


def test_prompts_with_the_same_tools_and_system_prompt_begin_alike() -> None:
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}] * 50
    system = {"role": "system", "content": "You are " + 400 * "very " + "helpful."}
    users = [{"role": "user", "content": each} for each in ("What is new?", "And here?")]
    texts = [bytes(get_prompt_text(read(tools=tools, messages=[system, each]))) for each in users]
    first, second = (hash_blocks(text, 0) for text in texts)
    assert first[:5] == second[:5], "tools and system prompt"
    assert len(first) >= 5
    other = bytes(get_prompt_text(read(tools=tools[:1], messages=[system])))
    assert hash_first_block(other, 0) != first[0]
    plain = read(messages=[system])
    assert get_prompt_text(plain) == bytes(plain.fields["messages"])


@pytest.mark.parametrize("size", [0, 1_000, 1_023, 16 << 20])
def test_long_cache_salts_are_refused(size: int) -> None:
    if size + 2 <= 1_024:
        assert read(cache_salt="x" * size)
        return
    with pytest.raises(GatewayError) as caught:
        read(cache_salt="x" * size)
    assert caught.value.status == 400
    assert "cache_salt is longer than 1024 bytes" in caught.value.message
    assert caught.value.param == "cache_salt"
