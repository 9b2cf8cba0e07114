"""What an engine has reported about a deployment's model, as its status keeps it, or what Hugging
Face has about it. Pure.

Called by the object cache, which hands a deployment on with this config in place, so that no
decision knows the difference, by the controller, and by the deployment's status report.
"""

from collections.abc import Mapping

from pydantic import ValidationError

from cleave.api.deployment import LLMDeployment
from cleave.api.engine import EngineType
from cleave.api.model_report import ModelReport, ReportedModel
from cleave.manifests.labels import Manifest
from cleave.perf.model import engine_report, model_source
from cleave.perf.model.hf_config import ModelConfigError
from cleave.planner.deployment_shape import load_shape
from cleave.planner.placement import PlanError

FIELD = "reportedModel"
"""Of the status."""
MAX_KV, MAX_WEIGHTS = 0.01, 0.03
"""Share of the engine's bytes by which those of plans may differ. Norms and biases, and the rows
by which engines pad vocabularies, are not counted."""


def apply_report(deployment: LLMDeployment, status: Manifest) -> LLMDeployment:
    """The deployment with the config of its `status.reportedModel` as `spec.model.config.inline`,
    where plans need it: the model is known from nowhere else, and the placement is Cleave's."""
    if not needs_config(deployment):
        return deployment
    reported = read_report(deployment, status)
    return deployment if reported is None else apply_reported(deployment, reported)


def apply_reported(deployment: LLMDeployment, reported: ModelReport) -> LLMDeployment:
    """The deployment with the reported config, where plans count with it what the engine has; else
    with what the engine has measured; itself if neither is usable."""
    by_config = apply_config(deployment, reported.config)
    if by_config is not deployment and not has_other_sizes(by_config, reported):
        return by_config
    measured = reported.model_dump(mode="json", by_alias=True, exclude_none=True)
    by_sizes = apply_config(deployment, engine_report.build_config(measured))
    return by_config if by_sizes is deployment else by_sizes


def has_other_sizes(deployment: LLMDeployment, reported: ModelReport) -> bool:
    """Whether plans count with other weights or caches than the engine reports."""
    try:
        shape = load_shape(deployment)
    except PlanError:
        return False
    tensor = reported.parallelism.tensor
    pairs = [(shape.compute_copied_bytes_on_gpu(tensor), reported.kv_bytes_per_token, MAX_KV)]
    if reported.sizes is not None:
        states = sum(group.state_bytes for group in reported.cache_groups)
        pairs.append((shape.compute_state_bytes(tensor), states, MAX_KV))
        pairs.append((shape.weight_bytes, reported.sizes.weight_bytes, MAX_WEIGHTS))
    return any(abs(ours - theirs) > most * theirs for ours, theirs, most in pairs)


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
        model = model_source.with_config(spec.model, config)
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
