"""Writes what the classes of configs say that files leave out, for `cleave.perf.model`.

    .venv/bin/python benchmarks/models/class_defaults.py      # writes class_defaults.json

Read from the classes of transformers and of the pinned vLLM, for the model types that plans know
and those that have one of them as a part. Fields that cannot change a size are left out.
"""

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cleave.perf.model import config_classes, model_shape
from cleave.perf.model.family_table import FAMILIES, OUTER_TYPES
from cleave.perf.model.hf_config import ConfigFields, ModelConfigError
from cleave.perf.model.unread_fields import is_size_like

WRITTEN = Path(config_classes.__file__).with_name("class_defaults.json")

_REMOTE = {
    "aquila": ["AquilaModel", "AquilaForCausalLM"],
    "baichuan": ["BaichuanForCausalLM", "BaiChuanForCausalLM"],
    "bailing_moe": ["BailingMoeForCausalLM"],
    "chatglm": ["ChatGLMModel", "ChatGLMForConditionalGeneration"],
    "codegen": ["CodeGenForCausalLM"],
    "deepseek": ["DeepseekForCausalLM"],
    "exaone": ["ExaoneForCausalLM"],
    "gpt_neo": ["GPTNeoForCausalLM"],
    "internlm": ["InternLMForCausalLM"],
    "internlm2": ["InternLM2ForCausalLM"],
    "internlm3": ["InternLM3ForCausalLM"],
    "iquestcoder": ["IQuestCoderForCausalLM"],
    "kimi_k2": ["DeepseekV3ForCausalLM"],
    "mimo": ["MiMoForCausalLM"],
    "mpt": ["MPTForCausalLM", "MptForCausalLM"],
    "orion": ["OrionForCausalLM"],
    "phimoe": ["PhiMoEForCausalLM"],
    "qwen": ["QWenLMHeadModel"],
    "solar": ["SolarForCausalLM"],
    "step1": ["Step1ForCausalLM"],
    "telechat3": ["TeleChat3ForCausalLM"],
    "xverse": ["XverseForCausalLM"],
}
"""Architectures of model types whose class is code of their repositories, or has left vLLM."""
_ALWAYS = {"hidden_act", "max_position_embeddings", "tie_word_embeddings", "qk_rope_head_dim"}


def collect() -> dict[str, Any]:
    """The facts by model type."""
    architectures = {**map_architectures(), **_REMOTE}
    found: dict[str, Any] = {}
    for name in sorted({*FAMILIES, *OUTER_TYPES}):
        own: dict[str, Any] = {}
        if (cls := find_class(name)) is not None:
            own = _describe_family(name, cls) if name in FAMILIES else _describe_outer(cls)
        if names := architectures.get(name):
            own["architectures"] = names
        if own:
            found[name] = own
    return found


def find_class(model_type: str) -> Any | None:
    """The class that vLLM or transformers has for a model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    if model_type in _CONFIG_REGISTRY:
        return _CONFIG_REGISTRY[model_type]
    try:
        # It loads classes by item only.
        return CONFIG_MAPPING[model_type]
    except KeyError:
        return None


def iter_defaults(cls: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a class with the values that they have without a file."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls.__dict__["__init__"]))).body
    except (KeyError, OSError, TypeError):
        for field in dataclasses.fields(cls):
            if field.default is not dataclasses.MISSING:
                yield field.name, field.default
            elif field.default_factory is not dataclasses.MISSING:
                yield field.name, field.default_factory()
        return
    # Decorators hide the signature of such a constructor.
    arguments = tree.args  # type: ignore[attr-defined]
    named = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    for argument, default in zip(named, arguments.defaults, strict=True):
        with suppress(ValueError):
            yield argument.arg, ast.literal_eval(default)


def _describe_family(name: str, cls: Any) -> dict[str, Any]:
    every = {
        field: value
        for field, value in iter_defaults(cls)
        if value is not None and isinstance(value, bool | int | float | str | list | dict)
    }
    recorder = _Recorder(every)
    try:
        model_shape.build_shape(
            "", ConfigFields({"model_type": name}, "", recorder, _both_ways(cls))
        )
    except ModelConfigError as error:
        print(f"{name}: {error}")
    recorder.names |= _ALWAYS
    kept = {
        field: value
        for field, value in every.items()
        if field in recorder.names or is_size_like(field)
    }
    names = {each: other for each, other in _get_names(cls).items() if _is_of_sizes(each, other)}
    return {"defaults": kept} | ({"names": names} if names else {})


class _Recorder(dict[str, Any]):
    """Defaults that note which of them were looked at."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def _get_names(cls: Any) -> dict[str, str]:
    return dict(getattr(cls, "attribute_map", None) or {})


def _both_ways(cls: Any) -> dict[str, str]:
    names = _get_names(cls)
    return {**names, **{stored: name for name, stored in names.items()}}


def _is_of_sizes(*names: str) -> bool:
    return any(map(is_size_like, names)) or "max_position_embeddings" in names


def _describe_outer(cls: Any) -> dict[str, Any]:
    """The part that holds the language model, and its type by default."""
    try:
        own: Any = cls()
        text: Any = own.get_text_config()
    except Exception as error:  # noqa: BLE001 - any class may be built in any way
        print(f"{cls.__name__}: {error}"[:200])
        return {}
    for name in ("text_config", "llm_config", "language_config"):
        if getattr(own, name, None) is text and text is not own:
            return {"part": [name, text.model_type]}
    return {}


def map_architectures() -> dict[str, list[str]]:
    """The architectures that vLLM registers, by the model types that transformers has for them."""
    from transformers.models.auto import modeling_auto
    from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS, ModelRegistry

    registered = ModelRegistry.get_supported_archs() - set(_SPECULATIVE_DECODING_MODELS)
    found: dict[str, set[str]] = {}
    for mapping in dir(modeling_auto):
        if mapping.endswith("_MAPPING_NAMES"):
            for name, classes in getattr(modeling_auto, mapping).items():
                listed = classes if isinstance(classes, tuple | list) else (classes,)
                found.setdefault(name, set()).update(set(listed) & registered)
    return {name: sorted(each) for name, each in found.items() if each}


def build_text() -> str:
    """The file's content."""
    lines = (
        f"{json.dumps(name)}: {json.dumps(facts, sort_keys=True)}"
        for name, facts in sorted(collect().items())
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    WRITTEN.write_text(build_text())
