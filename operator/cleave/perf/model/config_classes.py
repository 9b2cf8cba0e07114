"""What the classes of configs say that files leave out: defaults, second names of fields, parts.

Read from class_defaults.json, which benchmarks/models/class_defaults.py writes from the classes of
transformers and the pinned vLLM. Called by cleave.perf.model.config_parts. Standard library only.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, slots=True)
class ConfigClass:
    """The class of a `model_type`."""

    defaults: Mapping[str, object]
    """Of fields that may change a model's size."""
    other_names: Mapping[str, str]
    """A second name of some fields, both ways."""
    architectures: tuple[str, ...] = ()
    """Classes that vLLM registers for it; empty: not known."""
    part: str = ""
    """Field that holds the language model's part; empty: the file itself is one."""
    part_type: str = ""
    """The part's `model_type` unless it says otherwise."""


_UNKNOWN = ConfigClass({}, {})


def find_class(model_type: str) -> ConfigClass:
    """The class of a model type; without defaults and names if it is not known."""
    facts = _read_facts().get(model_type)
    if facts is None:
        return _UNKNOWN
    names = facts.get("names", {})
    return ConfigClass(
        facts.get("defaults", {}),
        {**names, **{stored: name for name, stored in names.items()}},
        tuple(facts.get("architectures", ())),
        *facts.get("part", ("", "")),
    )


@cache
def _read_facts() -> Mapping[str, Mapping[str, dict[str, str]]]:
    text = resources.files(__package__).joinpath("class_defaults.json").read_text("utf-8")
    facts: Mapping[str, Mapping[str, dict[str, str]]] = json.loads(text)
    return facts
