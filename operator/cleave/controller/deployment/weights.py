"""Rolls weights out that change while the spec stays: a folder, a volume, an image's tag, a branch.
Pure.

Called by the deployment's reconcile. Engines with different weights never pair, so a restarted one
that finds new weights has partners only once the others have them, too. So an instance that has
loaded others than those that were read last counts as one of an old revision: the label of its pod
says so, and the rollout planner replaces both roles in step.

What is hard: weights can go back (A, B, A), clocks of nodes differ, and nodes can have different
files for good, so that no replacement helps. So the weights that were read last count, not those
that are new, and they are those of the last reading that this operator has seen: pods are labelled
with what was seen of them, and a reading is new where it is later than that, by the clock of the
same engine's node. Each replacement reads: either it finds these weights, and one less is to be
replaced, or it finds others, which is a change. After MAX_CHANGES in an hour, instances stay as
they are until one of these is an hour ago. Status and labels have all that is needed; nothing else
is remembered.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from pydantic import ValidationError

from cleave.api.loaded_weights import MAX_CHANGES, LoadedWeights
from cleave.controller.cluster.actions import ObjectReference, SetLabels
from cleave.controller.cluster.conditions import ROLLING_OUT, ConditionState
from cleave.controller.cluster.objects import ObservedPod
from cleave.controller.views import DeploymentView
from cleave.manifests.labels import REVISION, WEIGHTS, WEIGHTS_READ_MS, Manifest
from cleave.rpc.weights_report import (
    WeightsReport,
    describe_difference,
    describe_fault,
    find_latest,
)

WEIGHTS_AGREE = "WeightsAgree"
"""Condition type."""
WINDOW_S = 3600.0
_FIELD = "weights"
_REPORTED = re.compile(r"[0-9a-f]{1,16}(\.[0-9a-f]{1,16})?")
"""Of an engine, or the oldest and the newest of a pod's engines."""


def list_reports(view: DeploymentView, revision: str) -> list[WeightsReport]:
    """The reports of all instances of this revision of the spec that gateways know, by name."""
    reports = []
    for pod in sorted(view.pods, key=lambda pod: pod.name):
        reported = view.find_report(pod)
        if reported is None or not pod.is_alive or pod.spec_revision != revision:
            continue
        # Any worker may report anything; the digest becomes part of a label.
        if _REPORTED.fullmatch(reported.weights):
            read_s, fault = reported.weights_read_s, reported.weights_fault
            reports.append(WeightsReport(pod.name, reported.weights, read_s, fault))
    return reports


def update(
    before: LoadedWeights | None, view: DeploymentView, revision: str
) -> LoadedWeights | None:
    """The weights that the instances of this revision are to have; None: none are known.
    `before`: those of the status."""
    reports, pods = list_reports(view, revision), {pod.name: pod for pod in view.pods}
    if before is None or before.revision != revision:
        latest = find_latest(reports)
        return None if latest is None else _build(latest, revision, [])
    new = (each for each in reports if _to_ms(each.read_s) > pods[each.instance].weights_read_ms)
    latest = find_latest(new)
    recent = _list_recent(before, view.now_s)
    if latest is None or latest.newest == before.newest or len(recent) >= MAX_CHANGES:
        return before
    return _build(latest, revision, [*recent, _to_time(view.now_s)])


def _build(latest: WeightsReport, revision: str, changed_at: Sequence[datetime]) -> LoadedWeights:
    return LoadedWeights(
        revision=revision,
        newest=latest.newest,
        read_at=_to_time(latest.read_s),
        changed_at=[*changed_at],
    )


def is_stopped(loaded: LoadedWeights, now_s: float) -> bool:
    """Whether weights have changed so often that no instance is replaced for them now."""
    return len(_list_recent(loaded, now_s)) >= MAX_CHANGES


def apply(view: DeploymentView, loaded: LoadedWeights | None, revision: str) -> DeploymentView:
    """The view in which instances with other weights are of an old revision, and all have what was
    seen of them."""
    if loaded is None:
        return view
    stopped = is_stopped(loaded, view.now_s)
    reports = {each.instance: each for each in list_reports(view, revision) if each.is_known}

    def label(pod: ObservedPod) -> ObservedPod:
        if (report := reports.get(pod.name)) is None:
            return pod
        is_newest = stopped or report.weights == loaded.newest
        return replace(
            pod,
            revision=revision if is_newest else f"{revision}.{report.weights}",
            weights=report.weights,
            weights_read_ms=max(_to_ms(report.read_s), pod.weights_read_ms),
        )

    return replace(view, pods=tuple(map(label, view.pods)))


def are_rolled_out(view: DeploymentView) -> bool:
    """Whether instances are being replaced, for their weights perhaps, which needs no placement."""
    has_other = any(pod.revision != pod.spec_revision for pod in view.pods if pod.is_alive)
    return has_other or any(pool.spec.rollout is not None for pool in view.pools)


def list_labels(before: Iterable[ObservedPod], after: Iterable[ObservedPod]) -> Iterator[SetLabels]:
    """Yield the writes of what `apply` has changed."""
    earlier = {pod.name: pod for pod in before}
    for pod in after:
        if pod != earlier.get(pod.name, pod):
            target = ObjectReference("Pod", pod.namespace, pod.name, pod.uid)
            labels = {REVISION: pod.revision, WEIGHTS: pod.weights}
            annotations = {WEIGHTS_READ_MS: str(pod.weights_read_ms)}
            yield SetLabels(target, labels, annotations)


def read(status: Manifest) -> LoadedWeights | None:
    """What the status has; None: nothing."""
    try:
        return LoadedWeights.read_status(status.get(_FIELD))
    except ValidationError:
        return None


def to_status(loaded: LoadedWeights | None) -> Manifest:
    """The part of the status; empty: nothing is known."""
    return {_FIELD: loaded.model_dump(mode="json", exclude_none=True)} if loaded else {}


def build_condition(
    view: DeploymentView, loaded: LoadedWeights | None, revision: str
) -> list[ConditionState]:
    """Whether all instances of this revision have loaded the same weights; none while no instance
    has reported them."""
    reports = list_reports(view, revision)
    if not reports:
        return []
    if loaded and (text := _describe_difference(reports, loaded)):
        reason, rest = _describe_outcome(view, loaded)
        return [ConditionState(WEIGHTS_AGREE, False, reason, f"{text}; {rest}")]
    if fault := describe_fault(reports):
        return [ConditionState(WEIGHTS_AGREE, None, "NotVerified", fault)]
    text = f"{len(reports)} instances have loaded weights {reports[0].weights}"
    return [ConditionState(WEIGHTS_AGREE, True, "Same", text)]


def _describe_difference(reports: Sequence[WeightsReport], loaded: LoadedWeights) -> str:
    return describe_difference(reports, loaded.newest, loaded.read_at.timestamp())


def _describe_outcome(view: DeploymentView, loaded: LoadedWeights) -> tuple[str, str]:
    """(reason, sentence): what happens to instances with other weights."""
    if view.deployment.spec.paused:
        return "Paused", "they stay while spec.paused is set"
    if is_stopped(loaded, view.now_s):
        return "KeepDiffering", (
            f"they stay, as weights have changed {MAX_CHANGES} times in an hour: give all nodes "
            "the same files, or name a commit, or an image by its digest, in spec.model"
        )
    return ROLLING_OUT, "they are replaced, all roles in step"


def _list_recent(loaded: LoadedWeights, now_s: float) -> list[datetime]:
    return [each for each in loaded.changed_at if now_s - each.timestamp() < WINDOW_S]


def _to_ms(seconds: float) -> int:
    return round(seconds * 1000)


def _to_time(seconds: float) -> datetime:
    """In whole seconds, as the API server keeps them."""
    return datetime.fromtimestamp(int(seconds), UTC)
