"""Responds to AdmissionReviews: validates a resource before it is stored. Pure.

Called by `cleave.controller.webhook.server`. The API server has checked the CRD's schema and CEL
rules by then. They are checked again here, with the messages of `cleave validate`, because an older
CRD may be installed; then follow the checks that CEL cannot express
(`cleave.controller.webhook.validation`). A resource is refused only for faults that no change of
the cluster can repair. GPUs that nodes lack today may be added later, so that is a warning.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from cleave.api import deployment, pool
from cleave.api.cluster import Cluster
from cleave.api.deployment import LLMDeployment
from cleave.api.faults import format_faults
from cleave.api.pool import InstancePool
from cleave.controller.author_policy.violations import list_violations
from cleave.controller.settings import OperatorSettings
from cleave.controller.webhook import validation
from cleave.controller.webhook.validation import ValidationFindings

_M = TypeVar("_M", LLMDeployment, InstancePool)

API_VERSION = "admission.k8s.io/v1"

_UNPROCESSABLE = 422
_MAX_WARNING_LENGTH = 250
"""The API server cuts warnings above 256 characters."""
_MAX_WARNINGS = 8
_DEFAULTS = OperatorSettings()

_METADATA_FIELDS = ("name", "namespace", "labels", "annotations")
"""Metadata fields that rules read. Others belong to the API server, and grow with its versions."""


class ReviewError(ValueError):
    """The request is not an AdmissionReview."""


def review_admission(
    review: Mapping[str, Any], cluster: Cluster | None, settings: OperatorSettings = _DEFAULTS
) -> dict[str, Any]:
    """Return the AdmissionReview with its response. `cluster` may be None. Raises ReviewError."""
    request = review.get("request")
    if not isinstance(request, Mapping) or not isinstance(request.get("uid"), str):
        raise ReviewError("the request is not an AdmissionReview")
    findings = check_resource(request.get("object"), cluster, settings)
    response: dict[str, Any] = {"uid": request["uid"], "allowed": not findings.faults}
    if findings.faults:
        message = "; ".join(findings.faults)
        response["status"] = {"code": _UNPROCESSABLE, "reason": "Invalid", "message": message}
    if findings.warnings:
        response["warnings"] = [_shorten(text) for text in findings.warnings[:_MAX_WARNINGS]]
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}


def check_resource(
    resource: object, cluster: Cluster | None, settings: OperatorSettings = _DEFAULTS
) -> ValidationFindings:
    """Check a decoded resource; kinds other than Cleave's pass without findings."""
    if not isinstance(resource, Mapping):
        return ValidationFindings()
    match resource.get("kind"):
        case deployment.KIND:
            return _check_model(
                LLMDeployment, resource, validation.check_deployment, cluster, settings
            )
        case pool.KIND:
            return _check_model(InstancePool, resource, validation.check_pool, cluster, settings)
        case _:
            return ValidationFindings()


def _check_model(
    model: type[_M],
    resource: Mapping[str, Any],
    examine: Callable[[_M, Cluster | None], ValidationFindings],
    cluster: Cluster | None,
    settings: OperatorSettings,
) -> ValidationFindings:
    metadata = resource.get("metadata") or {}
    document = {
        "apiVersion": resource.get("apiVersion"),
        "kind": resource.get("kind"),
        "metadata": {key: metadata[key] for key in _METADATA_FIELDS if key in metadata},
        "spec": resource.get("spec"),
    }
    try:
        # Parse from JSON, as `cleave validate` does: strict types accept strings for dates there.
        parsed: _M = model.model_validate_json(json.dumps(document), by_alias=True, by_name=False)
    except ValidationError as error:
        return ValidationFindings(faults=tuple(format_faults(error, model)))
    findings: ValidationFindings = examine(parsed, cluster)
    # Pods of a resource with faults cannot be built.
    faults = findings.faults or tuple(list_violations(parsed, settings))
    return ValidationFindings(faults, () if faults else findings.warnings)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_WARNING_LENGTH else text[: _MAX_WARNING_LENGTH - 3] + "..."
