"""Limits a pool to the instances that nodes have room for: time-out, eviction, retry. Pure.

Called by the pool's reconcile. An evicted pod is gone, and the pool would create it again at once.
So the last attempt, a `CapacityProbe`, is recorded in the pool's status.

An evicted instance leaves the scheduler's queue, so that other pods of a plan do not wait for half
a pair. A pool without any instance on a node keeps one pending: the scheduler places it as soon as
it can, and cluster autoscalers see that a node is needed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cleave.controller.cluster.objects import ObservedPod, format_timestamp

_FIRST_BACKOFF_S = 60.0
_MAX_BACKOFF_S = 600.0
_MAX_MESSAGE_LENGTH = 600
_NO_MESSAGE = "the scheduler has given no reason"


@dataclass(frozen=True, slots=True)
class CapacityProbe:
    """The last attempt to run more instances than nodes have room for."""

    schedulable: int
    """Instances that found a node, plus one pending instance when none did."""
    attempts: int
    """Consecutive attempts, with these nodes, in which instances were evicted."""
    retry_at_s: float
    """When the next attempt begins, in seconds since the epoch."""
    nodes: str
    """Hash of the nodes' capacity and the pool's requests."""
    reason: str
    """The scheduler's message."""


@dataclass(frozen=True, slots=True)
class SchedulingLimit:
    """Actions for instances that no node has room for."""

    evict: tuple[ObservedPod, ...] = ()
    """Pods to delete."""
    max_instances: int | None = None
    """Most instances of the pool for now; None: not limited."""
    reason: str = ""
    """Message of the ScalingLimited condition; empty: not limited."""
    requeue_after_s: float | None = None
    """Seconds until the next change without an event; None: there is none."""
    probe: CapacityProbe | None = None
    """To be written to the status; None: nodes have room for all."""


def compute_limit(
    desired: int,
    pods: Sequence[ObservedPod],
    *,
    now_s: float,
    timeout_s: float,
    nodes: str,
    last: CapacityProbe | None,
) -> SchedulingLimit:
    """Decide about the pods of a pool that needs `desired` instances, surge included.

    `nodes`: hash of the nodes' capacity and the pool's requests; when it changes, the next attempt
    begins at once. `timeout_s`: how long a pod may be unschedulable. `last`: the recorded attempt.
    """
    present = [pod for pod in pods if pod.is_alive]
    scheduled = [pod for pod in present if pod.scheduled]
    unschedulable = [pod for pod in present if not pod.scheduled and pod.unschedulable_reason]
    overdue = [pod for pod in unschedulable if pod.created_s + timeout_s <= now_s]
    give_up = tuple(overdue if scheduled or len(present) > len(overdue) else _skip_eldest(overdue))
    if give_up:
        last = _record_failure(len(present) - len(give_up), give_up, now_s, nodes, last)
    elif last is not None and (
        len(scheduled) >= desired or (desired <= last.schedulable and not overdue)
    ):
        last = None
    elif last is not None and last.nodes != nodes:
        last = replace(last, attempts=0, retry_at_s=now_s, nodes=nodes)
    due = [pod.created_s + timeout_s - now_s for pod in unschedulable if pod not in overdue]
    if last is not None and last.retry_at_s > now_s:
        due.append(last.retry_at_s - now_s)
    return SchedulingLimit(
        evict=give_up,
        max_instances=last.schedulable if last is not None and last.retry_at_s > now_s else None,
        reason=_format_reason(desired, len(scheduled), overdue, last, now_s),
        requeue_after_s=min(due, default=None),
        probe=last,
    )


def _skip_eldest(pods: Sequence[ObservedPod]) -> list[ObservedPod]:
    return sorted(pods, key=lambda pod: (pod.created_s, pod.name))[1:]


def _record_failure(
    fits: int, given_up: Sequence[ObservedPod], now_s: float, nodes: str, last: CapacityProbe | None
) -> CapacityProbe:
    """The attempt that ends now, with an exponential back-off before the next."""
    attempts = last.attempts if last is not None and last.nodes == nodes else 0
    pause_s = min(_FIRST_BACKOFF_S * 2.0**attempts, _MAX_BACKOFF_S)
    return CapacityProbe(fits, attempts + 1, now_s + pause_s, nodes, _find_common_message(given_up))


def _find_common_message(pods: Sequence[ObservedPod]) -> str:
    """The scheduler's most frequent message about these pods."""
    messages = Counter(pod.unschedulable_reason for pod in pods)
    message = min(messages, key=lambda text: (-messages[text], text), default="")
    return message.strip().rstrip(".")[:_MAX_MESSAGE_LENGTH] or _NO_MESSAGE


def _format_reason(
    desired: int,
    scheduled: int,
    overdue: Sequence[ObservedPod],
    last: CapacityProbe | None,
    now_s: float,
) -> str:
    """Why there are fewer instances than desired, and when it is tried again; empty: no limit."""
    if last is None and not overdue:
        return ""
    room = f"nodes have room for {scheduled} of {desired} instances"
    if last is None:
        return f"{room}: {_find_common_message(overdue)}; one waits for a node"
    when = "being tried again"
    if last.retry_at_s > now_s:
        when = f"tried again at {format_timestamp(last.retry_at_s)} or when nodes change"
    return f"{room}: {last.reason}; {when}"
