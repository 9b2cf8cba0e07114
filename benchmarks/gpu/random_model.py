"""Writes a random model of the sizes of Llama-3.1-8B, for machines without a network.

    python benchmarks/gpu/random_model.py FOLDER

Its texts depend on the whole prompt, so lost or mixed-up KV shows: the entries of its weights are
spread as in `cleave.local.tiny_model`. vLLM's own dummy weights would not do: they are so small
that only the last token counts.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
SHARPNESS, LOGIT_SPREAD = 1.7, 4.0
LAYERS_PER_FILE = 8


def main() -> None:
    """Write config, tokenizer and weights."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    write_tokenizer(folder)
    names: dict[str, str] = {}
    for number, weights in enumerate(build_shards()):
        file = f"model-{number:05}.safetensors"
        save_file(weights, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(weights, file)
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(folder: Path) -> None:
    """Bytes, then words that no text has but that answers consist of."""
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"w{number:06}" for number in range(CONFIG["vocab_size"] - len(words))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:2])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def build_shards() -> Iterator[dict[str, torch.Tensor]]:
    """The weights of some layers at a time."""
    hidden, mlp = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    vocabulary, kv_size = CONFIG["vocab_size"], CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(20_240_710)

    def draw(rows: int, columns: int, spread: float = 1.0) -> torch.Tensor:
        entries = torch.randn(
            rows, columns, generator=generator, device=device, dtype=torch.bfloat16
        )
        return (entries * (spread / columns**0.5)).cpu()

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    yield {
        "model.embed_tokens.weight": draw(vocabulary, hidden, hidden**0.5 / 2),
        "model.norm.weight": ones,
        "lm_head.weight": draw(vocabulary, hidden, LOGIT_SPREAD),
    }
    for first in range(0, CONFIG["num_hidden_layers"], LAYERS_PER_FILE):
        weights = {}
        for layer in range(first, min(first + LAYERS_PER_FILE, CONFIG["num_hidden_layers"])):
            name = f"model.layers.{layer}"
            weights |= {
                f"{name}.input_layernorm.weight": ones.clone(),
                f"{name}.post_attention_layernorm.weight": ones.clone(),
                f"{name}.self_attn.q_proj.weight": draw(hidden, hidden, SHARPNESS),
                f"{name}.self_attn.k_proj.weight": draw(kv_size, hidden, SHARPNESS),
                f"{name}.self_attn.v_proj.weight": draw(kv_size, hidden),
                f"{name}.self_attn.o_proj.weight": draw(hidden, hidden),
                f"{name}.mlp.gate_proj.weight": draw(mlp, hidden),
                f"{name}.mlp.up_proj.weight": draw(mlp, hidden),
                f"{name}.mlp.down_proj.weight": draw(hidden, mlp),
            }
        yield weights


if __name__ == "__main__":
    main()
