"""vLLM on CPU whose decode engine takes KV while it is computed: tokens, faults, freed memory."""

import concurrent.futures
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from hand_offs import is_free, lost
from harness import Deployment, deployed, tiny_vllm, until
from vllm_cases import TIMEOUT_S, Case, ask, engine_url, metric

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
SETTINGS = {"kv_connector_extra_config": {"checksums": True, "kv_lease_duration": 20}}
ENGINE = {
    "connector": "Cleave",
    "transfer": "PerLayer",
    # Several chunks of a prompt, several layers of a chunk.
    "args": ["--kv-transfer-config", json.dumps(SETTINGS), "--max-num-batched-tokens", "512"],
}
CASES = [
    Case(40_000 + number, random.Random(number).randint(1, 2500), chat=False, stream=number % 2 > 0)
    for number in range(16)
]


@pytest.fixture(scope="module")
def vllm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    manifest = tiny_vllm(tiny_model, engine=ENGINE)
    with deployed(manifest, tmp_path_factory.mktemp("vllm"), timeout_s=420) as deployment:
        yield deployment


def test_tokens_are_those_of_a_colocated_run_and_none_of_the_kv_is_lost(vllm: Deployment) -> None:
    split = [ask(vllm.url, case) for case in CASES]
    assert lost(engine_url(vllm, "decode")) == {}
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


def test_a_client_that_leaves_while_its_kv_comes_frees_both_sides(vllm: Deployment) -> None:
    case = Case(50_000, 3_000, chat=False, stream=True)
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
