"""vLLM on CPU with Cleave's own KV connector, behind the gateway: tokens, faults, freed memory."""

import concurrent.futures
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness import Deployment, deployed, idle, until
from vllm_cases import CASES, OUTPUT_TOKENS, TIMEOUT_S, Case, ask, engine_url, metric

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
RAN = "vllm:iteration_tokens_total_sum"
LEASE_S = 6
PREFILL_ORDER = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module", params=["shared memory", "gloo"])
def vllm(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Deployment]:
    settings = {
        "kv_connector": "CleaveConnector",
        "kv_connector_module_path": "cleave_worker.vllm.kv.connector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "ways": [request.param],
            "checksums": True,
            "kv_lease_duration": LEASE_S,
        },
    }
    manifest = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {
                "source": str(tiny_model),
                "servedName": "tiny",
                "dtype": "float32",
                "maxModelLen": 4096,
            },
            "engine": {"args": ["--kv-transfer-config", json.dumps(settings)]},
            "slo": {"ttftMs": 1000, "tpotMs": 200},
        },
    }
    with deployed(manifest, tmp_path_factory.mktemp("vllm"), timeout_s=420) as deployment:
        yield deployment


def lost(url: str) -> dict[str, float]:
    """Hand-offs that came to nothing, by reason, those that are zero left out."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text.splitlines():
        if line.startswith("cleave_kv_lost_total{") and not line.endswith(" 0.0"):
            reason = line.split('reason="')[1].split('"')[0]
            found[reason] = found.get(reason, 0) + float(line.split()[-1])
    return found


def prefill(url: str, case: Case, request_id: str) -> dict[str, Any]:
    """The hand-off of a prompt."""
    body = {**case.body, "stream": False, "max_tokens": 1, "kv_transfer_params": PREFILL_ORDER}
    body.pop("stream_options", None)
    response = httpx.post(
        url + case.path, json=body, timeout=TIMEOUT_S, headers={"X-Request-Id": request_id}
    )
    assert response.status_code == 200, response.text
    handed: dict[str, Any] = response.json()["kv_transfer_params"]
    return handed


def decode(url: str, case: Case, handed: dict[str, Any] | None, request_id: str) -> list[int]:
    """Tokens that a decode engine gives with a hand-off."""
    body = {**case.body, "stream": False, "kv_transfer_params": handed}
    body.pop("stream_options", None)
    response = httpx.post(
        url + case.path, json=body, timeout=TIMEOUT_S, headers={"X-Request-Id": request_id}
    )
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


def test_tokens_are_those_of_a_colocated_run_and_nothing_is_recomputed(vllm: Deployment) -> None:
    decoding = engine_url(vllm, "decode")
    ran = metric(decoding, RAN)
    cases = CASES + MORE
    split = [ask(vllm.url, case) for case in cases]
    # A token of output is a token run: the last prompt token runs to make the first.
    assert metric(decoding, RAN) - ran == sum(len(answer.tokens) for answer in split)
    colocated = [ask(engine_url(vllm, "prefill"), case) for case in cases]
    for case, answer, expected in zip(cases, split, colocated, strict=True):
        assert len(answer.tokens) == OUTPUT_TOKENS
        assert answer.tokens == expected.tokens, case
    assert lost(decoding) == {}
    until(lambda: idle(vllm), TIMEOUT_S, "all blocks are free")


MORE = [
    Case(1000 + number, random.Random(number).randint(1, 3500), chat=False, stream=False)
    for number in range(40)
]


def test_requests_side_by_side_keep_their_own_tokens(vllm: Deployment) -> None:
    cases = MORE[:12]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda case: ask(vllm.url, case).tokens, cases))
    assert together == [ask(engine_url(vllm, "prefill"), case).tokens for case in cases]
    until(lambda: idle(vllm), TIMEOUT_S, "all blocks are free")
