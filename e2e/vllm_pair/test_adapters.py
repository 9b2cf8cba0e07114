"""LoRA adapters on vLLM: their KV is handed over like the model's own."""

import httpx
import pytest

from e2e.support.deployments import Deployment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
# The first log-probabilities of a prompt compile a kernel with g++.
TIMEOUT_S = 180


def ask(url: str, model: str, prompt: str, **fields: object) -> tuple[list[int], bool]:
    """(tokens, whether two instances made them)."""
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, **fields}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"], "x-cleave-prefill" in response.headers


def test_each_adapter_answers_over_a_handoff_as_one_instance_does(
    vllm_pair: Deployment,
) -> None:
    listed = httpx.get(f"{vllm_pair.url}/v1/models", timeout=TIMEOUT_S).json()["data"]
    parents = {each["id"]: each["parent"] for each in listed}
    assert parents == {"tiny": None, "sql": "tiny", "law": "tiny"}
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
