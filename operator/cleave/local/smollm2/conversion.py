"""Writes the files of the model for vLLM: config, weights, tokenizer.

The reverse of llama.cpp's `convert_hf_to_gguf.py`. The tokenizer is that of
HuggingFaceTB/SmolLM2-135M-Instruct: digits one by one, then GPT-2's byte-level BPE. Weights of 4
bits keep their scales, which are of float16, so that is the format of the file.
"""

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cleave.local.smollm2.gguf import GgufFile

if TYPE_CHECKING:
    import numpy as np

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of llama.cpp, and those of Hugging Face."""
_CONTROL = 3
"""The type of tokens that no text becomes, such as <|im_end|>."""


def write(folder: Path, model: GgufFile) -> None:
    """Write `model` to `folder`, which exists. Raises OSError, ValueError."""
    metadata = model.metadata
    config = _build_config(metadata)
    _write_json(folder / "config.json", config)
    numbers = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", numbers)
    _write_tokenizer(folder, metadata)
    _write_weights(folder / "model.safetensors", model, config)


def _build_config(metadata: dict[str, Any]) -> dict[str, Any]:
    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": round(metadata["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": metadata["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(folder: Path, metadata: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(each.split(" ")) for each in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{
            f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
            for name, key in {
                "bos": "bos",
                "eos": "eos",
                "unk": "unknown",
                "pad": "padding",
            }.items()
        },
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_weights(path: Path, model: GgufFile, config: dict[str, Any]) -> None:
    """Write the tensors as safetensors: the size of a JSON header, that header, their bytes."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data, end = [], 0
    for name, found in model.iter_tensors():
        *layer, kind, _ = name.split(".")
        weights = _restore_rows(found, heads[kind]) if kind in heads else found
        prefix = f"model.layers.{layer[1]}." if layer else ""
        data.append(weights.astype("float16").tobytes())
        begin, end = end, end + len(data[-1])
        header[f"{prefix}{_TENSORS[kind]}.weight"] = {
            "dtype": "F16",
            "shape": weights.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(data)


def _restore_rows(weights: "np.ndarray", heads: int) -> "np.ndarray":
    """Undo llama.cpp's order of rows, which has the two halves of a rotated pair side by side."""
    rows, columns = weights.shape
    pairs = weights.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
