"""Lists what an engine loads that decides what its KV means, by its command line.

Besides the model that are the one that its config names in its place, a tokenizer or chat template
of its own, the model that speculates, and the LoRA adapters of the command line. What is part of
the arguments themselves belongs to the deployment's revision.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cleave_worker.agent.weights.engine_arguments import (
    decode_object,
    get_option,
    get_settings,
    get_values,
)

MODEL = "--model"
_REVISION = "--revision"
_TOKENIZER, _TOKENIZER_REVISION = "--tokenizer", "--tokenizer-revision"
_CONFIG_PATH = "--hf-config-path"
_MODEL_WEIGHTS = "--model-weights"
_SPECULATIVE, _SPECULATIVE_MODEL = "--speculative-config", "--spec-model"
_WITHOUT_MODEL = ("", "ngram", "[ngram]", "ngram_gpu", "suffix", "extract_hidden_states")
"""What speculative methods without a model of their own have in its place."""
_LOAD_FORMAT, _LOADER = "--load-format", "--model-loader-extra-config"
_FORMATS = (
    *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "mistral"),
    *("dummy", "runai_streamer", "runai_streamer_sharded", "sharded_state", "gguf", "bitsandbytes"),
)
"""Load formats that read the files of the model; others read elsewhere, such as from a daemon."""
_VERIFIER = "speculators_config.verifier"
_FILES = ("--chat-template", "--mm-encoder-fp8-scale-path")
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
    sources += _list_verifier(model)
    its_revision = get_option(arguments, _TOKENIZER_REVISION)
    if tokenizer := get_option(arguments, _TOKENIZER) or (model if its_revision else ""):
        sources.append(
            WeightSource(_TOKENIZER, tokenizer, its_revision or revision, _TOKENIZER_REVISION)
        )
    if config_path and config_path != model:
        sources.append(WeightSource(_CONFIG_PATH, config_path, revision))
    if (weights := get_option(arguments, _MODEL_WEIGHTS)) and weights != model:
        sources.append(WeightSource(_MODEL_WEIGHTS, weights))
    load_format = get_option(arguments, _LOAD_FORMAT)
    sources += _list_loader(_LOADER, load_format, get_settings(arguments, _LOADER))
    sources += _list_speculative(arguments)
    for option in _FILES:
        if name := get_option(arguments, option):
            sources.append(WeightSource(option, name, is_file=True))
    return [*sources, *_list_adapters(arguments)]


def _list_verifier(model: str) -> Iterator[WeightSource]:
    """What vLLM loads in the place of a folder in the format of speculators, which then drafts."""
    # The engine reports what it cannot read.
    with contextlib.suppress(OSError, ValueError, RecursionError):
        config = decode_object((Path(model) / "config.json").read_text())
        named = config.get("speculators_config")
        verifier = named.get("verifier") if isinstance(named, Mapping) else None
        name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
        if isinstance(name, str) and name:
            yield WeightSource(_VERIFIER, name)


def _list_loader(
    use: str, load_format: object, settings: Mapping[str, object]
) -> Iterator[WeightSource]:
    """What is read besides the files of the model, or in their place."""
    places = [text for text in _list_texts(settings) if text.startswith("/") or "://" in text]
    yield from (WeightSource(use, place) for place in places)
    if not places and str(load_format or "auto").lower() not in _FORMATS:
        yield WeightSource(use, f"{_LOAD_FORMAT} {load_format}")


def _list_texts(value: object) -> Iterator[str]:
    """All strings within an object of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _list_texts(each)


def _list_speculative(arguments: Sequence[str]) -> Iterator[WeightSource]:
    settings = get_settings(arguments, _SPECULATIVE)
    model = str(get_option(arguments, _SPECULATIVE_MODEL) or settings.get("model") or "")
    if model not in _WITHOUT_MODEL and not _is_class(model):
        yield WeightSource(_SPECULATIVE, model, str(settings.get("revision") or ""))
    loader = settings.get("draft_load_config")
    if isinstance(loader, Mapping):
        extra = {_LOADER: loader.get("model_loader_extra_config")}
        yield from _list_loader(f"{_SPECULATIVE} {_LOADER}", loader.get("load_format"), extra)


def _is_class(name: str) -> bool:
    """Whether vLLM takes it for the class of a method, such as `module.Class`."""
    parts = name.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def _list_adapters(arguments: Sequence[str]) -> Iterator[WeightSource]:
    for text in get_values(arguments, _LORA_MODULES):
        # As `name=path` or as JSON.
        name, _, path = text.partition("=")
        if text.startswith("{"):
            fields = decode_object(text)
            name, path = str(fields.get("name", "")), str(fields.get("path", ""))
        if path:
            yield WeightSource(f"{_LORA_MODULES} {name}", path)
    for kind, value in get_settings(arguments, _MEDIA_LORAS).items():
        yield WeightSource(f"{_MEDIA_LORAS} {kind}", str(value))
