"""What an engine reports about its model, as one JSON text: the sender's side.

Called by the vLLM plug-in and the emulated engine, which write the text beside their load page, and
by the agent, which reads it and puts it into its registration. The operator reads the text as
`cleave.api.model_report.ModelReport`, whose fields are the same. Standard library only.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from cleave.perf.model.name_patterns import shorten_names

MAX_LENGTH = 1 << 14
"""Characters of a report. A config without its lists of modules has two thousand."""
_FILE = "model.json"
_MAX_TEXT, _MAX_ITEMS, _MAX_LEVELS = 200, 1_024, 6
_DIGEST_DIGITS = 16
_MAX_TOKENS = 1 << 48
"""More than fit into any host: such a report is wrong."""
_UNREAD = frozenset(
    {
        *("vision_config", "audio_config", "id2label", "label2id", "auto_map"),
        *("task_specific_params", "transformers_version"),
    }
)
"""Fields of configs that no plan reads and that may be long."""
_QUANTIZATION = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """Layers whose KV the engine keeps in blocks of one kind, on one GPU."""

    kind: str
    """The engine's name: `FullAttentionSpec`, `MambaSpec`, ..."""
    layers: int
    block_size: int
    """Tokens per block."""
    bytes_per_token: int = 0
    """Over all its layers, without padding; 0: its size does not depend on the tokens."""
    window: int = 0
    """Last tokens that it keeps; 0: all."""
    state_bytes: int = 0
    """Of one request over all its layers, where they have states."""


@dataclass(frozen=True, slots=True)
class SizeFacts:
    """What an engine knows about its model's layers, without its config.json; of all GPUs."""

    layers: int
    hidden_size: int
    attention_heads: int
    kv_heads: int
    """That are cached; 1: all GPUs cache the same (MLA)."""
    head_size: int
    vocab_size: int
    weight_bytes: int
    """All weights, also of parts for images."""
    linear_weights: int
    """Number of weights of the language model's linear layers, without routed experts, embeddings
    and LM head."""
    linear_bytes: int
    expert_bytes: int = 0
    """Of routed experts; 0: there are none."""
    expert_layers: int = 0
    experts: int = 0
    """Of a layer."""
    experts_per_token: int = 0
    expert_width: int = 0
    expert_hidden_size: int = 0
    """Size of the inputs of routed experts."""
    expert_matrices: int = 0
    """Of one expert: three with a gate, else two."""


class HostMemoryFacts(NamedTuple):
    """Host memory in which an engine keeps copies of KV, see `cleave.policy.host_memory`."""

    tokens: int = 0
    """Tokens that fit; 0: there is none."""
    token_ms: float = 0.0
    """ms to copy one of them back to the GPUs, as assumed; 0: not known."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What one start of an engine knows about its model."""

    config: Mapping[str, object]
    """The model's config.json."""
    max_model_len: int
    block_size: int
    dtype: str
    """Of weights that are not quantised."""
    kv_dtype: str
    tensor: int
    """Tensor-parallel size, to which the bytes of the groups belong."""
    pipeline: int
    groups: Sequence[GroupFacts]
    host_memory: HostMemoryFacts = HostMemoryFacts()  # noqa: RUF009 - a frozen value
    sizes: SizeFacts | None = None
    """None: not known."""


def get_path(load_page: Path) -> Path:
    """The file of the report, beside the engine's load page."""
    return load_page.with_name(_FILE)


def write(load_page: Path, facts: EngineFacts) -> None:
    """Write the report of an engine with this load page; a report that is too long is left out.
    Raises OSError."""
    text = encode(facts)
    if len(text) <= MAX_LENGTH:
        path = get_path(load_page)
        draft = path.with_suffix(".new")
        draft.write_text(text)
        draft.replace(path)


def read(load_page: Path) -> str:
    """The report of the engine with this load page; empty: there is none that can be used."""
    try:
        with get_path(load_page).open(encoding="ascii") as file:
            text = file.read(MAX_LENGTH + 1)
    except (OSError, ValueError):
        return ""
    return text if len(text) <= MAX_LENGTH else ""


def read_host_memory(text: str) -> HostMemoryFacts:
    """What a report says about host memory for KV; operators do not read it."""
    try:
        own = json.loads(text)["hostMemory"]
        tokens, token_ms = int(own["tokens"]), float(own["tokenMs"])
    except (ValueError, TypeError, KeyError):
        return HostMemoryFacts()
    return HostMemoryFacts(tokens, token_ms) if 0 < tokens < _MAX_TOKENS else HostMemoryFacts()


def encode(facts: EngineFacts) -> str:
    """The canonical text: equal facts have equal texts, in ASCII."""
    report: dict[str, object] = {
        "config": select_config(facts.config),
        "configDigest": compute_digest(facts.config),
        "maxModelLen": facts.max_model_len,
        "blockSize": facts.block_size,
        "dtype": facts.dtype,
        "kvDtype": facts.kv_dtype,
        "parallelism": {"tensor": facts.tensor, "pipeline": facts.pipeline},
        "cacheGroups": [_to_object(asdict(group)) for group in facts.groups],
    }
    if facts.sizes is not None:
        report["sizes"] = _to_object(asdict(facts.sizes))
    if facts.host_memory.tokens:
        tokens, token_ms = facts.host_memory
        report["hostMemory"] = {"tokens": tokens, "tokenMs": token_ms}
    return json.dumps(report, sort_keys=True, separators=(",", ":"))


def _to_object(facts: Mapping[str, object]) -> dict[str, object]:
    """Facts with names as in JSON."""
    return {_UNDERSCORE.sub(lambda m: m[1].upper(), name): value for name, value in facts.items()}


_UNDERSCORE = re.compile("_([a-z])")


def compute_digest(config: Mapping[str, object]) -> str:
    """Hash of a whole config.json: engines with equal ones serve the same model, as far as that
    file says. It does not depend on parallel sizes."""
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]


def select_config(config: Mapping[str, object]) -> dict[str, object]:
    """The fields of a config.json that plans may read: without long texts, parts for images and
    sound, and infinite numbers, which the API server refuses (`time_step_limit` of models with
    Mamba-2 layers); lists of names of layers are shortened."""
    config = shorten_lists(config)
    return {
        name: kept
        for name, value in config.items()
        if name not in _UNREAD and (kept := _select(value, _MAX_LEVELS)) is not None
    }


def shorten_lists(config: Mapping[str, object]) -> dict[str, object]:
    """A config whose quantisation names layers in few words."""
    return {
        name: _shorten(value)
        if name in _QUANTIZATION
        else shorten_lists(value)
        if isinstance(value, Mapping)
        else value
        for name, value in config.items()
    }


def _shorten(value: object) -> object:
    if isinstance(value, Mapping):
        return {
            name: _shorten_keys(each) if name == "quantized_layers" else _shorten(each)
            for name, each in value.items()
        }
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return shorten_names(value)
    return value


def _shorten_keys(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    alike: dict[str, tuple[object, list[str]]] = {}
    for name, each in value.items():
        alike.setdefault(repr(each), (each, []))[1].append(str(name))
    return {name: each for each, names in alike.values() for name in shorten_names(names)}


def _select(value: object, levels: int) -> object:
    """None: not selected."""
    if value is None:
        # Statuses lose null, and false says the same about a model.
        return False
    if isinstance(value, bool | int | float):
        return value if _is_finite(value) else None
    if isinstance(value, str):
        return value if len(value) <= _MAX_TEXT else None
    if not levels:
        return None
    if isinstance(value, Mapping):
        kept = {
            str(name): _select(each, levels - 1)
            for name, each in value.items()
            if name not in _UNREAD
        }
        return {name: each for name, each in kept.items() if each is not None}
    if isinstance(value, Sequence) and len(value) <= _MAX_ITEMS and all(map(_is_finite, value)):
        return [_select(each, levels - 1) for each in value]
    return None


def _is_finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
