"""Every name that vLLM reads has a rule, and what clients may not set is removed or refused."""

import importlib.util
import json
from pathlib import Path

import pytest

from cleave.gateway.app import routes
from cleave.gateway.http import engine_fields
from cleave.gateway.http.completion_request import (
    KV_PARAMS_KEY,
    RETURN_IDS_KEY,
    XARGS_KEY,
)
from cleave.gateway.http.engine_fields import (
    ARGUMENT_RULES,
    FIELD_RULES,
    HEADER_RULES,
    MEMBER_RULES,
    READ_BY_GATEWAY,
    RESERVED_ARGUMENTS,
    TABLES,
    VLLM_FIELDS,
    FieldRule,
    Treatment,
    list_names,
)
from cleave.gateway.http.errors import GatewayError
from cleave.gateway.http.large_json import MIN_BYTES
from cleave.gateway.http.stream_fields import INTERVAL_KEY, OPTIONS_KEY
from cleave.gateway.translation.request_fields import ENGINE_FIELDS
from cleave.policy.request_targets import TPOT_KEY, TTFT_KEY

from tests.support.completions import build_colocated_body, parse_engine_request

PATHS = sorted(TABLES)
READ = {
    "fields": (FIELD_RULES, {name for names in VLLM_FIELDS.paths.values() for name in names}),
    "members": (MEMBER_RULES, set(VLLM_FIELDS.members)),
    "arguments": (ARGUMENT_RULES, set(VLLM_FIELDS.extra_arguments)),
    "headers": (HEADER_RULES, set(VLLM_FIELDS.headers)),
}
OWN = {"service_tier", TPOT_KEY, TTFT_KEY}
"""What the gateway reads or sends, and vLLM does not know."""


@pytest.mark.parametrize("kind", READ)
def test_each_name_that_vllm_reads_has_one_rule(kind: str) -> None:
    rules, read = READ[kind]
    names = [name for rule in rules for name in rule.names]
    assert len(names) == len(set(names))
    assert set(names) - OWN == read


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_vllm_reads_what_the_generated_file_says() -> None:
    pytest.importorskip("vllm")
    spec = importlib.util.spec_from_file_location("vllm_fields", "scripts/vllm_fields.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    written = json.loads(Path(engine_fields.__file__).with_name("vllm_fields.json").read_text())
    assert generator.describe_requests() == written, f"run {spec.origin}, then read what is new"


def test_each_path_that_reaches_engines_has_a_table() -> None:
    passed_on = routes.COMPLETION_ROUTES + routes.OTHER_ROUTES
    assert {route.path for route in passed_on} == TABLES.keys()


def test_what_names_kv_is_set_by_the_gateway_only() -> None:
    removed = list_names(FIELD_RULES, Treatment.REMOVED)
    assert {KV_PARAMS_KEY, "ec_transfer_params", "request_id"} == removed
    for table in TABLES.values():
        assert removed.isdisjoint(table.plain | table.checked)
    assert {KV_PARAMS_KEY, "ec_transfer_params", TPOT_KEY, TTFT_KEY} <= RESERVED_ARGUMENTS


def test_translated_requests_copy_only_what_chats_may_have() -> None:
    chat = TABLES[routes.CHAT_PATH]
    assert chat.plain | chat.checked >= ENGINE_FIELDS
    assert {RETURN_IDS_KEY, "stream", "messages"} <= chat.plain
    assert {XARGS_KEY, "cache_salt", "n", INTERVAL_KEY, OPTIONS_KEY} == chat.checked


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [0, MIN_BYTES], ids=["small", "large"])
def test_a_path_passes_what_its_class_has_and_nothing_else(path: bytes, size: int) -> None:
    table = TABLES[path]
    every = list_names(FIELD_RULES) | {"store", "metadata", "logits_processors", "guided_json"}
    fields = {name: {"x": 1} for name in every} | {"model": "m", "stream": True}
    fields |= {"max_tokens": 1, "max_completion_tokens": 1, "user": "u" * size}
    body = json.dumps(fields).encode()
    sent = json.loads(build_colocated_body(parse_engine_request(path, body, "")))
    assert sent.keys() == (table.plain | table.checked) & fields.keys()
    assert sent.keys() <= {*VLLM_FIELDS.paths[path.decode()], *READ_BY_GATEWAY}


@pytest.mark.parametrize(
    "key", ['"uuid"', '"\\u0075uid"', '"u\\u0075\\u0069d" ', '"uuid"' + " " * 9_000]
)
@pytest.mark.parametrize("size", [0, MIN_BYTES], ids=["small", "large"])
def test_no_client_names_a_medium_in_the_caches_of_engines(key: str, size: int) -> None:
    for path in PATHS:
        for name in TABLES[path].prompts:
            part = f'{{"type":"image_url","image_url":{{"url":"data:"}},{key}:"logo"}}'
            text = f'{{"type":"text","text":"{"a" * size}"}}'
            body = f'{{"model":"m","{name}":[{{"content":[{text},{part}]}}]}}'.encode()
            with pytest.raises(GatewayError, match="names a medium by `uuid`") as refused:
                parse_engine_request(path, body, "")
            assert (refused.value.status, refused.value.param) == (400, name)


def test_what_only_mentions_it_is_read() -> None:
    said = ['say \\"uuid\\": 4', "uuid", 'uuid\\"', '\\\\"uuid'[:-5]]
    contents = [f'"{text}"' for text in said] + ['[{"type":"text","text":"uuid"}]']
    turns = ",".join(f'{{"role":"user","content":{each}}}' for each in contents)
    tools = '[{"type":"function","function":{"name":"f","parameters":{"uuid":{"type":"string"}}}}]'
    body = f'{{"model":"m","messages":[{turns}],"tools":{tools}}}'.encode()
    sent = json.loads(build_colocated_body(parse_engine_request(routes.CHAT_PATH, body, "")))
    assert sent == json.loads(body)


def test_rules_say_why() -> None:
    rules: tuple[FieldRule, ...] = FIELD_RULES + MEMBER_RULES + ARGUMENT_RULES + HEADER_RULES
    assert all(len(rule.reason) > 20 for rule in rules if rule.names != {"model"})
