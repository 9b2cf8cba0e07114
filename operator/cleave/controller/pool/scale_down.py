"""Chooses the instances to delete when there are too many. Pure.

Called by the pool's reconcile. A deleted pod drains: it takes no new requests and ends once its
running requests have. So the instance with the least load is deleted first.
"""

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar


class ScaleDownCandidate(Protocol):
    """The fields of a pod that scale-down reads."""

    @property
    def name(self) -> str:
        """Unique in its pool."""

    @property
    def deleting(self) -> bool:
        """Whether it is being deleted already."""

    @property
    def scheduled(self) -> bool:
        """Whether a node is assigned."""

    @property
    def ready(self) -> bool:
        """Whether it can take requests."""

    @property
    def load(self) -> float | None:
        """Running and waiting requests; None: not reported."""

    @property
    def created_s(self) -> float:
        """Creation time in seconds since the epoch."""


P = TypeVar("P", bound=ScaleDownCandidate)


def choose_victims(pods: Sequence[P], count: int) -> tuple[P, ...]:
    """Choose `count` pods to delete, of those that are not being deleted; fewer if too few.

    First pods without a node, then pods that are not ready, then the least loaded; among equals the
    youngest. A pod of unknown load counts as the most loaded.
    """
    candidates = sorted((pod for pod in pods if not pod.deleting), key=_rank)
    return tuple(candidates[: max(0, count)])


def _rank(pod: ScaleDownCandidate) -> tuple[bool, bool, float, float, str]:
    load = math.inf if pod.load is None else pod.load
    return pod.scheduled, pod.ready, load if pod.ready else 0.0, -pod.created_s, pod.name
