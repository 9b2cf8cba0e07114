"""Instances that no node has room for: how long to wait, when to give up, when to try again. Pure.

Called by the pool's reconcile. What is hard: a pod that was given up is gone, and without memory
it would be made again at once. What has to be remembered, the last trial, is in the pool's status.

An instance that is given up holds its place in no queue, so that the others of a plan do not wait
for half a pair. A pool without any instance on a node leaves one waiting: the scheduler places it
as soon as it can, and whoever adds nodes sees that one is wanted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cleave.controller.observed import ObservedPod, timestamp

_FIRST_PAUSE_S = 60.0
_LONGEST_PAUSE_S = 600.0
_LONGEST_MESSAGE = 600
_UNTOLD = "the scheduler has not said why"


@dataclass(frozen=True, slots=True)
class Trial:
    """The last trial to have more instances than fit."""

    fits: int
    """Instances that there was room for, and one that waits when there was none."""
    attempts: int
    """How often in a row, with these nodes, some were given up."""
    again_s: float
    """When the next trial begins, in seconds since the epoch."""
    nodes: str
    """Digest of what nodes offered and the pool asked for."""
    reason: str
    """What the scheduler said."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What is to be done about instances that no node has room for."""

    give_up: tuple[ObservedPod, ...] = ()
    """Pods to delete."""
    most: int | None = None
    """No instance is to be made beyond so many; None: any number."""
    reason: str = ""
    """A sentence for ScalingLimited; empty: nothing is limited."""
    again_after_s: float | None = None
    """When to look again, whatever happens; None: there is nothing to wait for."""
    trial: Trial | None = None
    """What to remember."""


def limit(
    wanted: int,
    pods: Sequence[ObservedPod],
    *,
    now_s: float,
    timeout_s: float,
    nodes: str,
    last: Trial | None,
) -> Limit:
    """What to do about the pods of a pool that wants `wanted` instances, a surge included.

    `nodes` is a digest of what nodes offer and the pool asks for: another one begins the next trial
    at once. `last` is the trial that was remembered.
    """
    there = [pod for pod in pods if not pod.deleting and not pod.is_over]
    placed = [pod for pod in there if pod.scheduled]
    waiting = [pod for pod in there if not pod.scheduled and pod.unschedulable_reason]
    overdue = [pod for pod in waiting if pod.created_s + timeout_s <= now_s]
    give_up = tuple(overdue if placed or len(there) > len(overdue) else _all_but_eldest(overdue))
    if give_up:
        last = _failed(len(there) - len(give_up), give_up, now_s, nodes, last)
    elif last is not None and (len(placed) >= wanted or (wanted <= last.fits and not overdue)):
        last = None
    elif last is not None and last.nodes != nodes:
        last = replace(last, attempts=0, again_s=now_s, nodes=nodes)
    due = [pod.created_s + timeout_s - now_s for pod in waiting if pod not in overdue]
    if last is not None and last.again_s > now_s:
        due.append(last.again_s - now_s)
    return Limit(
        give_up=give_up,
        most=last.fits if last is not None and last.again_s > now_s else None,
        reason=_sentence(wanted, len(placed), overdue, last, now_s),
        again_after_s=min(due, default=None),
        trial=last,
    )


def _all_but_eldest(pods: Sequence[ObservedPod]) -> list[ObservedPod]:
    return sorted(pods, key=lambda pod: (pod.created_s, pod.name))[1:]


def _failed(
    fits: int, given_up: Sequence[ObservedPod], now_s: float, nodes: str, last: Trial | None
) -> Trial:
    """The trial that ends now, with the pause before the next."""
    attempts = last.attempts if last is not None and last.nodes == nodes else 0
    pause_s = min(_FIRST_PAUSE_S * 2.0**attempts, _LONGEST_PAUSE_S)
    return Trial(fits, attempts + 1, now_s + pause_s, nodes, _told(given_up))


def _told(pods: Sequence[ObservedPod]) -> str:
    """What the scheduler says of most of them."""
    messages = Counter(pod.unschedulable_reason for pod in pods)
    message = min(messages, key=lambda text: (-messages[text], text), default="")
    return message.strip().rstrip(".")[:_LONGEST_MESSAGE] or _UNTOLD


def _sentence(
    wanted: int, placed: int, overdue: Sequence[ObservedPod], last: Trial | None, now_s: float
) -> str:
    """Why there are fewer instances than wanted, and what happens next; empty: nothing to say."""
    if last is None and not overdue:
        return ""
    room = f"nodes have room for {placed} of {wanted} instances"
    if last is None:
        return f"{room}: {_told(overdue)}; one waits for a node"
    when = (
        f"tried again at {timestamp(last.again_s)} or when nodes change"
        if last.again_s > now_s
        else "being tried again"
    )
    return f"{room}: {last.reason}; {when}"
