"""Status conditions: what holds now, since when, and what to tell people when it changes. Pure."""

from collections.abc import Iterable, Iterator, Sequence
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


_QUIET = frozenset({"Progressing"})
"""Conditions that come and go in ordinary work: they cause no Events."""
_BAD_WHEN_TRUE = frozenset({"Degraded", "ScalingLimited"})


def settled(
    before: Iterable[Manifest], now: Sequence[Condition], generation: int | None, now_s: float
) -> list[Manifest]:
    """`now` as status holds it; one whose status is what it was keeps its transition time."""
    known = {each["type"]: each for each in before}
    return [_written(each, known.get(each.type), generation, now_s) for each in now]


def told(target: Reference, before: Iterable[Manifest], now: Sequence[Condition]) -> Iterator[Emit]:
    """An Event for every condition whose status or reason is another one than before."""
    known = {each["type"]: (each["status"], each["reason"]) for each in before}
    for each in now:
        was = known.get(each.type)
        if each.type in _QUIET or was == (_word(each.status), each.reason):
            continue
        is_bad = (each.status is True) if each.type in _BAD_WHEN_TRUE else each.status is False
        # Nothing has happened yet where a new object is not ready, or is not limited.
        if was is None and each.status is not True and not each.message:
            continue
        text = each.message or f"{each.type} is {_word(each.status)}"
        yield Emit(target, each.reason, text[:_LONGEST_MESSAGE], is_bad and was is not None)


def holds(conditions: Iterable[Manifest], kind: str) -> bool:
    """Whether the condition of this type is there and True."""
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)


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
