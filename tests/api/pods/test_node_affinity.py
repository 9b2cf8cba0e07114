"""Node affinity of the template selects the nodes that the scheduler would."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from cleave.api.pods.node_affinity import WorkerAffinity

from tests.support.node_terms import PREFERRED, REQUIRED, draw_affinities, is_selected

KEYS = st.sampled_from(["a", "b", "example.com/c"])
VALUES = st.sampled_from(["", "x", "y", "5", "05", "1_0", "9" * 19, "9" * 63])


def require(*expressions: dict[str, Any]) -> dict[str, Any]:
    terms = [{"matchExpressions": [each]} for each in expressions]
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}}


@given(draw_affinities(KEYS, VALUES), st.dictionaries(KEYS, VALUES))
@example(require({"key": "a", "operator": "Gt", "values": ["4"]}), {"a": "05"})
@example(require({"key": "a", "operator": "Gt", "values": ["4"]}), {"a": "1_0"})
@example(require({"key": "a", "operator": "Gt", "values": ["4"]}), {"a": "9" * 19})
def test_nodes_are_selected_as_the_scheduler_selects_them(
    written: dict[str, Any], labels: dict[str, str]
) -> None:
    affinity = WorkerAffinity.model_validate(written)
    assert affinity.is_met(labels) is is_selected(written, labels)
    # Of a label with a single spelling, all that is known of a node decides.
    if [*labels] == ["a"] and "b" not in str(written) and "example.com" not in str(written):
        assert affinity.may_select("a", [labels["a"]]) is affinity.is_met(labels)


@given(draw_affinities(KEYS, VALUES))
def test_what_is_written_comes_back(written: dict[str, Any]) -> None:
    found = WorkerAffinity.model_validate(written).model_dump(mode="json", exclude_defaults=True)
    assert found == {name: each for name, each in written.items() if each}


@pytest.mark.parametrize(
    ("operator", "values", "is_kept"),
    [
        ("In", ["H100"], True),
        ("In", ["h100-name", "other"], True),
        ("In", ["other"], False),
        ("NotIn", ["h100-name"], False),
        ("NotIn", ["other"], True),
        ("Exists", [], True),
        ("DoesNotExist", [], False),
    ],
)
def test_a_kind_of_gpu_is_kept_where_one_of_its_spellings_may_be_selected(
    operator: str, values: list[str], is_kept: bool
) -> None:
    rack = {"key": "rack", "operator": "In", "values": ["r1"]}
    product = {"key": "product", "operator": operator, "values": values}
    terms = [{"matchExpressions": [rack, product]}]
    affinity = WorkerAffinity.model_validate(
        {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}}
    )
    assert affinity.may_select("product", ["H100", "h100-name"]) is is_kept


@pytest.mark.parametrize(
    "affinity",
    [
        {"podAffinity": {}},
        {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": []}}},
        {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{}]}}},
        {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchFields": []}]}}},
        {"nodeAffinity": {REQUIRED: [{"matchExpressions": []}]}},
        {"nodeAffinity": {PREFERRED: [{"weight": 0, "preference": {"matchExpressions": []}}]}},
        require({"key": "a", "operator": "in", "values": ["x"]}),
        require({"key": "a", "operator": "Lt", "values": ["1", "2"]}),
        require({"key": "a", "operator": "Gt", "values": ["-1"]}),
        require({"key": "a", "operator": "Gt", "values": ["1\n"]}),
        require({"key": "a", "operator": "Exists", "values": ["x"]}),
    ],
)
def test_what_kubernetes_refuses_is_refused(affinity: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        WorkerAffinity.model_validate(affinity)
