"""Answers AdmissionReviews: may this resource be stored? Pure.

Called by `cleave.controller.webhook.server`. The API server has checked the CRD's schema and CEL
rules by then. They are checked again here, with the messages of `cleave validate`, because an older
CRD may be installed; then follow the checks that CEL cannot express
(`cleave.controller.webhook.validation`). What is hard: a resource is refused only for faults that
no change of the cluster can repair. GPUs that nodes lack today may be added later, so that is a
warning.
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
from cleave.controller.webhook import validation

_M = TypeVar("_M", bound=BaseModel)

API_VERSION = "admission.k8s.io/v1"

_UNPROCESSABLE = 422
_LONGEST_WARNING = 250
"""The API server cuts warnings above 256 characters."""
_MOST_WARNINGS = 8

_METADATA = ("name", "namespace", "labels", "annotations")
"""Metadata fields that rules read. Others belong to the API server, and grow with its versions."""


class ReviewError(ValueError):
    """The request is not an AdmissionReview."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Faults and warnings about one resource."""

    faults: tuple[str, ...] = ()
    """One line each; with any of them the resource is refused."""
    warnings: tuple[str, ...] = ()
    """One line each; kubectl shows them to the user who applies the resource."""


def answer(review: Mapping[str, Any], cluster: Cluster | None) -> dict[str, Any]:
    """Return the AdmissionReview with its response.

    `cluster` describes the nodes; None: not known. Raises ReviewError.
    """
    request = review.get("request")
    if not isinstance(request, Mapping) or not isinstance(request.get("uid"), str):
        raise ReviewError("the request is no AdmissionReview")
    findings = judge(request.get("object"), cluster)
    response: dict[str, Any] = {"uid": request["uid"], "allowed": not findings.faults}
    if findings.faults:
        response["status"] = {
            "code": _UNPROCESSABLE,
            "reason": "Invalid",
            "message": "; ".join(findings.faults),
        }
    if findings.warnings:
        response["warnings"] = [_shortened(text) for text in findings.warnings[:_MOST_WARNINGS]]
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}


def judge(resource: object, cluster: Cluster | None) -> Judgement:
    """Check a decoded resource; kinds other than Cleave's pass without findings."""
    if not isinstance(resource, Mapping):
        return Judgement()
    match resource.get("kind"):
        case deployment.KIND:
            return _judge(LLMDeployment, resource, validation.of_deployment, cluster)
        case pool.KIND:
            return _judge(InstancePool, resource, validation.of_pool, cluster)
        case _:
            return Judgement()


def _judge(
    model: type[_M],
    resource: Mapping[str, Any],
    examine: Callable[[_M, Cluster | None], validation.Findings],
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
        # Parse from JSON, as `cleave validate` does: strict types accept strings for dates there.
        parsed = model.model_validate_json(json.dumps(document), by_alias=True, by_name=False)
    except ValidationError as error:
        return Judgement(faults=tuple(fault_lines(error, model)))
    findings = examine(parsed, cluster)
    return Judgement(findings.faults, () if findings.faults else findings.warnings)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_WARNING else text[: _LONGEST_WARNING - 3] + "..."
