"""Takes up what engines report about a model that Cleave knows from nowhere else. Pure.

Called for the deployment's status. The first usable report of a revision is written to
`status.reportedModel`. It stays while any engine reports the same config.json, so that plans
neither change with every worker nor are lost with the operator; once none does, as the files have
changed and every engine has started again, the next one replaces it. Any worker may send anything:
a report is as bounded and as strictly checked as `spec.model.config`, and at worst the plan is for
the model that it describes, within the limits of the spec.
"""

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from cleave.api.deployment import LLMDeployment
from cleave.api.model_report import ModelReport, ReportedModel
from cleave.controller.cluster.conditions import ConditionState
from cleave.controller.cluster.reported_model import (
    FIELD,
    apply_reported,
    has_other_sizes,
    read_report,
)
from cleave.controller.views import DeploymentView, Pools
from cleave.manifests.labels import Manifest
from cleave.perf.model import engine_report, hf_config, model_source
from cleave.perf.model.hf_config import ModelConfigError
from cleave.perf.model.model_report import MAX_LENGTH
from cleave.planner.deployment_shape import load_shape
from cleave.planner.placement import PlanError

MODEL_AS_REPORTED = "ModelAsReported"
"""Condition type."""
_MAX_TRIED = 8
"""Reports that are decoded at a time: gateways send few."""
_MAX_FIELDS, _MAX_SHOWN = 3, 40
"""Fields, and characters of each, by which a differing report is described."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What the engine of a ready instance reports now."""

    instance: str
    revision: str
    digest: str
    """Hash of its config.json; empty: it is of an earlier version, or reports nothing."""
    text: str
    """Its report; empty: another instance with the same digest has it, or there is none."""


def list_reports(view: DeploymentView, desired: Pools) -> list[EngineReport]:
    """The reports of all ready instances of the desired revisions, by name."""
    revisions, known = _list_revisions(desired), view.instances or {}
    return [
        EngineReport(
            pod.name,
            pod.revision,
            digest=known[pod.name].model_digest if pod.name in known else "",
            text=known[pod.name].model_report if pod.name in known else "",
        )
        for pod in sorted(view.pods, key=lambda pod: pod.name)
        if pod.ready and not pod.deleting and pod.revision in revisions
    ]


def choose_report(
    view: DeploymentView, desired: Pools, reports: Sequence[EngineReport]
) -> ReportedModel | None:
    """The report to keep: the written one while it is current, else the first; None: there is
    none."""
    written = read_report(view.deployment, view.status)
    is_present = written is not None and written.instance_revision in _list_revisions(desired)
    if written is not None and is_present and not _is_outdated(written, reports):
        return written
    spec = view.deployment.spec.model
    for each in [each for each in reports if each.text][:_MAX_TRIED]:
        if (report := decode(each.text)) is not None:
            return ReportedModel(
                **dict(report),
                source=spec.source,
                model_revision=spec.revision or "",
                instance=each.instance,
                instance_revision=each.revision,
            )
    return written


def _list_revisions(desired: Pools) -> Collection[str]:
    return {pool.spec.revision for pool in desired.values()}


def _is_outdated(written: ReportedModel, reports: Sequence[EngineReport]) -> bool:
    """Whether every engine says what it serves, and none of them this."""
    digests = {each.digest for each in reports}
    return bool(digests) and "" not in digests and written.config_digest not in digests


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
    deployment: LLMDeployment, reported: ReportedModel | None, reports: Sequence[EngineReport] = ()
) -> list[ConditionState]:
    """Whether all engines report the same model, and keep the KV bytes per token that plans count
    with; none without a report that says so."""
    if reported is None:
        return []
    if text := _describe_others(reported, reports):
        return [ConditionState(MODEL_AS_REPORTED, False, "EnginesDiffer", text)]
    try:
        if model_source.needs_report(deployment.spec.model):
            deployment = apply_reported(deployment, reported)
        if deployment.spec.model.config is None:
            model_source.with_config(deployment.spec.model, reported.config)
        shape = load_shape(deployment)
    except (ModelConfigError, PlanError) as error:
        text = f"{reported.instance} reports a model that is not planned: {error}"
        return [ConditionState(MODEL_AS_REPORTED, False, "NotUsable", text)]
    parallelism, theirs = reported.parallelism, reported.kv_bytes_per_token
    if not theirs or parallelism.pipeline > 1:
        text = f"{reported.instance} does not report the KV bytes per token of a whole model"
        return [ConditionState(MODEL_AS_REPORTED, None, "NotReported", text)]
    ours = shape.compute_copied_bytes_on_gpu(parallelism.tensor)
    text = f"{reported.instance} keeps {theirs:,} KV bytes per token and GPU, plans count {ours:,}"
    if not has_other_sizes(deployment, reported):
        text += _describe_measured(deployment, reported)
        return [ConditionState(MODEL_AS_REPORTED, True, "AsReported", text)]
    if reported.sizes is not None:
        own = reported.sizes.weight_bytes
        text += f", and has {own:,} bytes of weights, plans count {shape.weight_bytes:,}"
    text += (
        "; state the KV cache's type as --kv-cache-dtype in spec.engine.args, and leave out "
        "spec.model.config, or write the model's present one"
    )
    return [ConditionState(MODEL_AS_REPORTED, False, "Differs", text)]


def _describe_measured(deployment: LLMDeployment, reported: ReportedModel) -> str:
    """Why plans count with what the engine has measured; empty: they count with its config."""
    model = deployment.spec.model
    if model.config is None or engine_report.FIELD not in (model.config.inline or {}):
        return ""
    try:
        model_source.with_config(model, reported.config)
    except ModelConfigError as error:
        return f"; plans count with its sizes, as its config.json is not understood: {error}"
    return "; plans count with its sizes, which are not those of its config.json"


def _describe_others(reported: ReportedModel, reports: Sequence[EngineReport]) -> str:
    """Which engines report another config.json, and what it has; empty: none does."""
    kept = reported.config_digest
    digests = Counter(each.digest for each in reports if each.digest)
    others = [each for each in reports if each.digest and each.digest != kept]
    if not kept or not others:
        return ""
    first = next((each for each in others if each.text), others[0])
    report = decode(first.text) if first.text else None
    text = (
        f"{len(others)} of {digests.total()} engines report another config.json than "
        f"{reported.instance} ({kept}), for which plans are made: {first.instance} "
        f"({first.digest[: len(kept)]})"
    )
    if report is not None and (fields := _compare_configs(report.config, reported.config)):
        text += f" has {fields}"
    return f"{text}; give all nodes the same files, then restart the engines that differ"


def _compare_configs(theirs: Manifest, ours: Manifest) -> str:
    """The first fields that differ, with both values; empty: only parts that no plan reads do."""
    names = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    texts = (
        f"{name[:_MAX_SHOWN]} {_show(theirs, name)} instead of {_show(ours, name)}"
        for name in names
    )
    return ", ".join([*texts][:_MAX_FIELDS])


def _show(config: Manifest, name: str) -> str:
    return json.dumps(config[name])[:_MAX_SHOWN] if name in config else "nothing"


def to_status(reported: ReportedModel | None) -> Manifest:
    """The part of the status; empty without a report."""
    if reported is None:
        return {}
    return {FIELD: reported.model_dump(mode="json", exclude_none=True)}
