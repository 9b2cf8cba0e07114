"""LoRA adapters on vLLM: loaded into running engines, their KV handed over like the model's own."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest

from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

from e2e.support.deployments import Deployment, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
# The first log-probabilities of a prompt compile a kernel with g++.
TIMEOUT_S = 180
GENERATIONS = itertools.count(2)
"""Of orders; the deployment's own is 1."""


def ask(url: str, model: str, prompt: str, **fields: object) -> tuple[list[int], bool]:
    """(tokens, whether two instances made them)."""
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, **fields}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"], "x-cleave-prefill" in response.headers


def list_models(url: str) -> dict[str, str | None]:
    """The parents of the gateway's models, by name."""
    listed = httpx.get(f"{url}/v1/models", timeout=TIMEOUT_S).json()["data"]
    return {each["id"]: each["parent"] for each in listed}


def order(deployment: Deployment, **sources: Path) -> None:
    """Order adapters as the operator does, and wait until all agents have done what they can."""
    adapters = [agent_pb2.AdapterSource(name=n, source=str(path)) for n, path in sources.items()]
    generation = next(GENERATIONS)
    request = agent_pb2.SetAdaptersRequest(adapters=adapters, generation=generation)
    (file,) = deployment.state_dir.rglob("agents")
    for address in file.read_text().split():
        with grpc.insecure_channel(address) as channel:
            agent = agent_pb2_grpc.AgentStub(channel)
            agent.SetAdapters(request, timeout=TIMEOUT_S, metadata=deployment.sign(address))

    def is_done(each: agent_pb2.RuntimeAdapter) -> bool:
        return each.generation == generation and bool(each.loaded or each.fault)

    def is_settled() -> bool:
        reports = [one.runtime_adapters for one in deployment.instances().values()]
        return all(
            {each.name for each in report if is_done(each)} >= sources.keys()
            and {each.name for each in report} <= sources.keys()
            for report in reports
        )

    until(is_settled, TIMEOUT_S, "the adapters are loaded")


def read_error(url: str, model: str) -> tuple[int, str]:
    """(status, code of the error) of a request; no code: it was answered."""
    response = httpx.post(f"{url}/v1/completions", json={"model": model, "prompt": "a"}, timeout=60)
    return response.status_code, response.json().get("error", {}).get("code", "")


def test_each_adapter_answers_over_a_handoff_as_one_instance_does(
    vllm_pair: Deployment,
) -> None:
    parents = {"tiny": None, "sql": "tiny", "law": "tiny"}
    until(lambda: list_models(vllm_pair.url) == parents, TIMEOUT_S, "the adapters are loaded")
    for number in range(2):
        prompt = f"{number}: the river runs under an old stone bridge BCDFG " * 8
        answers = []
        for name in parents:
            tokens, split = ask(vllm_pair.url, name, prompt)
            # Log-probabilities of a prompt come from the instance that computes it.
            alone, both = ask(vllm_pair.url, name, prompt, prompt_logprobs=0)
            assert (tokens, split, both) == (alone, True, False), name
            answers.append(tuple(tokens))
        assert len(set(answers)) == 3


def test_a_changed_source_serves_without_a_restart_and_without_the_old_ones_kv(
    vllm_pair: Deployment, adapters: dict[str, Path]
) -> None:
    url = vllm_pair.url
    # A failed attempt leaves others.
    order(vllm_pair, **adapters)
    parents = {"tiny": None, "sql": "tiny", "law": "tiny"}
    until(lambda: list_models(url) == parents, TIMEOUT_S, "the adapters are loaded")
    boots = {name: one.boot_id for name, one in vllm_pair.instances().items()}
    prompt = "the river runs under another old stone bridge BCDFG " * 8
    before = {name: ask(url, name, prompt) for name in ("sql", "law")}
    assert before["sql"] != before["law"]

    order(vllm_pair, sql=adapters["law"], law=adapters["law"])
    until(lambda: ask(url, "sql", prompt) == before["law"], TIMEOUT_S, "the new source answers")
    assert ask(url, "sql", prompt)[1], "over a handoff"
    answer = httpx.post(f"{url}/v1/completions", json={"model": "sql", "prompt": "a"}, timeout=60)
    assert answer.json()["model"] == "sql"

    order(vllm_pair, law=adapters["law"], tax=adapters["law"] / "missing")
    gone, waiting = (404, "model_not_found"), (503, "no_instance")
    until(lambda: read_error(url, "sql") == gone, TIMEOUT_S, "no request is accepted any more")
    until(lambda: read_error(url, "tax") == waiting, TIMEOUT_S, "the gateway knows of the order")
    faults = [
        each.fault
        for one in vllm_pair.instances().values()
        for each in one.runtime_adapters
        if each.name == "tax"
    ]
    assert len(faults) == 2
    assert all("No adapter found for" in fault and "tax@" not in fault for fault in faults)

    order(vllm_pair, **adapters)
    until(lambda: read_error(url, "sql") == (200, ""), TIMEOUT_S, "the first source is back")
    assert ask(url, "sql", prompt) == before["sql"]
    assert {name: one.boot_id for name, one in vllm_pair.instances().items()} == boots


def read_first_choice(url: str, prompt: str, salt: str) -> dict[str, float]:
    """Log-probabilities of the likeliest first tokens."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "logprobs": 5, "cache_salt": salt}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
    choices: dict[str, float] = response.json()["choices"][0]["logprobs"]["top_logprobs"][0]
    return choices


def test_the_model_beside_adapters_says_what_it_says_alone(vllm_pair: Deployment) -> None:
    parents = {"tiny": None, "sql": "tiny", "law": "tiny"}
    until(lambda: list_models(vllm_pair.url) == parents, TIMEOUT_S, "the adapters are loaded")
    shifts = []
    with ThreadPoolExecutor(4) as pool:
        for number in range(8):
            prompt = f"{number} boats on a river under an old stone bridge " * 10
            alone = read_first_choice(vllm_pair.url, prompt, f"alone {number}")
            others = [pool.submit(ask, vllm_pair.url, "law", f"{n} {prompt}") for n in range(3)]
            beside = read_first_choice(vllm_pair.url, prompt, f"beside {number}")
            shifts += [abs(alone[each] - beside[each]) for each in alone.keys() & beside.keys()]
            for other in others:
                other.result()
    assert max(shifts) < 0.1
