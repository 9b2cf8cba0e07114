"""Which instances to let go when there are too many. Pure; called by the pool's reconcile.

Deleting a pod is its drain: it takes no new requests and ends when its work has ended. The one that
has least to end is the one that goes.
"""

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar


class Instance(Protocol):
    """What is looked at of a pod."""

    @property
    def name(self) -> str:
        """Unique in its pool."""

    @property
    def deleting(self) -> bool:
        """Whether it is on its way out already."""

    @property
    def scheduled(self) -> bool:
        """Whether it has a node."""

    @property
    def ready(self) -> bool:
        """Whether it can take requests."""

    @property
    def load(self) -> float | None:
        """Requests that run or wait there; None: nobody has told."""

    @property
    def created_s(self) -> float:
        """When it was made, in seconds since the epoch."""


P = TypeVar("P", bound=Instance)


def choose_victims(pods: Sequence[P], count: int) -> tuple[P, ...]:
    """The `count` pods that go first, of those that are not going already; fewer if too few.

    First those without a node, then those that are not ready, then the emptiest; of equals the
    youngest. One whose load nobody knows is taken for the busiest.
    """
    staying = sorted((pod for pod in pods if not pod.deleting), key=_worth)
    return tuple(staying[: max(0, count)])


def _worth(pod: Instance) -> tuple[bool, bool, float, float, str]:
    load = math.inf if pod.load is None else pod.load
    return pod.scheduled, pod.ready, load if pod.ready else 0.0, -pod.created_s, pod.name
