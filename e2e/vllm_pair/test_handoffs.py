"""The real path: vLLM on CPU, one prefill and one decode instance, KV over NIXL."""

import concurrent.futures
import os

import httpx
import psutil
import pytest

from cleave.rpc.v1 import agent_pb2

from e2e.support.deployments import Deployment, until
from e2e.support.vllm_prompts import (
    CASES,
    OUTPUT_TOKENS,
    TIMEOUT_S,
    ask,
    engine_url,
    metric,
    must_have_moved_all,
    renumber,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def threads_cores(engine: psutil.Process) -> set[int]:
    """Every core that a thread of the engine may run on."""
    return {
        core
        for process in [engine, *engine.children(recursive=True)]
        for thread in process.threads()
        for core in os.sched_getaffinity(thread.id)
    }


def test_tokens_are_those_of_a_colocated_run_and_nothing_is_recomputed(
    vllm_pair: Deployment,
) -> None:
    prefill, decode = engine_url(vllm_pair, "prefill"), engine_url(vllm_pair, "decode")
    ran = "vllm:iteration_tokens_total_sum"
    pulled = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv'
    ran_before, pulled_before = metric(decode, ran), metric(decode, pulled)
    cases = renumber(CASES)
    split = [ask(vllm_pair.url, case) for case in cases]
    # A token of output is a token run: the last prompt token runs to make the first.
    assert metric(decode, ran) - ran_before == sum(len(answer.tokens) for answer in split)
    assert metric(decode, pulled) - pulled_before == sum(answer.prompt_tokens for answer in split)

    colocated = [ask(prefill, case) for case in cases]
    for case, answer, expected in zip(cases, split, colocated, strict=True):
        assert answer.prompt_tokens >= case.prompt_tokens
        assert len(answer.tokens) == OUTPUT_TOKENS
        assert answer.tokens == expected.tokens, case
        assert "kv_transfer_params" not in answer.raw
        assert "remote_" not in answer.raw


def test_what_the_agents_say_is_true(vllm_pair: Deployment) -> None:
    for health in vllm_pair.healths():
        registration, load = health.registration, health.load
        assert registration.engine.startswith("vllm 0.")
        assert registration.kv_path.verified
        assert registration.kv_path.transport.startswith("nixl")
        assert registration.kv_path.bytes_per_s > 0
        must_have_moved_all(registration.kv_path.detail)
        assert registration.kv_block_size == 128
        assert registration.kv_blocks_total > 0
        assert load.sampled_ns > 0
    until(lambda: all(map(is_free, vllm_pair.healths())), TIMEOUT_S, "all blocks are free")


def is_free(health: agent_pb2.HealthResponse) -> bool:
    return health.load.kv_blocks_free == health.registration.kv_blocks_total


def test_each_engine_stays_on_its_own_core(vllm_pair: Deployment) -> None:
    cores_by_role = [
        threads_cores(vllm_pair.engine(f"tiny-{role}-0")) for role in ("prefill", "decode")
    ]
    assert [len(cores) for cores in cores_by_role] == [1, 1]
    assert cores_by_role[0] != cores_by_role[1]


def test_a_client_cannot_hand_in_handoff_data(vllm_pair: Deployment) -> None:
    case = CASES[0]
    stolen = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [[1]]}
    response = httpx.post(
        vllm_pair.url + case.path,
        json=case.body | {"kv_transfer_params": stolen},
        timeout=TIMEOUT_S,
    )
    assert response.status_code == 200
    assert "kv_transfer_params" not in response.text


def test_requests_side_by_side_keep_their_own_tokens(vllm_pair: Deployment) -> None:
    cases = CASES[:12]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda case: ask(vllm_pair.url, case).tokens, cases))
    assert together == [ask(vllm_pair.url, case).tokens for case in cases]
