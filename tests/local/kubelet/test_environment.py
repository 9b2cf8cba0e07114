import sys

import pytest

from cleave.local.kubelet.environment import (
    build_command_line,
    build_downward_api_fields,
    expand,
    resolve_env,
)
from cleave.local.kubelet.pod_spec import PodError, parse_pod


def field_ref(name: str, path: str) -> dict[str, object]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def test_the_downward_api_names_the_pod_its_address_and_its_labels() -> None:
    spec = parse_pod(
        {
            "metadata": {"name": "p", "namespace": "ns", "labels": {"a/b": "c"}},
            "spec": {"containers": [{"name": "m", "command": ["true"]}]},
        }
    )
    known = build_downward_api_fields(spec, "127.64.0.1", "127.0.0.1", "node")
    env = [
        field_ref("NAME", "metadata.name"),
        field_ref("NS", "metadata.namespace"),
        field_ref("IP", "status.podIP"),
        field_ref("LABEL", "metadata.labels['a/b']"),
        field_ref("NONE", "metadata.labels['absent']"),
    ]
    assert resolve_env(env, known, {}) == {
        "NAME": "p", "NS": "ns", "IP": "127.64.0.1", "LABEL": "c", "NONE": "",
    }  # fmt: skip


def test_variables_refer_to_earlier_ones_and_overrides_win() -> None:
    env = [
        {"name": "A", "value": "1"},
        {"name": "B", "value": "$(A)$(C)"},
        {"name": "C", "value": "3"},
        {"name": "EMPTY"},
    ]
    assert resolve_env(env, {}, {"A": "2", "D": "4"}) == {
        "A": "2", "B": "2$(C)", "C": "3", "EMPTY": "", "D": "4",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ({"secretKeyRef": {"name": "s"}}, "only value and fieldRef"),
        ({"fieldRef": {"fieldPath": "status.moon"}}, "unknown fieldPath 'status.moon'"),
    ],
)
def test_a_source_that_cannot_be_resolved_is_refused(
    source: dict[str, object], complaint: str
) -> None:
    with pytest.raises(PodError, match=complaint):
        resolve_env([{"name": "X", "valueFrom": source}], {}, {})


def test_references_are_expanded_as_in_kubernetes() -> None:
    env = {"A": "1"}
    assert expand("$(A) $(B) $$(A) $A", env) == "1 $(B) $(A) $A"


def test_python_is_this_interpreter_and_nothing_else_is_replaced() -> None:
    assert build_command_line(["python", "$(A)", "python"], {"A": "x"}) == [
        sys.executable,
        "x",
        "python",
    ]
    assert build_command_line(["sh", "-c"], {}) == ["sh", "-c"]
