"""Which nodes worker pods may run on, by expressions over labels, as a pod spec has them.

Part of the template's type; also read by the pod builders and for the inventory of a plan. Meaning
and checks are those of k8s.io/component-helpers `scheduling/corev1/nodeaffinity` and of
k8s.io/kubernetes `pkg/apis/core/validation`.
"""

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Literal

from pydantic import Field

from cleave.api.base import ApiModel, ValidationRule
from cleave.api.pods.names import (
    KEY_SHAPE,
    MAX_KEY,
    LabelValue,
    build_cel_check,
    is_qualified_name,
)

_NUMBER = "^[0-9]{1,18}$"
_MAX_NUMBER = 2**63 - 1
"""Kubernetes compares numbers of 64 bits, and takes larger ones for text."""


class NodeRequirement(ApiModel):
    """A requirement of one label of a node."""

    key: Annotated[str, Field(max_length=MAX_KEY)]
    """Key of the label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    """In: the label has one of the values. NotIn: it has none of them, or is absent. Exists and
    DoesNotExist: whether there is such a label. Gt and Lt: it is a greater or smaller number."""
    values: list[LabelValue] = Field(default_factory=list, max_length=64)
    """Values, with In and NotIn; one whole number, with Gt and Lt."""

    rules = (
        ValidationRule(
            cel=build_cel_check("self.key"),
            is_valid=lambda r: is_qualified_name(r.key),
            message=f"must be a key of a label that Kubernetes takes: {KEY_SHAPE}",
            field="key",
            list_offenders=lambda r: [r.key],
        ),
        ValidationRule(
            cel="self.operator in ['Gt', 'Lt'] ? has(self.values) && size(self.values) == 1 && "
            f"self.values[0].matches('{_NUMBER}') : "
            "self.operator.endsWith('In') == (has(self.values) && size(self.values) > 0)",
            is_valid=lambda r: r._has_its_values(),
            message="must have entries with In and NotIn, one whole number with Gt and Lt, and "
            "none with Exists and DoesNotExist",
            field="values",
            list_offenders=lambda r: [r.operator, *r.values[:2]],
        ),
    )

    def _has_its_values(self) -> bool:
        if self.operator in ("Gt", "Lt"):
            return len(self.values) == 1 and bool(re.match(_NUMBER, self.values[0]))
        return self.operator.endswith("In") == bool(self.values)

    def is_met(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels meets it, as Kubernetes decides it."""
        value = labels.get(self.key)
        match self.operator:
            case "In" | "NotIn":
                return (value in self.values) == (self.operator == "In")
            case "Exists" | "DoesNotExist":
                return (value is not None) == (self.operator == "Exists")
        if value is None or not re.match("^[0-9]+$", value) or int(value) > _MAX_NUMBER:
            return False
        difference = int(value) - int(self.values[0])
        return difference > 0 if self.operator == "Gt" else difference < 0


class NodeSelectorTerm(ApiModel):
    """Requirements that a node must meet together."""

    match_expressions: Annotated[list[NodeRequirement], Field(min_length=1, max_length=16)]
    """The requirements."""

    def is_met(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels meets all of them."""
        return all(each.is_met(labels) for each in self.match_expressions)


class NodeSelector(ApiModel):
    """Terms of which a node must meet one."""

    node_selector_terms: Annotated[list[NodeSelectorTerm], Field(min_length=1, max_length=16)]
    """The terms."""


class PreferredNodes(ApiModel):
    """Nodes that the scheduler prefers."""

    weight: Annotated[int, Field(ge=1, le=100)]
    """What a node gains that meets the preference."""
    preference: NodeSelectorTerm
    """Requirements that such a node meets together."""


class NodeAffinity(ApiModel):
    """Nodes that pods need or prefer."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    """What a node must meet when a pod is placed; absent: nothing."""
    preferred_during_scheduling_ignored_during_execution: list[PreferredNodes] = Field(
        default_factory=list, max_length=16
    )
    """Nodes that are better than others. Plans count all nodes alike."""


class WorkerAffinity(ApiModel):
    """Where pods may run. Affinity between pods is Cleave's own."""

    node_affinity: NodeAffinity = NodeAffinity()
    """Nodes that the pods need or prefer, beside those of nodeSelector."""

    @property
    def terms(self) -> list[NodeSelectorTerm]:
        """Terms of which a node must meet one; empty: any node will do."""
        required = self.node_affinity.required_during_scheduling_ignored_during_execution
        return required.node_selector_terms if required else []

    def is_met(self, labels: Mapping[str, str]) -> bool:
        """Whether the scheduler may put the pods on a node with these labels."""
        return not self.terms or any(term.is_met(labels) for term in self.terms)

    def may_select(self, key: str, spellings: Collection[str]) -> bool:
        """Whether it may select a node of which no more is known than that the value of its label
        `key` is one of these spellings of one thing."""

        def may_be_met(requirement: NodeRequirement) -> bool:
            found = [requirement.is_met({key: each}) for each in spellings]
            return all(found) if requirement.operator == "NotIn" else any(found)

        return not self.terms or any(
            all(may_be_met(each) for each in term.match_expressions if each.key == key)
            for term in self.terms
        )
