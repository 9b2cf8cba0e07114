"""Reads LLMDeployments and cluster files from YAML. Called by the command line and by tests.

What is hard: users read faults instead of a stack trace, so all faults of a file are collected,
each in one line with the path of its field.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from cleave.api.cluster import Cluster
from cleave.api.deployment import KIND, LLMDeployment
from cleave.api.faults import format_faults, format_value
from cleave.api.resource import API_VERSION, GROUP

_MAX_VALUES = 100_000
"""Above, a few aliases of aliases would take memory and minutes."""
_M = TypeVar("_M", bound=BaseModel)


class ManifestError(ValueError):
    """The manifest cannot be used."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)
        """One line each: `path: what is wrong`."""


def load(source: str | Path) -> LLMDeployment:
    """Load the only LLMDeployment in YAML text (str) or a file (Path). Raises ManifestError."""
    deployments = load_all(source)
    if len(deployments) > 1:
        names = ", ".join(deployment.name for deployment in deployments)
        raise ManifestError([f"holds {len(deployments)} LLMDeployments ({names}); one is expected"])
    return deployments[0]


def load_all(source: str | Path, *, skip_others: bool = False) -> list[LLMDeployment]:
    """Load the LLMDeployments of all documents and lists. Raises ManifestError with all faults.

    `skip_others`: objects of other APIs, and documents that are no objects, are no faults.
    """
    documents = list(_expand_lists(_read_documents(source)))
    if skip_others:
        documents = [each for each in documents if _is_meant_as_deployment(each)]
    elif not documents:
        raise ManifestError([f"{_format_source(source)} holds no {KIND}"])
    deployments: list[LLMDeployment] = []
    faults: list[str] = []
    for document in documents:
        try:
            deployments.append(validate(document))
        except ManifestError as error:
            prefix = f"{_get_name(document)}: " if len(documents) > 1 else ""
            faults.extend(prefix + fault for fault in error.faults)
    if faults:
        raise ManifestError(faults)
    return deployments


def validate(document: object) -> LLMDeployment:
    """Parse an LLMDeployment from decoded YAML or JSON. Raises ManifestError with all faults."""
    if not isinstance(document, Mapping):
        raise ManifestError([f"must be an object with kind: {KIND} (got {format_value(document)})"])
    if faults := list(_list_identity_faults(document)):
        raise ManifestError(faults)
    return _parse(LLMDeployment, document)


def load_cluster(source: str | Path) -> Cluster:
    """Load the cluster from YAML text (str) or a file (Path).

    Its profile paths are made absolute, from the file's folder (text: the working directory).
    Raises ManifestError with all faults. GPU names are checked later, by
    cleave.perf.hardware.inventory.
    """
    name, documents = _format_source(source), _read_documents(source)
    if not documents:
        raise ManifestError([f"{name} is empty; state nodes: [{{count: 1, gpu: ...}}]"])
    if len(documents) != 1:
        count = len(documents)
        raise ManifestError([f"{name} holds {count} YAML documents; one cluster is expected"])
    (document,) = documents
    if not isinstance(document, Mapping):
        raise ManifestError([f"must be an object with nodes (got {format_value(document)})"])
    cluster = _parse(Cluster, document)
    folder = source.absolute().parent if isinstance(source, Path) else Path.cwd()
    return cluster.model_copy(update={"profiles": [str(folder / p) for p in cluster.profiles]})


def _parse(model: type[_M], document: Mapping[Any, Any]) -> _M:
    try:
        # Through JSON: YAML's dates, tuples as keys and cycles are not part of a resource.
        text = json.dumps(document, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        reason = f"cannot be written as JSON: {error}"
        if "Circular" in reason:
            reason = "an anchor (&) holds an alias (*) of itself; write the values out"
        raise ManifestError([reason]) from error
    try:
        return model.model_validate_json(text, by_alias=True, by_name=False)
    except ValidationError as error:
        raise ManifestError(format_faults(error, model)) from error


def _read_documents(source: str | Path) -> list[object]:
    name = _format_source(source)
    try:
        text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
    except IsADirectoryError as error:
        raise ManifestError([f"{source}: is a folder; name one file of it"]) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ManifestError([f"{source}: {reason}"]) from error
    try:
        documents = [d for d in yaml.load_all(text, _Loader) if d is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f"{name}:{mark.line + 1}" if mark else name
        hint = (
            "; is this a template? render it first, as helm template does" if "{{" in text else ""
        )
        raise ManifestError([f"{location}: {error.problem or error.context}{hint}"]) from error
    except yaml.YAMLError as error:
        raise ManifestError([f"{name}: {str(error).splitlines()[0]}"]) from error
    except RecursionError as error:
        raise ManifestError([f"{name}: is nested too deeply"]) from error
    except ValueError as error:
        # YAML's own types raise this for impossible dates and endless numbers.
        raise ManifestError([f"{name}: {error}"]) from error
    if _count_values(documents, {}) > _MAX_VALUES:
        why = f"holds more than {_MAX_VALUES:,} values once aliases (*) are written out"
        raise ManifestError([f"{name}: {why}; use fewer aliases"])
    return documents


def _count_values(document: object, counts: dict[int, int]) -> int:
    """Values of the document once aliases are written out. `counts`: of objects met so far, by id;
    an object that holds itself counts as one there, and is refused later."""
    if not isinstance(document, Mapping | list):
        return 1
    if id(document) not in counts:
        counts[id(document)] = 1
        children = document.values() if isinstance(document, Mapping) else document
        counts[id(document)] = 1 + sum(_count_values(each, counts) for each in children)
    return counts[id(document)]


class _Loader(yaml.SafeLoader):
    """Safe YAML loader that rejects duplicate keys, where the last one would win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[object] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key != "<<" and key in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is written twice", key_node.start_mark
                )
            keys.add(key)
        return super().construct_mapping(node, deep)


def _expand_lists(documents: Sequence[object]) -> Iterator[object]:
    for document in documents:
        if isinstance(document, Mapping) and document.get("kind") == "List":
            yield from document.get("items") or ()
        else:
            yield document


def _is_meant_as_deployment(document: object) -> bool:
    """Whether version or kind is of this API; the other one may be misspelled."""
    if not isinstance(document, Mapping):
        return False
    version, kind = document.get("apiVersion"), document.get("kind")
    return str(version).startswith(f"{GROUP}/") or kind == KIND


def _list_identity_faults(document: Mapping[Any, Any]) -> Iterator[str]:
    for field, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        if field not in document:
            yield f"{field}: required; write {field}: {expected}"
        elif document[field] != expected:
            yield f"{field}: must be {expected} (got {format_value(document[field])})"


def _get_name(document: object) -> str:
    metadata = document.get("metadata") if isinstance(document, Mapping) else None
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return str(name) if name else "unnamed"


def _format_source(source: str | Path) -> str:
    return str(source) if isinstance(source, Path) else "manifest"
