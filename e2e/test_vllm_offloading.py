"""vLLM's host memory for KV beside Cleave's connector: what MultiConnector does with both.

Engines on CPU have no such memory in vLLM 0.32, so its copies are replaced
(`e2e.support.cpu_offloading`), and the settings that agents write on GPUs are given by hand.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from e2e.support.deployments import Deployment, deployed, start_fast, tiny_vllm
from e2e.support.handoffs import lost
from e2e.support.vllm_prompts import TIMEOUT_S, Case, ask, engine_url

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NUM_BLOCKS = 36
"""Of 128 tokens, fewer than four of the prompts; one of 4,096 tokens must fit."""
PROMPTS = [Case(100 + number, 1_200, chat=False, stream=False) for number in range(5)]


@pytest.fixture(scope="module")
def vllm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    own = {
        "kv_connector": "CleaveConnector",
        "kv_connector_module_path": "cleave_worker.vllm.kv.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"checksums": True},
    }
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_module_path": "cleave_worker.vllm.kv.offloading_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 1 << 28,
            "spec_name": "CopyingSpec",
            "spec_module_path": "e2e.support.cpu_offloading",
        },
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [own, offloading]},
    }
    args = ["--kv-transfer-config", json.dumps(both), "--num-gpu-blocks-override", str(NUM_BLOCKS)]
    env = [{"name": "PYTHONPATH", "value": str(Path(__file__).parents[1])}]
    manifest = tiny_vllm(tiny_model, engine=start_fast(args=args, env=env))
    with deployed(manifest, tmp_path_factory.mktemp("vllm"), timeout_s=600) as deployment:
        yield deployment


def count_cached(vllm: Deployment, role: str) -> dict[str, float]:
    """Cached prompt tokens by tier."""
    page = httpx.get(f"{engine_url(vllm, role)}/metrics", timeout=TIMEOUT_S).text
    start = "vllm:prompt_tokens_cached_by_source_total{"
    lines = [line for line in page.splitlines() if line.startswith(start)]
    return {each.split('source="')[1].split('"')[0]: float(each.split()[-1]) for each in lines}


def test_evicted_prompts_come_back_from_host_memory_and_handoffs_from_the_peer(
    vllm: Deployment,
) -> None:
    first = [ask(vllm.url, case).tokens for case in PROMPTS]
    before, pulled = count_cached(vllm, "prefill"), count_cached(vllm, "decode")
    assert pulled["p2p"] >= 5 * 1_000
    # In the order in which they are evicted, so none is found in the engine's own cache.
    assert [ask(vllm.url, case).tokens for case in PROMPTS] == first
    after = count_cached(vllm, "prefill")
    assert after["host"] - before["host"] >= 5 * 1_000
    assert lost(engine_url(vllm, "decode")) == {}
