"""vLLM on CPU whose decode engine takes KV over gloo while it is computed."""

import concurrent.futures
import json
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from cleave_worker.transfer.transport import Transport

from e2e.support import connection_log
from e2e.support.deployments import Deployment, deployed, start_fast, tiny_vllm, until
from e2e.support.engine_keys import headers_for
from e2e.support.handoffs import PREFILL_ORDER, decode, is_free, lost, post, prefill
from e2e.support.vllm_prompts import (
    TIMEOUT_S,
    Case,
    ask,
    engine_url,
    make_case,
    metric,
    must_have_moved_all,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
EXTRA = {"transports": [Transport.GLOO], "checksums": True, "kv_lease_duration": 20}
SETTINGS = {"kv_connector_extra_config": EXTRA}
ENGINE = start_fast(
    connector="Cleave",
    transfer="PerLayer",
    # Several chunks of a prompt, several layers of a chunk.
    args=[
        "--kv-transfer-config",
        json.dumps({"kv_connector_extra_config": EXTRA}),
        "--max-num-batched-tokens",
        "512",
    ],
)
CASES = [
    Case(40_000 + number, random.Random(number).randint(1, 2500), chat=False, stream=number % 2 > 0)
    for number in range(16)
]


@pytest.fixture(scope="module")
def vllm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("vllm")
    shutil.copyfile(connection_log.__file__, folder / "sitecustomize.py")
    watched = {"PYTHONPATH": str(folder), connection_log.FILE: str(folder / "connections")}
    env = [*ENGINE["env"], *({"name": name, "value": each} for name, each in watched.items())]
    manifest = tiny_vllm(tiny_model, engine={**ENGINE, "env": env})
    with deployed(manifest, folder, timeout_s=420) as deployment:
        yield deployment


def test_engines_connect_to_nothing_outside_this_machine(vllm: Deployment) -> None:
    """Without a switch vLLM sends usage statistics when it starts."""
    lines = {*(vllm.state_dir.parent / "connections").read_text().splitlines()}
    own = re.compile(r"socket\.\w+ ('(127\.[0-9.]+|localhost|::1|[^']*/[^']*)?'|b'.*'|None)")
    assert any("127." in line for line in lines)
    assert not [line for line in lines if not own.fullmatch(line)]


def test_the_kv_path_is_verified_by_the_bytes_of_a_long_prompt(vllm: Deployment) -> None:
    for instance in vllm.instances().values():
        assert instance.kv_path.verified
        must_have_moved_all(instance.kv_path.detail)


@pytest.mark.parametrize(
    "path", ["/v1/models", "/version", "/tokenize", "/pause", "/docs", "/ping"]
)
def test_an_engine_serves_nothing_but_probes_without_its_key(vllm: Deployment, path: str) -> None:
    url = engine_url(vllm, "prefill")
    wrong = dict.fromkeys(headers_for(url), "wrong")
    for method in ("GET", "POST", "OPTIONS"):
        for headers in ({}, wrong, {"Authorization": f"Bearer {headers_for(url)}"}):
            answer = httpx.request(method, url + path, headers=headers, timeout=TIMEOUT_S)
            assert answer.status_code == 401
    answer = httpx.get(f"{url}/v1/models", headers=headers_for(url), timeout=TIMEOUT_S)
    assert answer.status_code == 200
    for open_path in ("/health", "/metrics"):
        assert httpx.get(url + open_path, timeout=TIMEOUT_S).status_code == 200


def test_tokens_are_those_of_a_colocated_run_and_none_of_the_kv_is_lost(vllm: Deployment) -> None:
    before = lost(engine_url(vllm, "decode"))
    split = [ask(vllm.url, case) for case in CASES]
    assert lost(engine_url(vllm, "decode")) == before
    # Which of them depends on what the engines' last reports said.
    assert metric(vllm.url, 'cleave_gateway_handoffs_total{result="ahead"}')
    colocated = [ask(engine_url(vllm, "prefill"), case) for case in CASES]
    for case, answer, expected in zip(CASES, split, colocated, strict=True):
        assert answer.tokens == expected.tokens, case
    until(lambda: is_free(vllm), TIMEOUT_S, "all blocks are free")


def test_requests_side_by_side_keep_their_own_tokens(vllm: Deployment) -> None:
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda case: ask(vllm.url, case).tokens, CASES[:12]))
    assert together == [ask(engine_url(vllm, "prefill"), case).tokens for case in CASES[:12]]
    until(lambda: is_free(vllm), TIMEOUT_S, "all blocks are free")


def ahead_of(handed: dict[str, Any], name: str, **fields: object) -> dict[str, Any]:
    """A hand-off ahead of the prefill with this name, at the engine that another one is of."""
    unknown = {"request_id": name, "epoch": 0, "prompt_digest": "", "num_tokens": 0}
    own = {**handed["cleave"], **unknown, **fields}
    named = {"remote_engine_id": own["boot_id"], "remote_request_id": name}
    return {**handed, **named, "cleave": own}


FAULTS: dict[str, dict[str, object]] = {
    "prompt": {},
    "boot": {"boot_id": "before"},
    "peer_lost": {"addresses": [("127.0.0.1", 1)]},
    "layout": {"addresses": []},
}


def test_no_fault_gives_a_wrong_token_and_each_is_counted(vllm: Deployment) -> None:
    source, decoding = engine_url(vllm, "prefill"), engine_url(vllm, "decode")
    first = make_case(300)
    handed = prefill(source, first, "first")
    assert decode(decoding, first, handed, "first") == ask(source, first).tokens
    before = lost(decoding)
    for number, (reason, fields) in enumerate(FAULTS.items()):
        case, other = make_case(400), make_case(400)
        expected_tokens = [ask(source, each).tokens for each in (case, other)]
        order = {**PREFILL_ORDER, "cleave": {"name": f"name-{number}"}}
        post(source, other, f"name-{number}", max_tokens=1, kv_transfer_params=order)
        given = ahead_of(handed, f"name-{number}", **fields)
        assert decode(decoding, case, given, "faulty") == expected_tokens[0], reason
        given = ahead_of(handed, f"name-{number}")
        assert decode(decoding, other, given, "true") == expected_tokens[1]
        again = make_case(400)
        assert decode(decoding, again, given, "late") == ask(source, again).tokens
    expected = {**before, **{reason: before.get(reason, 0) + 1 for reason in FAULTS}}
    expected["not_held"] = before.get("not_held", 0) + len(FAULTS)
    assert lost(decoding) == expected
    until(lambda: is_free(vllm), TIMEOUT_S, "all blocks are free")


def test_a_client_that_leaves_while_its_kv_comes_frees_both_sides(vllm: Deployment) -> None:
    case = make_case(3_000, stream=True)
    for patience_s in (0.1, 0.2, 0.4):
        with (
            suppress(httpx.TimeoutException),
            httpx.stream(
                "POST", vllm.url + case.path, json=case.body, timeout=patience_s
            ) as response,
        ):
            response.read()
    until(lambda: is_free(vllm), TIMEOUT_S, "all blocks are free")
    assert ask(vllm.url, case).tokens == ask(engine_url(vllm, "prefill"), case).tokens
