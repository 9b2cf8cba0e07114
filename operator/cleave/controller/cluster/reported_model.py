"""What an engine has reported about a deployment's model, as its status keeps it, or what Hugging
Face has about it. Pure.

Called by the object cache, which hands a deployment on with this config in place, so that no
decision knows the difference, by the controller, and by the deployment's status report.
"""

from collections.abc import Mapping

from pydantic import ValidationError

from cleave.api.deployment import LLMDeployment
from cleave.api.engine import EngineType
from cleave.api.model_report import ReportedModel
from cleave.manifests.labels import Manifest
from cleave.perf.model import model_source
from cleave.perf.model.hf_config import ModelConfigError

FIELD = "reportedModel"
"""Of the status."""


def apply_report(deployment: LLMDeployment, status: Manifest) -> LLMDeployment:
    """The deployment with the config of its `status.reportedModel` as `spec.model.config.inline`,
    where plans need it: the model is known from nowhere else, and the placement is Cleave's."""
    if not needs_config(deployment):
        return deployment
    reported = read_report(deployment, status)
    return deployment if reported is None else apply_config(deployment, reported.config)


def needs_config(deployment: LLMDeployment) -> bool:
    """Whether plans need a config of the model that the resource does not bring."""
    return deployment.spec.placement is None and model_source.needs_report(deployment.spec.model)


def needs_hub(deployment: LLMDeployment) -> bool:
    """Whether Hugging Face may have that config."""
    is_emulated = deployment.spec.engine.type is EngineType.EMULATED
    return deployment.spec.model.folder is None and not is_emulated and needs_config(deployment)


def apply_config(deployment: LLMDeployment, config: Mapping[str, object]) -> LLMDeployment:
    """The deployment with `config` as `spec.model.config.inline`; itself if that is unusable."""
    spec = deployment.spec
    try:
        model = model_source.with_report(spec.model, config)
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
