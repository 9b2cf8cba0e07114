"""Reads LLMDeployments and cluster files from YAML. Called by the command line and by tests.

What is hard: a user reads the faults, not a stack trace, so every fault of a file is found in one
pass and said in one line with the path of its field.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from cleave.api.cluster import Cluster
from cleave.api.deployment import KIND, LLMDeployment
from cleave.api.faults import fault_lines, shown
from cleave.api.resource import API_VERSION

_M = TypeVar("_M", bound=BaseModel)


class ManifestError(ValueError):
    """The manifest is not usable."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)
        """One line each: `path: what is wrong`."""


def load(source: str | Path) -> LLMDeployment:
    """The one LLMDeployment that YAML text (str) or a file (Path) holds.

    Raises ManifestError when there is none, more than one, or when it is faulty.
    """
    found = load_all(source)
    if len(found) > 1:
        names = ", ".join(deployment.name for deployment in found)
        raise ManifestError([f"holds {len(found)} LLMDeployments ({names}); one is wanted"])
    return found[0]


def load_all(source: str | Path) -> list[LLMDeployment]:
    """All LLMDeployments of YAML documents and of `kind: List` items, at least one.

    Raises ManifestError with every fault of every document.
    """
    documents = list(_items(_documents(source)))
    if not documents:
        raise ManifestError([f"{_label(source)} holds no {KIND}"])
    found: list[LLMDeployment] = []
    faults: list[str] = []
    for document in documents:
        try:
            found.append(validate(document))
        except ManifestError as error:
            prefix = f"{_name(document)}: " if len(documents) > 1 else ""
            faults.extend(prefix + fault for fault in error.faults)
    if faults:
        raise ManifestError(faults)
    return found


def validate(document: object) -> LLMDeployment:
    """An LLMDeployment from decoded YAML or JSON. Raises ManifestError with every fault."""
    if not isinstance(document, Mapping):
        raise ManifestError([f"must be an object with kind: {KIND} (got {shown(document)})"])
    if faults := list(_identity_faults(document)):
        raise ManifestError(faults)
    return _as(LLMDeployment, document)


def load_cluster(source: str | Path) -> Cluster:
    """The cluster that YAML text (str) or a file (Path) describes.

    Its profiles are made absolute, from the file's folder (text: the working directory). Raises
    ManifestError with every fault. GPU names are looked up later, by cleave.perf.inventory.
    """
    documents = _documents(source)
    if not documents:
        raise ManifestError([f"{_label(source)} is empty; state nodes: [{{count: 1, gpu: ...}}]"])
    if len(documents) != 1:
        raise ManifestError(
            [f"{_label(source)} holds {len(documents)} YAML documents; one cluster is wanted"]
        )
    (document,) = documents
    if not isinstance(document, Mapping):
        raise ManifestError([f"must be an object with nodes (got {shown(document)})"])
    cluster = _as(Cluster, document)
    folder = source.absolute().parent if isinstance(source, Path) else Path.cwd()
    return cluster.model_copy(update={"profiles": [str(folder / p) for p in cluster.profiles]})


def _as(model: type[_M], document: Mapping[Any, Any]) -> _M:
    try:
        # By way of JSON: what YAML adds (dates, tuples as keys, cycles) is no part of a resource.
        text = json.dumps(document, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        reason = f"cannot be written as JSON: {error}"
        if "Circular" in reason:
            reason = "an anchor (&) holds an alias (*) of itself; write the values out"
        raise ManifestError([reason]) from error
    try:
        return model.model_validate_json(text, by_alias=True, by_name=False)
    except ValidationError as error:
        raise ManifestError(fault_lines(error, model)) from error


def _documents(source: str | Path) -> list[object]:
    try:
        text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ManifestError([f"{source}: {reason}"]) from error
    try:
        return [d for d in yaml.load_all(text, _Loader) if d is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{_label(source)}:{mark.line + 1}" if mark else _label(source)
        raise ManifestError([f"{place}: {error.problem or error.context}"]) from error
    except yaml.YAMLError as error:
        raise ManifestError([f"{_label(source)}: {str(error).splitlines()[0]}"]) from error
    except RecursionError as error:
        raise ManifestError([f"{_label(source)}: is nested too deeply"]) from error
    except ValueError as error:
        # Dates that do not exist, numbers without end: YAML's own types do not check these.
        raise ManifestError([f"{_label(source)}: {error}"]) from error


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key that is written twice is an error, not the last one's win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key != "<<" and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _items(documents: Sequence[object]) -> Iterator[object]:
    for document in documents:
        if isinstance(document, Mapping) and document.get("kind") == "List":
            yield from document.get("items") or ()
        else:
            yield document


def _identity_faults(document: Mapping[Any, Any]) -> Iterator[str]:
    for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if field not in document:
            yield f"{field}: required; write {field}: {wanted}"
        elif document[field] != wanted:
            yield f"{field}: must be {wanted} (got {shown(document[field])})"


def _name(document: object) -> str:
    metadata = document.get("metadata") if isinstance(document, Mapping) else None
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return str(name) if name else "unnamed"


def _label(source: str | Path) -> str:
    return str(source) if isinstance(source, Path) else "manifest"
