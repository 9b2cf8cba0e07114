"""What a user reads when a manifest is right, and when it is not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from cleave.api.deployment import LLMDeployment
from cleave.api.engine import EngineType
from cleave.api.faults import format_faults
from cleave.api.manifest import ManifestError, load, load_all, validate
from cleave.api.pool import InstancePool
from cleave.api.role import Role

from tests.support.resource_cases import REFUSED, UNUSUAL, Case

EXAMPLES = Path(__file__).parents[2] / "examples"
DEPLOYMENTS = sorted(set(EXAMPLES.glob("*.yaml")) - set(EXAMPLES.glob("cluster*.yaml")))

Make = Callable[..., dict[str, Any]]


def faults(source: str | Path) -> tuple[str, ...]:
    with pytest.raises(ManifestError) as raised:
        load(source)
    return raised.value.faults


def expected_messages(case: Case) -> tuple[str, ...]:
    """What a reader is shown of a resource, which may be a pool."""
    model = {"LLMDeployment": LLMDeployment, "InstancePool": InstancePool}[case.kind]
    try:
        model.model_validate_json(json.dumps(case.manifest), by_alias=True, by_name=False)
    except ValidationError as error:
        return tuple(format_faults(error, model))
    return ()


def test_the_smallest_manifest_is_short_and_complete() -> None:
    path = EXAMPLES / "smallest.yaml"
    deployment = load(path)
    assert len(path.read_text().splitlines()) <= 12
    assert (deployment.name, deployment.namespace) == ("chat", "default")
    assert deployment.spec.model.source == "meta-llama/Llama-3.1-8B-Instruct"
    assert deployment.spec.slo.attainment == 0.9
    assert deployment.spec.engine.type is EngineType.VLLM
    assert deployment.spec.placement is None


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.name)
def test_every_example_loads(path: Path) -> None:
    assert load(path).spec.slo.ttft_ms > 0


def test_a_string_stands_for_a_model_with_that_source(manifest: Make) -> None:
    short = load(yaml.safe_dump(manifest(model="hf://org/model")))
    long = load(yaml.safe_dump(manifest(model={"source": "hf://org/model"})))
    assert short == long


def test_a_placement_by_hand_fills_in_counts_and_parallelism(manifest: Make) -> None:
    text = yaml.safe_dump(manifest(placement={"manual": [{"role": "mixed"}]}))
    placement = load(text).spec.placement
    assert placement is not None
    (pool,) = placement.manual
    assert (pool.role, pool.replicas, pool.parallelism.gpus) == (Role.MIXED, 1, 1)


def test_what_a_pool_states_for_its_engines_is_what_its_role_gets(manifest: Make) -> None:
    env = [{"name": "TZ", "value": "UTC"}]
    pools = [{"role": "prefill", "args": ["--enforce-eager"], "env": env}, {"role": "decode"}]
    by_pool = validate(manifest(placement={"manual": pools}))
    roles = {"prefill": {"args": ["--enforce-eager"], "env": env}}
    by_role = validate(
        manifest(
            engine={"roles": roles},
            placement={"manual": [{"role": "prefill"}, {"role": "decode"}]},
        )
    )
    assert by_pool.spec.engine == by_role.spec.engine
    assert by_pool.model_dump() == by_role.model_dump()
    assert LLMDeployment.model_validate_json(by_pool.model_dump_json()) == by_role


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_every_fault_is_one_line_with_its_path(case: Case) -> None:
    assert expected_messages(case) == case.faults


@pytest.mark.parametrize("case", UNUSUAL, ids=lambda case: case.name)
def test_unusual_valid_values_are_accepted(case: Case) -> None:
    assert expected_messages(case) == ()


def test_the_cases_are_many_and_distinct() -> None:
    assert len({case.name for case in REFUSED}) == len(REFUSED) >= 40
    assert len({case.name for case in UNUSUAL}) == len(UNUSUAL) >= 10


@pytest.mark.parametrize(
    ("field", "suggestion"),
    [("modle", "model"), ("slos", "slo"), ("Engine", "engine"), ("place_ment", "placement")],
)
def test_a_misspelt_field_is_rejected_with_a_suggestion(
    manifest: Make, field: str, suggestion: str
) -> None:
    text = yaml.safe_dump(manifest(**{field: {}}))
    assert faults(text) == (f"spec.{field}: unknown field; did you mean {suggestion}?",)


def test_a_misspelling_is_found_deep_inside_lists_and_optional_parts(manifest: Make) -> None:
    pool = {"role": "mixed", "parallelism": {"tensors": 2}}
    assert faults(yaml.safe_dump(manifest(placement={"manual": [pool]}))) == (
        "spec.placement.manual[0].parallelism.tensors: unknown field; did you mean tensor?",
    )


def test_python_names_are_no_yaml_names(manifest: Make) -> None:
    text = yaml.safe_dump(manifest(slo={"ttft_ms": 1, "tpotMs": 1}))
    assert faults(text) == (
        "spec.slo.ttftMs: required",
        "spec.slo.ttft_ms: unknown field; did you mean ttftMs?",
    )


def test_an_unknown_field_is_rejected_with_all_valid_fields(manifest: Make) -> None:
    (fault,) = faults(yaml.safe_dump(manifest(zebra={"mode": "Auto"})))
    known = "model, slo, workload, planning, placement, routing, pools, engine, adapters, scaling"
    assert fault.startswith(f"spec.zebra: unknown field; known here: {known}")


def test_a_long_value_is_shown_in_part(manifest: Make) -> None:
    (fault,) = faults(yaml.safe_dump(manifest(slo={"ttftMs": "x" * 500, "tpotMs": 1})))
    assert len(fault) < 120


@pytest.mark.parametrize("name", ["Chat", "9lives", "a" * 41, "chat_1", "chat-", "chat\n"])
def test_names_that_no_service_can_have_are_refused(manifest: Make, name: str) -> None:
    (fault,) = faults(yaml.safe_dump(manifest(name)))
    assert fault.startswith("metadata.name must be at most 40 lower-case letters")


def test_metadata_is_checked_for_misspellings_too(manifest: Make) -> None:
    document = manifest()
    document["metadata"]["lables"] = {}
    assert faults(yaml.safe_dump(document)) == (
        "metadata.lables: unknown field; did you mean labels?",
    )


def test_another_kind_is_refused_by_name() -> None:
    assert faults("apiVersion: v1\nkind: Pod\nspec: {}\n") == (
        "apiVersion: must be cleave.dev/v1alpha1 (got 'v1')",
        "kind: must be LLMDeployment (got 'Pod')",
    )


def test_the_error_for_a_missing_version_and_kind_names_what_to_write() -> None:
    assert faults("spec: {}") == (
        "apiVersion: required; write apiVersion: cleave.dev/v1alpha1",
        "kind: required; write kind: LLMDeployment",
    )


@pytest.mark.parametrize("text", ["", "---\n---\n", "# nothing\n"])
def test_an_empty_manifest_is_a_fault(text: str) -> None:
    assert faults(text) == ("manifest holds no LLMDeployment",)


@pytest.mark.parametrize("text", ["just words", "5", "[1, 2]"])
def test_yaml_that_is_no_object_is_a_fault(text: str) -> None:
    (fault,) = faults(text)
    assert fault.startswith("must be an object with kind: LLMDeployment")


def test_a_syntax_error_is_shown_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "chat.yaml"
    path.write_text("apiVersion: cleave.dev/v1alpha1\nspec:\n  slo: {ttftMs: 1\n  model: x\n")
    (fault,) = faults(path)
    assert fault.startswith(f"{path}:4: ")


def test_a_key_written_twice_is_shown_with_its_line() -> None:
    assert faults("kind: LLMDeployment\nspec:\n  model: a\n  model: b\n") == (
        "manifest:4: key 'model' is written twice",
    )


def test_merge_keys_may_be_overridden() -> None:
    text = """
apiVersion: cleave.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: org/model
  slo: &slo {ttftMs: 400, tpotMs: 40}
"""
    merged = text.replace("&slo {ttftMs", "{<<: {ttftMs: 1, tpotMs: 2}, ttftMs")
    assert load(merged).spec.slo == load(text).spec.slo


def test_yaml_tags_run_nothing(manifest: Make) -> None:
    (fault,) = faults("!!python/object/apply:os.system ['true']")
    assert "could not determine a constructor" in fault


def test_yaml_without_a_json_form_is_an_error_and_no_crash(manifest: Make) -> None:
    head = "apiVersion: cleave.dev/v1alpha1\nkind: LLMDeployment\n"
    (fault,) = faults(head + "spec: &spec {model: *spec}\n")
    assert fault == "an anchor (&) holds an alias (*) of itself; write the values out"
    assert faults(head + "spec: {[1, 2]: 3}\n") == ("manifest:3: found unhashable key",)
    (fault,) = faults(head + "spec: {model: {{ .Values.model }}}\n")
    assert fault.endswith("; is this a template? render it first, as helm template does")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[" * 5000, "manifest: is nested too deeply"),
        ("9" * 5000, "manifest: Exceeds the limit (4300 digits)"),
        ("2024-99-99", "manifest: month must be in 1..12"),
    ],
)
def test_yaml_that_python_cannot_hold_is_a_fault_and_no_crash(value: str, message: str) -> None:
    (fault,) = faults(f"spec: {value}")
    assert fault.startswith(message)


def test_numbers_without_end_are_refused(manifest: Make) -> None:
    document = yaml.safe_dump(manifest(slo={"ttftMs": float("inf"), "tpotMs": 1}))
    assert faults(document) == ("spec.slo.ttftMs: must be a number (got inf)",)


@pytest.mark.parametrize(
    "env", [[{"name": "TOKEN", "value": 1234567}], ["TOKEN=1234567"], {"TOKEN": "1234567"}]
)
def test_what_may_be_a_key_is_not_repeated_by_its_fault(manifest: Make, env: object) -> None:
    (fault,) = faults(yaml.safe_dump(manifest(engine={"env": env})))
    assert fault.startswith("spec.engine.env")
    assert "1234567" not in fault


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    assert faults(path) == (f"{path}: No such file or directory",)


def test_a_file_that_is_no_text_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"\xff\xfe\x00")
    assert faults(path) == (f"{path}: not UTF-8 text",)


def test_several_documents_and_lists_are_read_in_order(manifest: Make) -> None:
    many = {"apiVersion": "v1", "kind": "List", "items": [manifest("b"), manifest("c")]}
    text = yaml.safe_dump_all([manifest("a"), None, many])
    assert [deployment.name for deployment in load_all(text)] == ["a", "b", "c"]


def test_several_values_for_a_single_field_are_an_error(manifest: Make) -> None:
    text = yaml.safe_dump_all([manifest("a"), manifest("b")])
    assert faults(text) == ("holds 2 LLMDeployments (a, b); one is expected",)


def test_faults_of_several_documents_carry_their_names(manifest: Make) -> None:
    text = yaml.safe_dump_all(
        [manifest("a", engine={"type": "x"}), manifest("b"), manifest("c", slos={})]
    )
    with pytest.raises(ManifestError) as raised:
        load_all(text)
    assert raised.value.faults == (
        "a: spec.engine.type: must be one of vLLM, Emulated (got 'x')",
        "c: spec.slos: unknown field; did you mean slo?",
    )


def test_what_the_api_server_returns_can_be_read_back(manifest: Make) -> None:
    document = manifest()
    document["metadata"] |= {
        "uid": "0b",
        "generation": 3,
        "resourceVersion": "77",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "managedFields": [{"manager": "kubectl"}],
        "ownerReferences": [{"kind": "X", "controller": True}],
    }
    document["status"] = {
        "observedGeneration": 3,
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "AllReady",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
        ],
        "roles": [{"role": "prefill", "replicas": 1, "ready": 1}],
    }
    # PyYAML reads the timestamps as datetimes.
    status = load(
        yaml.safe_dump(document).replace("'2026-01-01T00:00:00Z'", "2026-01-01T00:00:00Z")
    )
    assert status.status is not None
    assert status.status.roles[0].role is Role.PREFILL


def test_aliases_of_aliases_are_refused_before_they_are_written_out() -> None:
    rows = "\n".join(f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10))
    with pytest.raises(ManifestError, match="holds more than 100,000 values once aliases"):
        load(f"spec:\n  a0: &a0 [1]\n{rows}\n")
