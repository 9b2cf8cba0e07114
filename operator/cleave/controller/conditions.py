"""Status conditions: what holds now, since when, and what to tell people when it changes. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cleave.controller.actions import Emit, Reference
from cleave.controller.observed import timestamp
from cleave.pods.labels import Manifest

_LONGEST_MESSAGE = 1024


@dataclass(frozen=True, slots=True)
class Condition:
    """One aspect of the state of an object."""

    type: str
    status: bool | None
    """None: unknown."""
    reason: str
    """One CamelCase word."""
    message: str = ""


_QUIET = frozenset({"Progressing", "PlanFeasible", "PlanDrifted", "PredictionHolds"})
"""They cause no Events: one comes and goes in ordinary work, one repeats PlanReady, and the loop
tells of the others what it makes of them."""
ROLLING_OUT = "RollingOut"
"""The reason for which Progressing is told all the same, and its end with it."""
PLANNING = "Planning"
"""A reason that is no bad news."""
_REASONS_ARE_NEWS = frozenset({"PlanReady", "ScalingLimited"})
_BAD_WHEN_TRUE = frozenset({"Degraded", "ScalingLimited"})


def settled(
    before: Iterable[Manifest], now: Sequence[Condition], generation: int | None, now_s: float
) -> list[Manifest]:
    """`now` as status holds it; one whose status is what it was keeps its transition time."""
    known = {each["type"]: each for each in before}
    return [_written(each, known.get(each.type), generation, now_s) for each in now]


def told(target: Reference, before: Iterable[Manifest], now: Sequence[Condition]) -> Iterator[Emit]:
    """An Event for every condition that holds now and did not, or the other way round.

    Also for one whose reason is another one where the reason is the news.
    """
    known = {each["type"]: (each["status"], each["reason"]) for each in before}
    status = {each.type: each.status for each in now}
    for each in now:
        if _is_said_by_another(each, status):
            continue
        was = known.get(each.type)
        if _is_roll_out(each, was) or (each.type not in _QUIET and _is_news(each, was)):
            text = each.message or f"{each.type} is {_word(each.status)}"
            is_warning = _is_bad(each) and was is not None and each.reason != PLANNING
            yield Emit(target, each.reason, text[:_LONGEST_MESSAGE], is_warning)


def _is_said_by_another(each: Condition, status: Mapping[str, bool | None]) -> bool:
    """Whether Available says that requests fail, Progressing that a roll-out begins, or Ready that
    requests are served again. `status`: of all conditions that hold now, by type."""
    if each.type == "Ready":
        return each.status is not True and ("Available" in status or each.reason == ROLLING_OUT)
    return each.type == "Available" and each.status is True and status.get("Ready") is True


def _is_roll_out(each: Condition, was: tuple[str, str] | None) -> bool:
    """Whether a roll-out begins or ends."""
    if each.type != "Progressing" or was is None or was[1] == each.reason:
        return False
    return each.reason == ROLLING_OUT or (was[1] == ROLLING_OUT and each.status is False)


def _is_bad(each: Condition) -> bool:
    return each.type != "Progressing" and each.status is (each.type in _BAD_WHEN_TRUE)


def _is_news(each: Condition, was: tuple[str, str] | None) -> bool:
    """Whether it is worth telling; that a new object is not ready yet is not."""
    if each.type in _REASONS_ARE_NEWS and (was is None or was[1] != each.reason):
        return was is not None or each.type not in _BAD_WHEN_TRUE
    if was is None:
        return each.status is True
    return was[0] != _word(each.status)


def read(status: Manifest) -> Iterator[Condition]:
    """What was said in a status."""
    known = {"True": True, "False": False}
    for each in status.get("conditions", ()):
        is_so = known.get(each["status"])
        yield Condition(each["type"], is_so, each["reason"], each.get("message", ""))


def holds(conditions: Iterable[Manifest], kind: str) -> bool:
    """Whether the condition of this type is there and True."""
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)


def find(status: Manifest, kind: str) -> Manifest | None:
    """The condition of this type in a status; None: there is none."""
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
