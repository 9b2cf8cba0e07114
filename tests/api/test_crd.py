"""The generated CRDs: what the API server demands of them, and that they say what Python says."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from cleave.api import crd
from cleave.api.base import ApiModel, ValidationRule
from cleave.api.deployment import LLMDeployment
from cleave.api.manifest import load
from cleave.api.pool import InstancePool

from tests.support.resource_cases import REFUSED, UNUSUAL, Case, said

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(
    path for path in (ROOT / "examples").glob("*.yaml") if not path.name.startswith("cluster")
)

Schema = dict[str, Any]

DEFINITIONS = [crd.build_deployment_crd(), crd.build_pool_crd()]
by_name = pytest.mark.parametrize(
    "definition", DEFINITIONS, ids=lambda definition: definition["metadata"]["name"]
)


def schema_of(definition: Schema) -> Schema:
    (version,) = definition["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


def nodes(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every schema node with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


def defaulted(schema: Schema, value: Any) -> Any:
    """What the API server makes of a value: absent fields with a default are filled in."""
    if isinstance(value, list):
        return [defaulted(schema["items"], item) for item in value]
    if not isinstance(value, dict):
        return value
    filled = dict(value)
    for name, child in schema.get("properties", {}).items():
        if name not in filled and "default" in child:
            filled[name] = child["default"]
        if name in filled:
            filled[name] = defaulted(child, filled[name])
    return filled


@by_name
def test_every_node_is_structural(definition: Schema) -> None:
    for path, node in nodes(schema_of(definition)):
        free = "x-kubernetes-preserve-unknown-fields" in node
        assert free or "type" in node or "x-kubernetes-int-or-string" in node, path
        forbidden = {"$ref", "$defs", "title", "const", "oneOf", "allOf", "not", "nullable"}
        assert not forbidden & node.keys(), path
        assert node.get("additionalProperties") not in (True, False), path
        assert "anyOf" not in node or "x-kubernetes-int-or-string" in node, path


@by_name
def test_exclusive_bounds_have_the_older_form(definition: Schema) -> None:
    for path, node in nodes(schema_of(definition)):
        for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if exclusive in node:
                assert node[exclusive] is True, path
                assert bound in node, path


@by_name
def test_every_field_explains_itself(definition: Schema) -> None:
    written_by_the_server = {"", ".apiVersion", ".kind", ".metadata"}
    for path, node in nodes(schema_of(definition)):
        if path not in written_by_the_server and not path.endswith("[]"):
            assert node.get("description", "").endswith("."), path
            assert "\n" not in node["description"], path


@by_name
def test_list_map_keys_are_required_or_have_a_default(definition: Schema) -> None:
    for path, node in nodes(schema_of(definition)):
        for key in node.get("x-kubernetes-list-map-keys", []):
            item = node["items"]
            assert key in item["required"] or "default" in item["properties"][key], path


@by_name
def test_patterns_mean_the_same_to_go(definition: Schema) -> None:
    for path, node in nodes(schema_of(definition)):
        if pattern := node.get("pattern"):
            re.compile(pattern)
            # Classes that take Unicode in one engine and ASCII in the other; look-around is absent.
            assert not re.search(r"\\[wdsWDSbB]|\(\?", pattern), path


def test_manual_placement_is_a_map_by_role() -> None:
    spec = schema_of(crd.build_deployment_crd())["properties"]["spec"]
    manual = spec["properties"]["placement"]["properties"]["manual"]
    assert manual["x-kubernetes-list-type"] == "map"
    assert manual["x-kubernetes-list-map-keys"] == ["role"]


def test_bounded_lists_keep_rules_within_the_cost_limit() -> None:
    # The API server estimates the cost of CEL over lists and text from their greatest sizes.
    engine = schema_of(crd.build_deployment_crd())["properties"]["spec"]["properties"]["engine"]
    assert engine["properties"]["args"]["maxItems"] == 128
    assert engine["properties"]["args"]["items"]["maxLength"] == 4096
    assert engine["properties"]["env"]["maxItems"] == 128


def models(model: type[BaseModel]) -> set[type[ApiModel]]:
    """A resource's model and all models inside it."""
    found: set[type[ApiModel]] = set()

    def visit(annotation: Any) -> None:
        if isinstance(annotation, type) and issubclass(annotation, ApiModel):
            if annotation not in found:
                found.add(annotation)
                for field in annotation.model_fields.values():
                    visit(field.annotation)
            return
        for part in getattr(annotation, "__args__", ()):
            visit(part)

    visit(model)
    return found


@pytest.mark.parametrize(
    ("model", "definition"),
    [(LLMDeployment, crd.build_deployment_crd()), (InstancePool, crd.build_pool_crd())],
    ids=["LLMDeployment", "InstancePool"],
)
def test_every_rule_of_python_is_a_rule_of_the_api_server(
    model: type[BaseModel], definition: Schema
) -> None:
    rules: set[ValidationRule] = {rule for part in models(model) for rule in part.rules}
    written = {
        rule["rule"]
        for _, node in nodes(schema_of(definition))
        for rule in node.get("x-kubernetes-validations", [])
    }
    assert written == {rule.cel for rule in rules}
    assert len(written) > 1


def test_every_rule_is_broken_by_a_case_of_the_fault_table() -> None:
    shown = [fault for case in REFUSED for fault in case.faults]
    for model in models(LLMDeployment) | models(InstancePool) - {InstancePool}:
        for rule in model.rules:
            assert any(rule.message in fault for fault in shown), rule.message


def test_rules_point_at_fields_that_exist() -> None:
    for definition in DEFINITIONS:
        for path, node in nodes(schema_of(definition)):
            for rule in node.get("x-kubernetes-validations", []):
                at = node
                for step in rule.get("fieldPath", "").split(".")[1:]:
                    assert step in at["properties"], f"{path}{rule['fieldPath']}"
                    at = at["properties"][step]


ADDED_LATER = {"witness"}
"""Fields without a default in the CRD (docs/decisions/releases.md)."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_defaults_are_the_same_on_both_sides(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    model = document["spec"]["model"]
    if isinstance(model, str):
        # Only Python spells the short form out; the API server stores what was written.
        document["spec"]["model"] = {"source": model}
    server = defaulted(schema_of(crd.build_deployment_crd()), document)
    python = load(path).model_dump(mode="json", exclude_none=True)
    for name in ADDED_LATER - document["spec"].keys():
        # Operators of earlier versions refuse it, so the API server does not write it.
        del python["spec"][name]
    assert said(python["spec"]) == said(server["spec"])


def test_the_full_example_sets_every_field() -> None:
    spec = schema_of(crd.build_deployment_crd())["properties"]["spec"]
    document = yaml.safe_load((ROOT / "examples" / "full.yaml").read_text())
    absent = []

    def compare(schema: Schema, value: Any, path: str) -> None:
        if isinstance(value, list):
            for item in value:
                compare(schema["items"], item, f"{path}[]")
        for name, child in schema.get("properties", {}).items():
            if isinstance(value, dict):
                if name not in value:
                    absent.append(f"{path}.{name}")
                else:
                    compare(child, value[name], f"{path}.{name}")

    compare(spec, document["spec"], "spec")
    assert list(dict.fromkeys(absent)) == [
        "spec.model.cache.hostPath",  # a volume stands in for both
        "spec.model.cache.image",
        "spec.model.config.configMapKeyRef",  # it is inline
        "spec.workload.trace",  # lengths do
        "spec.planning.acceptanceLength",  # emulated engines draft none
        "spec.placement.manual[].parallelism.data",  # the model has no experts
        "spec.placement.manual[].parallelism.expert",
        "spec.placement.manual[].args",  # engine.roles has them
        "spec.placement.manual[].env",
        "spec.placement.manual[].perCell",  # mixed instances are in no cell
        "spec.engine.env[].valueFrom",  # one variable has a value, the other a source
        "spec.engine.env[].value",
        *[f"spec.engine.roles.{role}.env[].valueFrom" for role in ("prefill", "decode", "mixed")],
        "spec.scaling.roles",  # what is placed by hand does not grow
    ]


def test_names_and_subresources_are_those_of_the_command_line() -> None:
    deployments, pools = crd.build_deployment_crd()["spec"], crd.build_pool_crd()["spec"]
    assert deployments["names"]["shortNames"] == ["llmd"]
    assert pools["names"]["shortNames"] == ["ipool"]
    assert deployments["names"]["categories"] == pools["names"]["categories"] == ["cleave"]
    for each in deployments, pools:
        assert each["versions"][0]["subresources"].keys() == {"status", "scale"}


@by_name
def test_an_object_without_a_status_has_observed_no_generation(definition: Schema) -> None:
    assert schema_of(definition)["properties"]["status"]["default"] == {"observedGeneration": 0}


@by_name
def test_columns_and_scale_read_fields_that_exist(definition: Schema) -> None:
    (version,) = definition["spec"]["versions"]
    known = {path for path, _ in nodes(schema_of(definition))}
    paths = [column["jsonPath"] for column in version["additionalPrinterColumns"]]
    paths += version["subresources"].get("scale", {}).values()
    for path in paths:
        plain = re.sub(r"\[\?\([^)]*\)\]", "[]", path)
        assert plain in known | {".metadata.creationTimestamp"}, path


def test_a_wrong_folder_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert crd.main([str(tmp_path / "none")]) == 2
    assert "usage" in capsys.readouterr().err


@cache
def validator_of(kind: str) -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    definition = {"LLMDeployment": crd.build_deployment_crd, "InstancePool": crd.build_pool_crd}[
        kind
    ]()
    # Draft 4 has the boolean form of exclusive bounds, as CRDs do.
    return jsonschema.Draft4Validator(schema_of(definition))


# Unknown fields are refused before the schema is checked.
@pytest.mark.parametrize(
    "case",
    [case for case in REFUSED if not case.server.startswith("unknown field")],
    ids=lambda case: case.name,
)
def test_the_schema_finds_the_faults_that_need_no_rule(case: Case) -> None:
    rules = [r.message for m in models(LLMDeployment) | models(InstancePool) for r in m.rules]
    needs_rule = any(message in fault for fault in case.faults for message in rules)
    assert validator_of(case.kind).is_valid(case.manifest) == needs_rule


@pytest.mark.parametrize("case", UNUSUAL, ids=lambda case: case.name)
def test_the_schema_takes_what_is_only_unusual(case: Case) -> None:
    validator_of(case.kind).validate(case.manifest)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_satisfy_the_schema(path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft4Validator(schema_of(crd.build_deployment_crd())).validate(
        yaml.safe_load(path.read_text())
    )
