"""LoRA adapters on vLLM: their KV is handed over like the model's own."""

import json
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from cleave.local.tiny_model import TinyModelShape

from e2e.support.deployments import deployed, tiny_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
TIMEOUT_S = 60
RANK = 8


def write_adapter(folder: Path, seed: int) -> None:
    """One that changes queries and values a lot, as `peft` would store it."""
    shape, rng = TinyModelShape(), np.random.default_rng(seed)
    weights = {}
    for layer in range(shape.layers):
        for name, size in (("q_proj", shape.hidden), ("v_proj", shape.kv_size)):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = rng.normal(0, shape.hidden**-0.5, (RANK, shape.hidden))
            weights[f"{path}.lora_A.weight"] = down.astype(np.float32)
            weights[f"{path}.lora_B.weight"] = rng.normal(0, 1, (size, RANK)).astype(np.float32)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    config |= {"peft_type": "LORA", "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def ask(url: str, model: str, prompt: str, **fields: object) -> tuple[list[int], bool]:
    """(tokens, whether two instances made them)."""
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, **fields}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"], "x-cleave-prefill" in response.headers


def test_each_adapter_answers_over_a_handoff_as_one_instance_does(
    tiny_model: Path, tmp_path: Path
) -> None:
    adapters = []
    for seed, name in enumerate(("sql", "law")):
        write_adapter(tmp_path / name, seed)
        adapters.append(f"{name}={tmp_path / name}")
    args = ["--enable-lora", "--max-loras", "2", "--lora-modules", *adapters]
    manifest = tiny_vllm(tiny_model, engine={"args": args})
    with deployed(manifest, tmp_path, timeout_s=420) as deployment:
        listed = httpx.get(f"{deployment.url}/v1/models", timeout=TIMEOUT_S).json()["data"]
        parents = {each["id"]: each["parent"] for each in listed}
        assert parents == {"tiny": None, "sql": "tiny", "law": "tiny"}
        for number in range(4):
            prompt = f"{number}: the river runs under an old stone bridge BCDFG " * 8
            answers = []
            for name in parents:
                tokens, split = ask(deployment.url, name, prompt)
                # Log-probabilities of a prompt come from the instance that computes it.
                alone, both = ask(deployment.url, name, prompt, prompt_logprobs=0)
                assert (tokens, split, both) == (alone, True, False), name
                answers.append(tuple(tokens))
            assert len(set(answers)) == 3
