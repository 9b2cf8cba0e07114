"""What the API server is answered when it asks whether a resource may be stored. Pure.

Called by `cleave.controller.webhook`. The CRDs' schema and CEL rules have been kept by then; here
the same rules are said again in `cleave validate`'s words, because the API server asks webhooks
even where an older CRD is installed, and then what CEL cannot say (`cleave.controller.possible`).
What is hard: only what no change of the cluster can mend is refused. What nodes lack today may
come tomorrow, so it is a warning.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from cleave.api import deployment, pool
from cleave.api.cluster import Cluster
from cleave.api.deployment import LLMDeployment
from cleave.api.faults import fault_lines
from cleave.api.pool import InstancePool
from cleave.controller import possible

_M = TypeVar("_M", bound=BaseModel)

API_VERSION = "admission.k8s.io/v1"

_UNPROCESSABLE = 422
_LONGEST_WARNING = 250
"""The API server cuts warnings above 256 characters."""
_MOST_WARNINGS = 8

_METADATA = ("name", "namespace", "labels", "annotations")
"""What a rule may look at; the rest is the API server's own, and grows with its versions."""


class ReviewError(ValueError):
    """This is no AdmissionReview."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is to be said of one resource."""

    faults: tuple[str, ...] = ()
    """One line each; with any, the resource is refused."""
    warnings: tuple[str, ...] = ()
    """One line each, shown to whoever applied it."""


def answer(review: Mapping[str, Any], cluster: Cluster | None) -> dict[str, Any]:
    """The AdmissionReview with its response. `cluster`: the nodes; None: not known.

    Raises ReviewError.
    """
    request = review.get("request")
    if not isinstance(request, Mapping) or not isinstance(request.get("uid"), str):
        raise ReviewError("the request is no AdmissionReview")
    said = judge(request.get("object"), cluster)
    response: dict[str, Any] = {"uid": request["uid"], "allowed": not said.faults}
    if said.faults:
        response["status"] = {
            "code": _UNPROCESSABLE,
            "reason": "Invalid",
            "message": "; ".join(said.faults),
        }
    if said.warnings:
        response["warnings"] = [_shortened(text) for text in said.warnings[:_MOST_WARNINGS]]
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}


def judge(resource: object, cluster: Cluster | None) -> Judgement:
    """What is wrong with a resource, and what its author should know."""
    if not isinstance(resource, Mapping):
        return Judgement()
    match resource.get("kind"):
        case deployment.KIND:
            return _judge(LLMDeployment, resource, possible.of_deployment, cluster)
        case pool.KIND:
            return _judge(InstancePool, resource, possible.of_pool, cluster)
        case _:
            return Judgement()


def _judge(
    model: type[_M],
    resource: Mapping[str, Any],
    examine: Callable[[_M, Cluster | None], possible.Findings],
    cluster: Cluster | None,
) -> Judgement:
    metadata = resource.get("metadata") or {}
    document = {
        "apiVersion": resource.get("apiVersion"),
        "kind": resource.get("kind"),
        "metadata": {key: metadata[key] for key in _METADATA if key in metadata},
        "spec": resource.get("spec"),
    }
    try:
        # As `cleave validate` reads it: JSON has no types of its own beside those of a resource.
        parsed = model.model_validate_json(json.dumps(document), by_alias=True, by_name=False)
    except ValidationError as error:
        return Judgement(faults=tuple(fault_lines(error, model)))
    found = examine(parsed, cluster)
    return Judgement(found.faults, () if found.faults else found.warnings)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_WARNING else text[: _LONGEST_WARNING - 3] + "..."
