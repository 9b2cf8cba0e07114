"""Generates the CustomResourceDefinitions: `python -m cleave.api.crd OUTDIR` (scripts/generate).

The resource types are the only source; the files in crds/ are never edited by hand. What is hard:
CRDs take structural schemas, a form of JSON Schema, and the API server rejects much of what
pydantic generates: references, titles, null types, closed objects, and bounds in the newer form.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool
from cleave.api.resource import GROUP, VERSION

Schema = dict[str, Any]
_Column = tuple[str, str, str, str]

_HEADER = "# Generated from operator/cleave/api by scripts/generate; changes here are lost.\n"

_READY = '.status.conditions[?(@.type=="Ready")]'
_IS_READY = f"{_READY}.status"
_CONDITION = '.status.conditions[?(@.type=="{}")].status'
_ATTAINED = ".status.observed.attainment"
_GOODPUT = ".status.plan.predicted.goodput"
_ROLE = '.status.roles[?(@.role=="{}")].ready'

_AGE = ("Age", "date", ".metadata.creationTimestamp", "Time since creation.")
_DEPLOYMENT_COLUMNS = (
    ("Model", "string", ".status.model", "Model name that clients request."),
    ("Ready", "string", _IS_READY, "Whether the spec is rolled out and requests are served."),
    ("Reason", "string", f"{_READY}.reason", "Why it is ready or not."),
    ("SLO", "string", _CONDITION.format("SLOAttained"), "Whether recent requests met the targets."),
    ("P", "integer", _ROLE.format("prefill"), "Ready prefill instances."),
    ("D", "integer", _ROLE.format("decode"), "Ready decode instances."),
    ("Mixed", "integer", _ROLE.format("mixed"), "Ready mixed instances."),
    ("GPUs", "integer", ".status.plan.gpus", "GPUs of all instances."),
    _AGE,
)
_WIDE_DEPLOYMENT_COLUMNS = (
    (
        "Available",
        "string",
        _CONDITION.format("Available"),
        "Whether requests are served, including during a rollout.",
    ),
    ("Plan", "string", ".status.plan.verdict", "The planner's verdict."),
    ("Goodput", "number", _GOODPUT, "Predicted requests per second within the latency targets."),
    ("Rate", "number", ".status.observed.rate", "Observed requests per second."),
    ("Attained", "number", _ATTAINED, "Share of recent requests that met both targets."),
    ("Drifted", "string", _CONDITION.format("PlanDrifted"), "Whether the traffic has changed."),
    ("Predicted", "string", _CONDITION.format("PredictionHolds"), "Whether predictions hold."),
    ("Proven", "string", _CONDITION.format("KVPathProven"), "Whether KV moves in every pair."),
    ("URL", "string", ".status.url", "Base URL for clients."),
    ("Revision", "string", ".status.plan.revision", "Hash of engine and model."),
)
_POOL_COLUMNS = (
    ("Role", "string", ".spec.role", "Role of its instances."),
    ("TP", "integer", ".spec.parallelism.tensor", "Tensor parallel size."),
    ("PP", "integer", ".spec.parallelism.pipeline", "Pipeline parallel size."),
    ("GPU", "string", ".spec.gpu", "Kind of GPU."),
    ("Desired", "integer", ".spec.replicas", "Desired instances."),
    ("Ready", "integer", ".status.ready", "Instances that are ready."),
    ("Serving", "integer", ".status.serving", "Instances that receive requests."),
    _AGE,
)
_WIDE_POOL_COLUMNS = (
    ("DP", "integer", ".spec.parallelism.data", "Data parallel size; empty: 1."),
    ("Updated", "integer", ".status.updated", "Instances of the present spec."),
    ("Owner", "string", ".spec.owner", "Who sets the number of instances."),
    ("Reason", "string", f"{_READY}.reason", "Why it is ready or not."),
    ("Revision", "string", ".spec.revision", "Hash of engine and model."),
)
"""Columns of `kubectl get`, as name, type, path and description; the wide ones with `-o wide`."""

_DROPPED_KEYS = ("title", "$defs")

_FIRST_KEYS = ("description", "type", "enum", "default", "format", "pattern")
_LAST_KEYS = ("properties", "items", "additionalProperties", "required")

_GATEWAY_SCALE = {
    "specReplicasPath": ".spec.gateway.replicas",
    "statusReplicasPath": ".status.gateways",
    "labelSelectorPath": ".status.gatewaySelector",
}
"""`kubectl scale llmd` and autoscalers set the number of gateways; plans set that of instances."""
_POOL_SCALE = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.selector",
}


def build_deployment_crd() -> Schema:
    """Return the CRD of LLMDeployment."""
    columns = _build_columns(_DEPLOYMENT_COLUMNS, _WIDE_DEPLOYMENT_COLUMNS)
    subresources = {"status": {}, "scale": _GATEWAY_SCALE}
    return _build_definition(LLMDeployment, "llmd", columns, subresources)


def build_pool_crd() -> Schema:
    """Return the CRD of InstancePool."""
    columns = _build_columns(_POOL_COLUMNS, _WIDE_POOL_COLUMNS)
    return _build_definition(InstancePool, "ipool", columns, {"status": {}, "scale": _POOL_SCALE})


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


def _build_columns(columns: Iterable[_Column], wide_columns: Iterable[_Column]) -> list[Schema]:
    keys = ("name", "type", "jsonPath", "description")
    wide = [{**dict(zip(keys, each, strict=True)), "priority": 1} for each in wide_columns]
    return [*(dict(zip(keys, each, strict=True)) for each in columns), *wide]


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


def build_structural_schema(model: type[BaseModel]) -> Schema:
    """Return the model's structural schema, with field names as in YAML."""
    schema = model.model_json_schema(by_alias=True, mode="validation")
    return _convert(schema, schema.get("$defs", {}))


def _convert(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """Convert one node, and its children by recursion. Resources have no cycles."""
    node = _resolve(schema, definitions)
    node = {key: value for key, value in node.items() if key not in _DROPPED_KEYS}
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if node.get("additionalProperties") is False:
        # Structural schemas are closed: the API server prunes unknown fields.
        del node["additionalProperties"]
    _convert_bound(node, "exclusiveMinimum", "minimum")
    _convert_bound(node, "exclusiveMaximum", "maximum")
    if "description" in node:
        node["description"] = " ".join(node["description"].split())
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            node[key] = _convert(node[key], definitions)
    if properties := node.get("properties"):
        node["properties"] = {
            name: _convert(each, definitions) for name, each in properties.items()
        }
    return _order_keys(_clean_default(node))


def _resolve(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """Replace a reference by its target; keys beside the reference take precedence."""
    if "$ref" in schema:
        target = definitions[schema["$ref"].removeprefix("#/$defs/")]
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        return _resolve({**target, **beside}, definitions)
    options = [o for o in schema.get("anyOf", ()) if o != {"type": "null"}]
    if len(options) == 1:
        # Optional. Without `nullable` the API server drops a null, which means absent here too.
        beside = {key: value for key, value in schema.items() if key != "anyOf"}
        return _resolve({**options[0], **beside}, definitions)
    return dict(schema)


def _convert_bound(node: Schema, exclusive: str, bound: str) -> None:
    value = node.get(exclusive)
    if value is not None and not isinstance(value, bool):
        node[bound], node[exclusive] = value, True


def _clean_default(node: Schema) -> Schema:
    """Remove null defaults; an object's default is empty, as its fields have their own."""
    if node.get("default", ...) is None:
        del node["default"]
    elif isinstance(node.get("default"), dict):
        if any("default" in child for child in node.get("properties", {}).values()):
            node["default"] = {}
        else:
            del node["default"]
    return node


def _order_keys(node: Schema) -> Schema:
    """Order keys for readers: description and type, bounds, parts, Kubernetes' extensions."""

    def rank(key: str) -> tuple[int, int, str]:
        if key in _FIRST_KEYS:
            return 0, _FIRST_KEYS.index(key), key
        if key in _LAST_KEYS:
            return 2, _LAST_KEYS.index(key), key
        return (3 if key.startswith("x-") else 1), 0, key

    return {key: node[key] for key in sorted(node, key=rank)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
