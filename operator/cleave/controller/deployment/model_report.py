"""Takes up what engines report about a model that Cleave knows from nowhere else. Pure.

Called for the deployment's status. The first usable report of a revision is written to
`status.reportedModel` and stays, so that plans neither change with every worker nor are lost with
the operator. Any worker may send anything: a report is as bounded and as strictly checked as
`spec.model.config`, and at worst the plan is for the model that it describes, within the limits of
the spec.
"""

from pydantic import ValidationError

from cleave.api.deployment import LLMDeployment
from cleave.api.model_report import ModelReport, ReportedModel
from cleave.controller.cluster.conditions import ConditionState
from cleave.controller.cluster.reported_model import FIELD, read_report
from cleave.controller.views import DeploymentView, Pools
from cleave.manifests.labels import Manifest
from cleave.perf.model import hf_config, model_source
from cleave.perf.model.hf_config import ModelConfigError
from cleave.perf.model.model_report import MAX_LENGTH
from cleave.planner.deployment_shape import load_shape
from cleave.planner.placement import PlanError

MODEL_AS_REPORTED = "ModelAsReported"
"""Condition type."""
_MAX_DIFFERENCE = 0.01
"""Share of the engine's KV bytes per token by which Cleave's may differ."""
_MAX_TRIED = 8
"""Reports that are decoded at a time: gateways send one of each revision."""


def choose_report(view: DeploymentView, desired: Pools) -> ReportedModel | None:
    """The report to keep: the written one, or the first of a new revision; None: there is none."""
    written = read_report(view.deployment, view.status)
    revisions = {pool.spec.revision for pool in desired.values()}
    if written is not None and written.instance_revision in revisions:
        return written
    spec = view.deployment.spec.model
    instances = view.instances or {}
    texts = [
        (pod, instances[pod.name].model_report)
        for pod in sorted(view.pods, key=lambda pod: pod.name)
        if pod.ready and not pod.deleting and pod.revision in revisions and pod.name in instances
    ]
    for pod, text in [each for each in texts if each[1]][:_MAX_TRIED]:
        if (report := decode(text)) is not None:
            return ReportedModel(
                **dict(report),
                source=spec.source,
                model_revision=spec.revision or "",
                instance=pod.name,
                instance_revision=pod.revision,
            )
    return written


def decode(text: str) -> ModelReport | None:
    """The report of an engine; None: it is none, or not within the bounds. Fields that a later
    version of Cleave sends are skipped."""
    if len(text) > MAX_LENGTH:
        return None
    try:
        return ModelReport.read_status(hf_config.decode_config(text))
    except (ModelConfigError, ValidationError):
        return None


def build_condition(
    deployment: LLMDeployment, reported: ReportedModel | None
) -> list[ConditionState]:
    """Whether the engine's KV bytes per token are those that plans count with; none without a
    report that says so."""
    if reported is None:
        return []
    try:
        model = deployment.spec.model
        if model_source.needs_report(model):
            model = model_source.with_report(model, reported.config)
        changed = deployment.spec.model_copy(update={"model": model})
        shape = load_shape(deployment.model_copy(update={"spec": changed}))
    except (ModelConfigError, PlanError) as error:
        text = f"{reported.instance} reports a model that is not planned: {error}"
        return [ConditionState(MODEL_AS_REPORTED, False, "NotUsable", text)]
    parallelism, theirs = reported.parallelism, reported.kv_bytes_per_token
    if not theirs or parallelism.pipeline > 1:
        text = f"{reported.instance} does not report the KV bytes per token of a whole model"
        return [ConditionState(MODEL_AS_REPORTED, None, "NotReported", text)]
    ours = shape.compute_kv_bytes_on_gpu(parallelism.tensor, 1)
    text = f"{reported.instance} keeps {theirs:,} KV bytes per token and GPU, plans count {ours:,}"
    if abs(ours - theirs) <= _MAX_DIFFERENCE * theirs:
        return [ConditionState(MODEL_AS_REPORTED, True, "AsReported", text)]
    text += (
        "; state the KV cache's type as --kv-cache-dtype in spec.engine.args, and the model's "
        "config.json as spec.model.config if it has changed"
    )
    return [ConditionState(MODEL_AS_REPORTED, False, "Differs", text)]


def to_status(reported: ReportedModel | None) -> Manifest:
    """The part of the status; empty without a report."""
    if reported is None:
        return {}
    return {FIELD: reported.model_dump(mode="json", exclude_none=True)}
