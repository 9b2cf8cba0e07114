"""Status conditions: merges new states with the written ones, and derives Events. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cleave.controller.cluster.actions import Emit, Reference
from cleave.controller.cluster.objects import timestamp
from cleave.manifests.labels import Manifest

_LONGEST_MESSAGE = 1024


@dataclass(frozen=True, slots=True)
class Condition:
    """The new state of one condition, without its times."""

    type: str
    status: bool | None
    """None: Unknown."""
    reason: str
    """One CamelCase word."""
    message: str = ""


_QUIET = frozenset({"Progressing", "PlanFeasible", "PlanDrifted", "PredictionHolds"})
"""Conditions without Events: Progressing changes in ordinary work, PlanFeasible repeats PlanReady,
and replanning emits its own Events for the other two."""
ROLLING_OUT = "RollingOut"
"""The reason for which Progressing does cause an Event, at its beginning and at its end."""
PLANNING = "Planning"
"""A reason that never makes an Event a warning."""
_REASONS_ARE_NEWS = frozenset({"PlanReady", "ScalingLimited"})
_BAD_WHEN_TRUE = frozenset({"Degraded", "ScalingLimited"})


def settled(
    before: Iterable[Manifest], now: Sequence[Condition], generation: int | None, now_s: float
) -> list[Manifest]:
    """Return the conditions to write; one whose status is unchanged keeps its transition time."""
    previous = {each["type"]: each for each in before}
    return [_written(each, previous.get(each.type), generation, now_s) for each in now]


def told(target: Reference, before: Iterable[Manifest], now: Sequence[Condition]) -> Iterator[Emit]:
    """Yield an Event for every condition whose status has changed.

    For the types in `_REASONS_ARE_NEWS` a changed reason causes one as well.
    """
    previous = {each["type"]: (each["status"], each["reason"]) for each in before}
    status = {each.type: each.status for each in now}
    for each in now:
        if _is_said_by_another(each, status):
            continue
        before_each = previous.get(each.type)
        if _is_roll_out(each, before_each) or (
            each.type not in _QUIET and _is_news(each, before_each)
        ):
            text = each.message or f"{each.type} is {_word(each.status)}"
            is_warning = _is_bad(each) and before_each is not None and each.reason != PLANNING
            yield Emit(target, each.reason, text[:_LONGEST_MESSAGE], is_warning)


def _is_said_by_another(each: Condition, status: Mapping[str, bool | None]) -> bool:
    """Whether the Event of another condition says the same.

    Available reports that requests fail, Progressing that a rollout begins, and Ready that requests
    are served again. `status`: of all present conditions, by type.
    """
    if each.type == "Ready":
        return each.status is not True and ("Available" in status or each.reason == ROLLING_OUT)
    return each.type == "Available" and each.status is True and status.get("Ready") is True


def _is_roll_out(each: Condition, was: tuple[str, str] | None) -> bool:
    """Whether a rollout begins or ends."""
    if each.type != "Progressing" or was is None or was[1] == each.reason:
        return False
    return each.reason == ROLLING_OUT or (was[1] == ROLLING_OUT and each.status is False)


def _is_bad(each: Condition) -> bool:
    return each.type != "Progressing" and each.status is (each.type in _BAD_WHEN_TRUE)


def _is_news(each: Condition, was: tuple[str, str] | None) -> bool:
    """Whether a change is worth an Event; that a new object is not ready yet is not."""
    if each.type in _REASONS_ARE_NEWS and (was is None or was[1] != each.reason):
        return was is not None or each.type not in _BAD_WHEN_TRUE
    if was is None:
        return each.status is True
    return was[0] != _word(each.status)


def read(status: Manifest) -> Iterator[Condition]:
    """Yield the conditions of a written status."""
    values = {"True": True, "False": False}
    for each in status.get("conditions", ()):
        value = values.get(each["status"])
        yield Condition(each["type"], value, each["reason"], each.get("message", ""))


def holds(conditions: Iterable[Manifest], kind: str) -> bool:
    """Whether the condition of this type is present and True."""
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)


def find(status: Manifest, kind: str) -> Manifest | None:
    """Return the condition of this type from a status; None: there is none."""
    return next((each for each in status.get("conditions", ()) if each["type"] == kind), None)


def _word(status: bool | None) -> str:
    return "Unknown" if status is None else str(status)


def _written(
    each: Condition, was: Manifest | None, generation: int | None, now_s: float
) -> Manifest:
    status = _word(each.status)
    since = was["lastTransitionTime"] if was and was["status"] == status else timestamp(now_s)
    written: Manifest = {
        "type": each.type,
        "status": status,
        "reason": each.reason,
        "message": each.message[:_LONGEST_MESSAGE],
        "lastTransitionTime": since,
    }
    if generation is not None:
        written["observedGeneration"] = generation
    return written
