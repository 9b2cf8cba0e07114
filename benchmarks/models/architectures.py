"""Every architecture that vLLM registers: sized as vLLM allocates it, or refused with a sentence.

    .venv/bin/python benchmarks/models/architectures.py [TYPE ...]

For each model type that plans know, vLLM's class is built on the meta device (run.py) for a config
with nothing but its class's defaults and what types.yaml adds, and Cleave sizes the same config. An
architecture of any other type has to be refused. Writes architectures.yaml and the table of
README.md, with TYPE only what these model types have. Called by tests/benchmarks/models as well.
"""

import sys
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

import class_defaults
import run
import yaml

from cleave.perf.model import config_classes, model_shape
from cleave.perf.model.family_table import FAMILIES, OUTER_TYPES

TYPES = run.FOLDER / "types.yaml"
RECORDED = run.FOLDER / "architectures.yaml"
TABLE = "table of architectures"
_GENERATORS = ("ForCausalLM", "LMHeadModel", "ChatGLMModel")
_NOT_COMPARED = "not compared"
_MOST_SHOWN = 160
MOST_DIFFERENCE = 0.006
"""Of weights: Cleave counts no norms and biases."""


@cache
def read_types() -> Mapping[str, Mapping[str, Any]]:
    """What types.yaml adds, by model type."""
    types: dict[str, dict[str, Any]] = yaml.safe_load(TYPES.read_text())
    return types


def build_config(model_type: str) -> dict[str, Any] | None:
    """A config of a model type that plans know; None: vLLM registers no class for it alone."""
    more = read_types().get(model_type, {})
    known = config_classes.find_class(model_type).architectures
    own = more.get("architecture") or next(
        (each for each in known if each.endswith(_GENERATORS)), None
    )
    if own is None:
        return None
    named = {"architectures": [own], "model_type": model_type, "torch_dtype": "bfloat16"}
    return {**named, **more.get("fields", {})}


def compute(config: Mapping[str, Any]) -> run.Allocation | str:
    """What Cleave computes for a config, or why it refuses it."""
    try:
        return run.compute_allocation(model_shape.from_config("m", config))
    except model_shape.UnknownModelError as error:
        return str(error).removeprefix("m: ")


def describe_difference(ours: run.Allocation, theirs: run.Allocation) -> str:
    """In what they differ; empty: they are equal."""
    caches = ("kv_bytes_per_token", "window_bytes_per_token", "window_tokens", "state_bytes")
    texts = [
        f"{name} {getattr(ours, name):,} instead of {getattr(theirs, name):,}"
        for name in caches
        if getattr(ours, name) != getattr(theirs, name)
    ]
    if abs(ours.weight_bytes / theirs.weight_bytes - 1) > MOST_DIFFERENCE:
        texts.append(f"weight_bytes {ours.weight_bytes:,} instead of {theirs.weight_bytes:,}")
    return "; ".join(texts)


def read_recorded() -> tuple[dict[str, list[str]], dict[str, run.Allocation | str]]:
    """(model types of each registered architecture, what vLLM allocates for each model type, or why
    it was not built)."""
    recorded = yaml.safe_load(RECORDED.read_text())
    measured = {
        name: each if isinstance(each, str) else run.Allocation(**each)
        for name, each in recorded["model_types"].items()
    }
    return recorded["registered"], measured


def measure(registered: Collection[str], types: Collection[str]) -> dict[str, run.Allocation | str]:
    """What vLLM allocates, by model type, or why it cannot be built on this machine."""
    found: dict[str, run.Allocation | str] = {}
    with run.run_vllm():
        for name in types:
            config = build_config(name)
            if config is None or config["architectures"][0] not in registered:
                continue
            try:
                found[name] = measure_type(name, config)
            except Exception as error:  # noqa: BLE001 - any class may fail in any way
                found[name] = " ".join(f"{type(error).__name__}: {error}".split())[:_MOST_SHOWN]
            ours = compute(config)
            theirs = found[name]
            same = isinstance(ours, run.Allocation) and isinstance(theirs, run.Allocation)
            print(name, describe_difference(ours, theirs) if same else (ours, theirs), flush=True)
    return found


def measure_type(model_type: str, config: Mapping[str, Any]) -> run.Allocation:
    """What vLLM allocates for a config of a type, within `run.run_vllm`."""
    names = read_types().get(model_type, {}).get("names")
    if names is not None:
        _register(model_type, names)
    return run.measure(config)


def _register(model_type: str, names: Mapping[str, str]) -> None:
    """A class for a type whose own one is code of its repository."""
    from transformers import AutoConfig, PretrainedConfig

    fields = {"model_type": model_type, "attribute_map": dict(names)}
    AutoConfig.register(model_type, type("Config", (PretrainedConfig,), fields), exist_ok=True)


def list_registered() -> dict[str, list[str]]:
    """The architectures that vLLM registers, without those that only draft, with the model types
    that transformers has for them."""
    from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS, ModelRegistry

    found: dict[str, list[str]] = {
        name: []
        for name in sorted(ModelRegistry.get_supported_archs())
        if name not in _SPECULATIVE_DECODING_MODELS
    }
    for model_type, names in class_defaults.map_architectures().items():
        for name in names:
            found[name].append(model_type)
    return {name: sorted(types) for name, types in found.items()}


def judge(
    registered: Mapping[str, list[str]], measured: Mapping[str, run.Allocation | str]
) -> dict[str, str]:
    """What Cleave does about each registered architecture, in few words."""
    by_architecture = {
        config["architectures"][0]: name
        for name in measured
        if (config := build_config(name)) is not None
    }
    return {
        name: _judge_one(name, by_architecture.get(name), types, measured)
        for name, types in registered.items()
    }


def _judge_one(
    name: str,
    known_type: str | None,
    types: list[str],
    measured: Mapping[str, run.Allocation | str],
) -> str:
    if known_type is not None and (config := build_config(known_type)) is not None:
        ours, theirs = compute(config), measured[known_type]
        if isinstance(ours, str):
            return f"refused: {ours}"
        if isinstance(theirs, str):
            return f"{_NOT_COMPARED}: {theirs}"
        return describe_difference(ours, theirs) or "equal"
    answers = [compute({"architectures": [name], "model_type": each}) for each in types or ["?"]]
    if any(each in OUTER_TYPES for each in types):
        return "its language model is of a known type"
    if all(isinstance(each, str) for each in answers):
        return f"refused: {answers[0]}"
    known = {*types} & measured.keys()
    return "as another architecture of its type" if known else "sized, and not compared"


def build_table(
    registered: Mapping[str, list[str]], measured: Mapping[str, run.Allocation | str]
) -> str:
    """The table for readers, in Markdown."""
    judged = judge(registered, measured)
    counts = Counter(_shorten(each) for each in judged.values())
    rows = ["| registered architectures | number |", "|---|---|"]
    rows += [f"| {name} | {number} |" for name, number in counts.most_common()]
    rows += [f"| together | {len(judged)} |", ""]
    rows += [
        (
            "| model type | weights GiB | vLLM | difference | KV bytes per token | vLLM "
            "| of these in a window | bytes of states | vLLM |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows += [_build_row(name, theirs) for name, theirs in measured.items()]
    return "\n".join(rows) + "\n"


def _shorten(judgement: str) -> str:
    if judgement.startswith("refused"):
        is_other = "generates no tokens" in judgement
        return "refused: generate no tokens" if is_other else "refused by name of type or field"
    if judgement.startswith(_NOT_COMPARED):
        return "sized, and not built by vLLM on this machine"
    if judgement == "equal":
        return "sized as vLLM allocates"
    is_known = judgement.startswith(("as another", "its language model"))
    return judgement if is_known else "sized otherwise"


def _build_row(name: str, theirs: run.Allocation | str) -> str:
    config = build_config(name)
    ours = compute(config or {})
    if isinstance(ours, str) or isinstance(theirs, str):
        return f"| {name} | {ours if isinstance(ours, str) else _NOT_COMPARED} |||||||||"
    cells = [
        name,
        f"{ours.weight_bytes / run.GIB:,.2f}",
        f"{theirs.weight_bytes / run.GIB:,.2f}",
        f"{ours.weight_bytes / theirs.weight_bytes - 1:+.3%}",
        f"{ours.kv_bytes_per_token:,}",
        f"{theirs.kv_bytes_per_token:,}",
        f"{ours.window_bytes_per_token:,}" if ours.window_tokens else "",
        f"{ours.state_bytes:,}" if ours.state_bytes else "",
        f"{theirs.state_bytes:,}" if theirs.state_bytes else "",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure all model types and write what was found."""
    registered = list_registered()
    types = sys.argv[1:]
    measured = {**(read_recorded()[1] if types else {}), **measure(registered, types or FAMILIES)}
    text = yaml.safe_dump(
        {
            "registered": registered,
            "model_types": {
                name: each if isinstance(each, str) else asdict(each)
                for name, each in measured.items()
            },
        },
        sort_keys=False,
    )
    head = (
        "# Written by benchmarks/models/architectures.py: what vLLM 0.32 registers and allocates.\n"
    )
    RECORDED.write_text(head + text)
    run.write_table(TABLE, build_table(registered, measured))


if __name__ == "__main__":
    main()
