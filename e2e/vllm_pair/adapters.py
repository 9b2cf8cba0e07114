"""LoRA adapters of small models."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from cleave.local.tiny_model import TinyModelShape

RANK = 8
TINY = TinyModelShape()


def write_adapter(
    folder: Path, seed: int, shape: TinyModelShape = TINY, spread: float = 1.0
) -> Path:
    """Write one that changes queries and values, by default a lot, as `peft` would store it."""
    rng = np.random.default_rng(seed)
    weights = {}
    for layer in range(shape.layers):
        for name, size in (("q_proj", shape.hidden), ("v_proj", shape.kv_size)):
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = rng.normal(0, shape.hidden**-0.5, (RANK, shape.hidden))
            weights[f"{path}.lora_A.weight"] = down.astype(np.float32)
            up = rng.normal(0, spread, (size, RANK))
            weights[f"{path}.lora_B.weight"] = up.astype(np.float32)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    config |= {"peft_type": "LORA", "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
