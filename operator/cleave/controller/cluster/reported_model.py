"""What an engine has reported about a deployment's model, as its status keeps it. Pure.

Called by the object cache, which hands a deployment on with the reported config in place, so that
no decision knows the difference, and by the deployment's status report.
"""

from pydantic import ValidationError

from cleave.api.deployment import LLMDeployment
from cleave.api.model_report import ReportedModel
from cleave.manifests.labels import Manifest
from cleave.perf.model import model_source
from cleave.perf.model.hf_config import ModelConfigError

FIELD = "reportedModel"
"""Of the status."""


def apply_report(deployment: LLMDeployment, status: Manifest) -> LLMDeployment:
    """The deployment with the config of its `status.reportedModel` as `spec.model.config.inline`,
    where plans need it: the model is known from nowhere else, and the placement is Cleave's."""
    spec = deployment.spec
    if spec.placement is not None or not model_source.needs_report(spec.model):
        return deployment
    reported = read_report(deployment, status)
    if reported is None:
        return deployment
    try:
        model = model_source.with_report(spec.model, reported.config)
    except ModelConfigError:
        return deployment
    changed = spec.model_copy(update={"model": model})
    return deployment.model_copy(update={"spec": changed})


def read_report(deployment: LLMDeployment, status: Manifest) -> ReportedModel | None:
    """The report in a status; None: there is none about this model."""
    try:
        written = ReportedModel.read_status(status.get(FIELD))
    except ValidationError:
        return None
    model = deployment.spec.model
    is_same = (written.source, written.model_revision) == (model.source, model.revision or "")
    return written if is_same else None
