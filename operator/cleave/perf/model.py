"""What a model needs of memory, from its Hugging Face config.json or from the table here.

Used by the emulated engine (bytes that a KV hand-off moves) and the planner.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BYTES_OF_DTYPE = {"float32": 4, "float16": 2, "bfloat16": 2}


class UnknownModelError(LookupError):
    """The model is neither described here nor a folder with a usable config.json."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a decoder-only transformer."""

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_model_len: int
    """Longest context that the model was made for, in tokens."""
    dtype_bytes: int = 2

    @property
    def kv_bytes_per_token(self) -> int:
        """Key and value of one token over all layers, in the model's own precision."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.dtype_bytes


_DESCRIBED = {
    # facebook/opt-*: Zhang et al., "OPT: Open Pre-trained Transformer Language Models", table 1.
    "opt-13b": ModelShape("opt-13b", 40, 5120, 40, 40, 128, 50272, 2048),
    "opt-66b": ModelShape("opt-66b", 64, 9216, 72, 72, 128, 50272, 2048),
}


def load(model: str) -> ModelShape:
    """The shape of a folder with a config.json or of a described model (`facebook/opt-13b`).

    Raises UnknownModelError, which says what was missing.
    """
    folder = Path(model)
    if folder.is_dir():
        return _read(folder / "config.json")
    shape = _DESCRIBED.get(model.rpartition("/")[2].lower())
    if shape is None:
        raise UnknownModelError(
            f"{model!r} is no folder; described models: {', '.join(_DESCRIBED)}"
        )
    return shape


def _read(path: Path) -> ModelShape:
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise UnknownModelError(f"{path} holds no object")
        return _shape(path.parent.name, config.get("text_config", config))
    except (OSError, ValueError) as error:
        raise UnknownModelError(f"{path} cannot be read: {error}") from error
    except KeyError as error:
        raise UnknownModelError(f"{path} lacks {error}") from error


def _shape(name: str, config: dict[str, Any]) -> ModelShape:
    heads = config["num_attention_heads"]
    hidden_size = config["hidden_size"]
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float16")
    if dtype not in _BYTES_OF_DTYPE:
        raise UnknownModelError(
            f"{name}: dtype {dtype!r} is not one of {', '.join(_BYTES_OF_DTYPE)}"
        )
    return ModelShape(
        name=name,
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or hidden_size // heads,
        vocab_size=config["vocab_size"],
        max_model_len=config["max_position_embeddings"],
        dtype_bytes=_BYTES_OF_DTYPE[dtype],
    )
