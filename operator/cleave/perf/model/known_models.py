"""Well-known models by name, so that planning needs no download.

Read by cleave.perf.model.model_shape. Each entry is the part of the model's public Hugging Face
config.json that determines memory and compute (facts; repositories named below); OPT-175B's is
table 1 of Zhang et al., "OPT: Open Pre-trained Transformer Language Models" (arXiv 2205.01068).
"""

import re
from collections.abc import Mapping

_IGNORED_PARTS = re.compile(r"-(meta|hf|instruct|chat|base|it|v0\.\d+)(?=-|$)")
"""Parts of a name that are unrelated to the dimensions."""


def _build_opt(layers: int, hidden: int, heads: int) -> dict[str, object]:
    return {
        "model_type": "opt",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "torch_dtype": "float16",
    }


_LLAMA_FIELDS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size", "max_position_embeddings"),
)


def _build_llama(*sizes: int, **more: object) -> dict[str, object]:
    """The Llama family and models with its layer: RMS norm, gated MLP, grouped queries."""
    named = dict(zip(_LLAMA_FIELDS, sizes, strict=True))
    return {"model_type": "llama", **named, "torch_dtype": "bfloat16", **more}


def _build_gpt_oss(layers: int, experts: int) -> dict[str, object]:
    return _build_llama(
        *(layers, 2880, 64, 8, 2880, 201088, 131072),
        model_type="gpt_oss",
        head_dim=64,
        num_local_experts=experts,
        num_experts_per_tok=4,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        quantization_config={"quant_method": "mxfp4"},
    )


CONFIGS: Mapping[str, Mapping[str, object]] = {
    # facebook/opt-*
    "opt-13b": _build_opt(40, 5120, 40),
    "opt-30b": _build_opt(48, 7168, 56),
    "opt-66b": _build_opt(64, 9216, 72),
    "opt-175b": _build_opt(96, 12288, 96),
    # meta-llama/*
    "llama-2-7b": _build_llama(32, 4096, 32, 32, 11008, 32000, 4096, torch_dtype="float16"),
    "llama-2-13b": _build_llama(40, 5120, 40, 40, 13824, 32000, 4096, torch_dtype="float16"),
    "llama-2-70b": _build_llama(80, 8192, 64, 8, 28672, 32000, 4096, torch_dtype="float16"),
    "llama-3-8b": _build_llama(32, 4096, 32, 8, 14336, 128256, 8192),
    "llama-3-70b": _build_llama(80, 8192, 64, 8, 28672, 128256, 8192),
    "llama-3.1-8b": _build_llama(32, 4096, 32, 8, 14336, 128256, 131072),
    "llama-3.1-70b": _build_llama(80, 8192, 64, 8, 28672, 128256, 131072),
    "llama-3.1-405b": _build_llama(126, 16384, 128, 8, 53248, 128256, 131072),
    # mistralai/Mistral-7B-Instruct-v0.3, Mixtral-8x7B-v0.1
    "mistral-7b": _build_llama(32, 4096, 32, 8, 14336, 32768, 32768),
    "mixtral-8x7b": _build_llama(
        *(32, 4096, 32, 8, 14336, 32000, 32768),
        model_type="mixtral",
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    # Qwen/*; the first generation counts both halves of the gated MLP in its intermediate size
    "qwen-72b": _build_llama(80, 8192, 64, 64, 49152, 152064, 32768, model_type="qwen"),
    "qwen2.5-7b": _build_llama(28, 3584, 28, 4, 18944, 152064, 32768, model_type="qwen2"),
    "qwen2.5-32b": _build_llama(64, 5120, 40, 8, 27648, 152064, 32768, model_type="qwen2"),
    "qwen2.5-72b": _build_llama(80, 8192, 64, 8, 29568, 152064, 32768, model_type="qwen2"),
    "qwen3-8b": _build_llama(
        36, 4096, 32, 8, 12288, 151936, 40960, model_type="qwen3", head_dim=128
    ),
    "qwen3-32b": _build_llama(
        64, 5120, 64, 8, 25600, 151936, 40960, model_type="qwen3", head_dim=128
    ),
    "qwen3-30b-a3b": _build_llama(
        *(48, 2048, 32, 4, 6144, 151936, 40960),
        model_type="qwen3_moe",
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    # internlm/internlm-20b
    "internlm-20b": _build_llama(60, 5120, 40, 40, 13824, 103168, 4096, model_type="internlm"),
    # deepseek-ai/DeepSeek-V3; without the multi-token prediction layer, as engines load it
    "deepseek-v3": _build_llama(
        *(61, 7168, 128, 128, 18432, 129280, 163840),
        model_type="deepseek_v3",
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        num_nextn_predict_layers=1,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    # Qwen/Qwen3-235B-A22B
    "qwen3-235b-a22b": _build_llama(
        *(94, 4096, 64, 4, 12288, 151936, 40960),
        model_type="qwen3_moe",
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
    ),
    # openai/gpt-oss-120b, gpt-oss-20b: every other layer attends to 128 tokens
    "gpt-oss-120b": _build_gpt_oss(36, 128),
    "gpt-oss-20b": _build_gpt_oss(24, 32),
    # bigscience/bloom
    "bloom": {
        "model_type": "bloom",
        "n_layer": 70,
        "n_embed": 14336,
        "num_attention_heads": 112,
        "vocab_size": 250880,
        "seq_length": 2048,
        "torch_dtype": "bfloat16",
    },
}

_ALIASES = {
    "bloom-176b": "bloom",
    "deepseek-r1": "deepseek-v3",
    "llama-3.3-70b": "llama-3.1-70b",
    "llama2-7b": "llama-2-7b",
    "llama2-13b": "llama-2-13b",
    "llama2-70b": "llama-2-70b",
}


_QUANTIZED_COPIES: Mapping[tuple[str, str], Mapping[str, object]] = {
    # Linear layers in FP8, KV in 16 bits: Qwen's by blocks, Red Hat's by tensor or channel.
    ("qwen", "-fp8"): {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ("redhatai", "-fp8"): {"quant_method": "fp8"},
    ("redhatai", "-fp8-dynamic"): {"quant_method": "fp8"},
    ("neuralmagic", "-fp8"): {"quant_method": "fp8"},
    ("neuralmagic", "-fp8-dynamic"): {"quant_method": "fp8"},
}
"""Quantisation of the copies of known models, by owner on Hugging Face and end of their name. Only
owners whose copies of such a name are all alike."""


def find_config(model: str) -> tuple[str, Mapping[str, object]] | None:
    """Name and config of a Hugging Face id or a plain name, ignoring case; None: unknown.

    `meta-llama/Llama-3.1-8B-Instruct`, `Meta-Llama-3.1-8B` and `llama-3.1-8b` are one model, and
    `RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8` is its quantised copy. Names of other quantised copies
    (`-AWQ`, `-NVFP4`, other owners') are unknown: their config.json describes them.
    """
    *path, own_name = model.lower().split("/")
    if name := _resolve_name(own_name):
        return name, CONFIGS[name]
    for (owner, suffix), quantization in _QUANTIZED_COPIES.items():
        name = _resolve_name(own_name.removesuffix(suffix))
        if name and path and path[-1] == owner and "quantization_config" not in CONFIGS[name]:
            return name + suffix, {**CONFIGS[name], "quantization_config": quantization}
    return None


def _resolve_name(own_name: str) -> str | None:
    """The key in CONFIGS of the last part of a Hugging Face id, in lower case; None: unknown."""
    name = _IGNORED_PARTS.sub("", "-" + own_name).removeprefix("-")
    name = _ALIASES.get(name, name)
    return name if name in CONFIGS else None
