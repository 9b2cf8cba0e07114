"""Invalid resources, and valid but unusual ones, for Python's and the API server's validation.

tests/api validates them in Python; the e2e tests apply the same ones to a real API server.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_FOLDER = Path(__file__).parents[1] / "api"
_SMALLEST = {
    "LLMDeployment": ("chat", {"model": "org/model", "slo": {"ttftMs": 400, "tpotMs": 40}}),
    "InstancePool": (
        "chat-mixed",
        {"deployment": "chat", "role": "mixed", "revision": "r1", "model": "org/model"},
    ),
}


@dataclass(frozen=True)
class Case:
    name: str
    manifest: dict[str, Any]
    faults: tuple[str, ...] = ()
    """Error messages of Python; none: the resource is valid."""
    server: str = ""
    """Part of the API server's error message."""

    @property
    def kind(self) -> str:
        return self.manifest["kind"]


def manifest(kind: str = "LLMDeployment", name: str = "", **spec: object) -> dict[str, Any]:
    """The smallest manifest of a kind, with further spec fields."""
    usual, smallest = _SMALLEST[kind]
    return {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name or usual},
        "spec": {**smallest, **spec},
    }


def said(value: Any) -> Any:
    """`value` without differences of form.

    Python adds empty lists and objects and converts quantities to text; the API server does not.
    """
    if isinstance(value, dict):
        parts = {name: said(part) for name, part in value.items()}
        for amounts in (parts.get("requests"), parts.get("limits")):
            if isinstance(amounts, dict):
                amounts.update({name: str(amount) for name, amount in amounts.items()})
        return {name: part for name, part in parts.items() if part not in ({}, [], None)}
    return [said(part) for part in value] if isinstance(value, list) else value


def _read(file: str) -> list[Case]:
    return [_case(**written) for written in yaml.safe_load((_FOLDER / file).read_text())]


def _case(
    name: str,
    kind: str = "LLMDeployment",
    metadata: dict[str, str] | None = None,
    spec: dict[str, Any] | None = None,
    faults: list[str] | None = None,
    server: str = "",
) -> Case:
    resource = manifest(kind, **(metadata or {}), **(spec or {}))
    server_message = server or (faults[0].split(": ", 1)[-1] if faults else "")
    return Case(name, resource, tuple(faults or ()), server_message)


_ANNOTATIONS_FAULT = (
    "spec.template.annotations: must have at most 261,120 bytes together, keys included: "
    "Kubernetes takes 262,144 bytes, and Cleave adds some"
)
REFUSED = [
    *_read("faults.yaml"),
    _case(
        "annotations that no pod can have",
        spec={"template": {"annotations": {"note": "x" * 262_144}}},
        faults=[_ANNOTATIONS_FAULT],
        # kubectl keeps a copy in an annotation of the resource.
        server="Too long: may not be more than 262144 bytes",
    ),
]
UNUSUAL = _read("unusual.yaml")
