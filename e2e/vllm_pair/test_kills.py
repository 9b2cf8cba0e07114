"""A killed engine and a killed agent of a pair come back: `make e2e-vllm`."""

import os
import signal

import httpx
import psutil
import pytest

from e2e.support.deployments import Deployment, until
from e2e.support.vllm_prompts import CASES, TIMEOUT_S, ask, engine_url

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_a_killed_engine_and_a_killed_agent_are_replaced_and_the_service_comes_back(
    vllm_pair: Deployment,
) -> None:
    before = vllm_pair.instances()
    agent = vllm_pair.agent("tiny-decode-0")
    children = agent.children(recursive=True)
    assert len(children) >= 3, "subreaper, API server, engine core"
    engine = vllm_pair.engine("tiny-prefill-0")
    trees = [engine, *engine.children(recursive=True), agent, *children]
    for victim in (engine, agent):
        os.kill(victim.pid, signal.SIGKILL)
        # A clear answer while either is away: served by what is left, or an error.
        response = httpx.post(vllm_pair.url + CASES[0].path, json=CASES[0].body, timeout=TIMEOUT_S)
        assert response.status_code == 200 or "message" in response.json()["error"]

    _, alive = psutil.wait_procs(trees, timeout=30)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    until(
        lambda: all(
            (now := vllm_pair.instances().get(instance))
            and now.boot_id != known.boot_id
            and now.kv_path.verified
            for instance, known in before.items()
        ),
        240,
        "the engines are back and their KV path is verified",
    )
    until(
        lambda: httpx.get(f"{vllm_pair.url}/health", timeout=TIMEOUT_S).status_code == 200,
        30,
        "health",
    )
    colocated = ask(engine_url(vllm_pair, "prefill"), CASES[6])
    assert ask(vllm_pair.url, CASES[6]).tokens == colocated.tokens
