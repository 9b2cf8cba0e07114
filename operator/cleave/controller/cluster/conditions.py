"""Status conditions: merges new states with the written ones, and derives Events. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cleave.controller.cluster.actions import Emit, ObjectReference
from cleave.controller.cluster.objects import format_timestamp
from cleave.manifests.labels import Manifest

_MAX_MESSAGE_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class ConditionState:
    """The new state of one condition, without its times."""

    type: str
    status: bool | None
    """None: Unknown."""
    reason: str
    """One CamelCase word."""
    message: str = ""


SLO_ATTAINED = "SLOAttained"
PROMETHEUS_READ = "PrometheusRead"
"""Condition types."""
_WITHOUT_EVENTS = frozenset(
    {"Progressing", "PlanFeasible", "PlanDrifted", "PredictionHolds", SLO_ATTAINED}
)
"""Conditions without Events: Progressing and SLOAttained change in ordinary work (alerts report
missed targets), PlanFeasible repeats PlanReady, and replanning emits its own Events for the other
two."""
ROLLING_OUT = "RollingOut"
"""The reason for which Progressing does cause an Event, at its beginning and at its end."""
NOT_STARTING = "NotStarting"
"""The reason of Degraded when the kubelet cannot start a container, or no pod can be created."""
PLANNING = "Planning"
"""A reason that never makes an Event a warning."""
_REPORTED_BY_REASON = frozenset({"PlanReady", "ScalingLimited"})
_FAILURE_WHEN_TRUE = frozenset({"Degraded", "ScalingLimited"})


def merge(
    before: Iterable[Manifest], now: Sequence[ConditionState], generation: int | None, now_s: float
) -> list[Manifest]:
    """Return the conditions to write; one whose status is unchanged keeps its transition time."""
    previous = {each["type"]: each for each in before}
    return [_to_manifest(each, previous.get(each.type), generation, now_s) for each in now]


def build_events(
    target: ObjectReference, before: Iterable[Manifest], now: Sequence[ConditionState]
) -> Iterator[Emit]:
    """Yield an Event per changed status, in `_REPORTED_BY_REASON` also for a changed reason."""
    previous = {each["type"]: (each["status"], each["reason"]) for each in before}
    status = {each.type: each.status for each in now}
    for each in now:
        if _is_redundant(each, status):
            continue
        before_each = previous.get(each.type)
        if _marks_rollout(each, before_each) or (
            each.type not in _WITHOUT_EVENTS and _is_reportable(each, before_each)
        ):
            text = each.message or f"{each.type} is {_format_status(each.status)}"
            is_warning = _is_failure(each) and before_each is not None and each.reason != PLANNING
            yield Emit(target, each.reason, text[:_MAX_MESSAGE_LENGTH], is_warning)


def _is_redundant(each: ConditionState, status: Mapping[str, bool | None]) -> bool:
    """Whether the Event of another condition reports the same.

    Available reports that requests fail, Progressing that a rollout begins, and Ready that requests
    are served again. `status`: of all present conditions, by type.
    """
    if each.type == "Ready":
        return each.status is not True and ("Available" in status or each.reason == ROLLING_OUT)
    return each.type == "Available" and each.status is True and status.get("Ready") is True


def _marks_rollout(each: ConditionState, was: tuple[str, str] | None) -> bool:
    """Whether a rollout begins or ends."""
    if each.type != "Progressing" or was is None or was[1] == each.reason:
        return False
    return each.reason == ROLLING_OUT or (was[1] == ROLLING_OUT and each.status is False)


def _is_failure(each: ConditionState) -> bool:
    return each.type != "Progressing" and each.status is (each.type in _FAILURE_WHEN_TRUE)


def _is_reportable(each: ConditionState, was: tuple[str, str] | None) -> bool:
    """Whether a change is worth an Event; that a new object is not ready yet is not."""
    if each.type in _REPORTED_BY_REASON and (was is None or was[1] != each.reason):
        return was is not None or each.type not in _FAILURE_WHEN_TRUE
    if was is None:
        return each.status is True
    return was[0] != _format_status(each.status)


def read(status: Manifest) -> Iterator[ConditionState]:
    """Yield the conditions of a written status."""
    values = {"True": True, "False": False}
    for each in status.get("conditions", ()):
        value = values.get(each["status"])
        yield ConditionState(each["type"], value, each["reason"], each.get("message", ""))


def is_true(conditions: Iterable[Manifest], kind: str) -> bool:
    """Whether the condition of this type is present and True."""
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)


def find(status: Manifest, kind: str) -> Manifest | None:
    """Return the condition of this type from a status; None: there is none."""
    return next((each for each in status.get("conditions", ()) if each["type"] == kind), None)


def _format_status(status: bool | None) -> str:
    return "Unknown" if status is None else str(status)


def _to_manifest(
    each: ConditionState, was: Manifest | None, generation: int | None, now_s: float
) -> Manifest:
    status = _format_status(each.status)
    is_same = was is not None and was["status"] == status
    since = was["lastTransitionTime"] if was and is_same else format_timestamp(now_s)
    written: Manifest = {
        "type": each.type,
        "status": status,
        "reason": each.reason,
        "message": each.message[:_MAX_MESSAGE_LENGTH],
        "lastTransitionTime": since,
    }
    if generation is not None:
        written["observedGeneration"] = generation
    return written
