"""Lists what an engine loads that decides what its KV means, by its command line. Pure.

Besides the model that are a tokenizer or chat template of its own, the model that speculates, and
the LoRA adapters of the command line. What is part of the arguments themselves belongs to the
deployment's revision.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cleave_worker.agent.weights.engine_arguments import get_option, get_values

MODEL = "--model"
_REVISION = "--revision"
_TOKENIZER, _TOKENIZER_REVISION = "--tokenizer", "--tokenizer-revision"
_CONFIG_PATH = "--hf-config-path"
_SPECULATIVE = "--speculative-config"
_FOLDERS = ("--model-weights", "--spec-model", f"{_SPECULATIVE}.model", _CONFIG_PATH)
_FILES = ("--chat-template", "--mm-encoder-fp8-scale-path", "--config")
_LORA_MODULES, _MEDIA_LORAS = "--lora-modules", "--default-mm-loras"


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Files that an engine loads."""

    use: str
    """What for: an option, and for an adapter its name."""
    name: str
    """A folder, a file, a repository, or something else that the engine knows."""
    revision: str = ""
    """Of a repository; empty: its main branch."""
    pin: str = ""
    """Option with which the engine loads a certain commit of the repository; empty: none."""
    is_file: bool = False
    """Whether it counts only if there is such a file: the value may be the content itself."""


def list_sources(model: str, arguments: Sequence[str]) -> list[WeightSource]:
    """Return what an engine with this model and these further arguments loads."""
    model = get_option(arguments, MODEL) or model
    revision = get_option(arguments, _REVISION) or ""
    config_path = get_option(arguments, _CONFIG_PATH)
    # vLLM looks for the commit in the repository of the config as well.
    pin = "" if config_path not in (None, model) else _REVISION
    sources = [WeightSource(MODEL, model, revision, pin)]
    if tokenizer := get_option(arguments, _TOKENIZER):
        its_revision = get_option(arguments, _TOKENIZER_REVISION) or ""
        sources.append(WeightSource(_TOKENIZER, tokenizer, its_revision, _TOKENIZER_REVISION))
    for option in _FOLDERS:
        if (name := get_option(arguments, option)) and name != model:
            sources.append(WeightSource(option, name))
    sources += _list_speculative(get_option(arguments, _SPECULATIVE))
    for option in _FILES:
        if name := get_option(arguments, option):
            sources.append(WeightSource(option, name, is_file=True))
    return [*sources, *_list_adapters(arguments)]


def _list_speculative(text: str | None) -> Iterator[WeightSource]:
    settings = _decode(text)
    model = str(settings.get("model") or "")
    # Methods without a model are named there as well, such as ngram.
    if "/" in model:
        yield WeightSource(_SPECULATIVE, model, str(settings.get("revision") or ""))


def _list_adapters(arguments: Sequence[str]) -> Iterator[WeightSource]:
    for text in get_values(arguments, _LORA_MODULES):
        # As `name=path` or as JSON.
        name, _, path = text.partition("=")
        if text.startswith("{"):
            fields = _decode(text)
            name, path = str(fields.get("name", "")), str(fields.get("path", ""))
        if path:
            yield WeightSource(f"{_LORA_MODULES} {name}", path)
    for kind, value in _decode(get_option(arguments, _MEDIA_LORAS)).items():
        yield WeightSource(f"{_MEDIA_LORAS} {kind}", str(value))


def _decode(text: str | None) -> dict[str, object]:
    """The object that a JSON text holds; empty: the engine refuses it, or it is not given."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
