"""Generates the CustomResourceDefinitions: `python -m cleave.api.crd OUTDIR` (scripts/generate).

The resource types are the only source; the files in crds/ are never edited by hand.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool
from cleave.api.resource import GROUP, VERSION
from cleave.api.schema import Schema, build_structural_schema

_HEADER = "# Generated from operator/cleave/api by scripts/generate; changes here are lost.\n"

_READY = '.status.conditions[?(@.type=="Ready")]'
_AVAILABLE = '.status.conditions[?(@.type=="Available")]'


def _build_column(
    name: str, kind: str, path: str, description: str, *, wide: bool = False
) -> Schema:
    column = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return {**column, "priority": 1} if wide else column


def _get_ready_path(role: str) -> str:
    return f'.status.roles[?(@.role=="{role}")].ready'


_AGE = _build_column("Age", "date", ".metadata.creationTimestamp", "Time since creation.")

_DEPLOYMENT_COLUMNS = [
    _build_column("Model", "string", ".status.model", "Model name that clients request."),
    _build_column(
        "Ready",
        "string",
        f"{_READY}.status",
        "Whether the spec is rolled out and requests are served.",
    ),
    _build_column("Reason", "string", f"{_READY}.reason", "Why it is ready or not."),
    _build_column("P", "integer", _get_ready_path("prefill"), "Ready prefill instances."),
    _build_column("D", "integer", _get_ready_path("decode"), "Ready decode instances."),
    _build_column("Mixed", "integer", _get_ready_path("mixed"), "Ready mixed instances."),
    _build_column("GPUs", "integer", ".status.plan.gpus", "GPUs of all instances."),
    _AGE,
    _build_column(
        "Available",
        "string",
        f"{_AVAILABLE}.status",
        "Whether requests are served, including during a rollout.",
        wide=True,
    ),
    _build_column("Plan", "string", ".status.plan.verdict", "The planner's verdict.", wide=True),
    _build_column(
        "Goodput",
        "number",
        ".status.plan.predicted.goodput",
        "Predicted requests per second within the latency targets.",
        wide=True,
    ),
    _build_column(
        "Rate", "number", ".status.observed.rate", "Observed requests per second.", wide=True
    ),
    _build_column(
        "Drifted",
        "string",
        '.status.conditions[?(@.type=="PlanDrifted")].status',
        "Whether traffic differs from the planned traffic.",
        wide=True,
    ),
    _build_column("URL", "string", ".status.url", "Base URL for clients.", wide=True),
    _build_column(
        "Revision", "string", ".status.plan.revision", "Hash of engine and model.", wide=True
    ),
]

_POOL_COLUMNS = [
    _build_column("Role", "string", ".spec.role", "Role of its instances."),
    _build_column("TP", "integer", ".spec.parallelism.tensor", "Tensor parallel size."),
    _build_column("PP", "integer", ".spec.parallelism.pipeline", "Pipeline parallel size."),
    _build_column("GPU", "string", ".spec.gpu", "Kind of GPU."),
    _build_column("Desired", "integer", ".spec.replicas", "Desired instances."),
    _build_column("Ready", "integer", ".status.ready", "Instances that are ready."),
    _build_column("Serving", "integer", ".status.serving", "Instances that receive requests."),
    _AGE,
    _build_column(
        "Updated", "integer", ".status.updated", "Instances of the present spec.", wide=True
    ),
    _build_column("Owner", "string", ".spec.owner", "Who sets the number of instances.", wide=True),
    _build_column("Reason", "string", f"{_READY}.reason", "Why it is ready or not.", wide=True),
    _build_column("Revision", "string", ".spec.revision", "Hash of engine and model.", wide=True),
]

_SCALE = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.selector",
}


def build_deployment_crd() -> Schema:
    """Return the CRD of LLMDeployment."""
    return _build_definition(LLMDeployment, "llmd", _DEPLOYMENT_COLUMNS, {"status": {}})


def build_pool_crd() -> Schema:
    """Return the CRD of InstancePool."""
    return _build_definition(InstancePool, "ipool", _POOL_COLUMNS, {"status": {}, "scale": _SCALE})


def write(folder: Path) -> None:
    """Write both CRDs into a folder, one file each, named like the CRD."""
    for definition in (build_deployment_crd(), build_pool_crd()):
        text = yaml.dump(definition, Dumper=_Dumper, sort_keys=False, width=100)
        (folder / f"{definition['metadata']['name']}.yaml").write_text(_HEADER + text)


def main(argv: Sequence[str]) -> int:
    """Write the CRDs into the folder argv[0]; return 2 when the usage is wrong."""
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        print("usage: python -m cleave.api.crd OUTDIR", file=sys.stderr)  # noqa: T201
        return 2
    write(Path(argv[0]))
    return 0


def _build_definition(
    model: type[BaseModel], short_name: str, columns: list[Schema], subresources: Schema
) -> Schema:
    kind = model.__name__
    plural = f"{kind.lower()}s"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short_name],
                "categories": ["cleave"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _finish_root(build_structural_schema(model))},
                    "subresources": subresources,
                    "additionalPrinterColumns": columns,
                }
            ],
        },
    }


def _finish_root(schema: Schema) -> Schema:
    """Complete the schema of a whole object; the API server adds version, kind and metadata."""
    properties = schema["properties"]
    for field in ("apiVersion", "kind"):
        properties[field] = {"type": "string"}
    properties["metadata"] = {"type": "object"}
    # Tools such as kstatus treat an object without a status as ready; generations begin at 1.
    properties["status"]["default"] = {"observedGeneration": 0}
    return {**schema, "required": ["spec"]}


class _Dumper(yaml.SafeDumper):
    """Writes shared values in full, as YAML anchors are hard to read and to compare."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401, ARG002
        return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
