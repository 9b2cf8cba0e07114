"""A tiny random Llama with its tokenizer, or a Mixtral: built locally, no download, no account.

Used by `cleave demo` and by tests that run real engines. A random model must still depend on its
whole prompt, or a lost KV cache would go unnoticed. So attention is sharp and weighs as much as the
last token, and logits differ widely, so that the greedy choice has no near-ties. Tokens that are
not text by themselves (parts of UTF-8, begin, end) have a zero row in the output layer: they lose
against the best of the others, so every response has its full length.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cleave.local import files, state

VERSION = 1
"""Incremented with every change of the model."""
_VOCABULARY_SIZE = 512
_MAX_LEN = 8192
_SEED = 20240710
_SHARPNESS = 1.7
"""Standard deviation of query and key entries; attention logits spread by its square."""
_LOGIT_SPREAD = 4.0
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_TRAINING_TEXT = """
the river runs under an old stone bridge where quiet people meet in the early morning light and
talk about weather bread music distant mountains small boats green hills open windows long letters
bright lanterns slow trains warm kitchens paper maps winter gardens first snow summer rain
"""


@dataclass(frozen=True, slots=True)
class TinyModelShape:
    """Sizes of the model; the defaults are the smallest that real engines accept."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 512
    experts: int = 0
    """Experts of each layer, of which two compute a token; 0: a dense Llama, else a Mixtral."""

    @property
    def head_size(self) -> int:
        """Entries of one attention head."""
        return self.hidden // self.heads

    @property
    def kv_size(self) -> int:
        """Entries of one token's keys, or values, in one layer."""
        return self.kv_heads * self.head_size


def get_or_build() -> Path:
    """The model's folder in the state folder, built on first use. Raises StateError."""
    path = state.get_root() / ".models" / f"tiny-llama-{VERSION}"
    if not path.exists():
        state.create_folder(path.parent)
        build(path)
    return path


def build(path: Path, shape: TinyModelShape = TinyModelShape()) -> None:
    """Write the model to `path` atomically."""
    files.create_private_folder(path.parent)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.mkdir()
    try:
        vocabulary = _write_tokenizer(new)
        _write_json(new / "config.json", _build_config(shape, len(vocabulary)))
        _write_weights(new / "model.safetensors", shape, vocabulary)
        new.rename(path)
    except OSError:
        # Another process may have been first; its model is the same.
        if not path.exists():
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _build_config(shape: TinyModelShape, vocabulary_size: int) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": _MAX_LEN,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    if shape.experts:
        config |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": shape.experts,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        }
    return config


def _write_tokenizer(folder: Path) -> list[str]:
    """Byte-level BPE trained on a few words; returns the tokens in order."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TRAINING_TEXT.replace("\n", " ")], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": _MAX_LEN,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    numbers: dict[str, int] = tokenizer.get_vocab()
    return sorted(numbers, key=numbers.__getitem__)


def _write_weights(path: Path, shape: TinyModelShape, vocabulary: list[str]) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(_SEED)

    def matrix(rows: int, columns: int, spread: float = 1.0) -> np.ndarray:
        """Return a random matrix that maps unit entries to entries that spread by `spread`."""
        entries = rng.standard_normal((rows, columns), dtype=np.float32)
        return entries * np.float32(spread / columns**0.5)

    ones = np.ones(shape.hidden, dtype=np.float32)
    head = matrix(len(vocabulary), shape.hidden, _LOGIT_SPREAD)
    head[[i for i, token in enumerate(vocabulary) if not _is_text(token)]] = 0
    weights = {
        "model.embed_tokens.weight": matrix(len(vocabulary), shape.hidden, shape.hidden**0.5 / 2),
        "model.norm.weight": ones,
        "lm_head.weight": head,
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": ones,
            f"{prefix}.post_attention_layernorm.weight": ones,
            f"{prefix}.self_attn.q_proj.weight": matrix(shape.hidden, shape.hidden, _SHARPNESS),
            f"{prefix}.self_attn.k_proj.weight": matrix(shape.kv_size, shape.hidden, _SHARPNESS),
            f"{prefix}.self_attn.v_proj.weight": matrix(shape.kv_size, shape.hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(shape.hidden, shape.hidden),
        }
        if shape.experts:
            experts = f"{prefix}.block_sparse_moe"
            weights[f"{experts}.gate.weight"] = matrix(shape.experts, shape.hidden)
            names = [(f"{experts}.experts.{n}", "w1", "w3", "w2") for n in range(shape.experts)]
        else:
            names = [(f"{prefix}.mlp", "gate_proj", "up_proj", "down_proj")]
        for folder, gate, up, down in names:
            weights |= {
                f"{folder}.{gate}.weight": matrix(shape.mlp, shape.hidden),
                f"{folder}.{up}.weight": matrix(shape.mlp, shape.hidden),
                f"{folder}.{down}.weight": matrix(shape.hidden, shape.mlp),
            }
    save_file(weights, path, metadata={"format": "pt"})


def _is_text(token: str) -> bool:
    """Whether `token` is printable ASCII by itself (BPE writes a space as a separate letter)."""
    text = token.replace("\u0120", " ")
    return not token.startswith("<") and text.isascii() and text.isprintable()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
