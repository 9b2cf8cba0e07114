"""Moves requests that are placed but not begun off instances whose predictions went wrong.

Called at a heartbeat with the requests that arrived since the last one. What is hard: an output
predicted too short makes an instance fuller than its books say, one predicted too long emptier; a
move is worth it only when it brings both instances nearer to what was planned for them.

Source: Aladdin, section 4.3 (Algorithm 2). The distance of an instance is that of the origin to
its error line alpha l + beta b + c = 0, whose c is the error in ms by Eq. 3; so the sum to minimise
is that of |c| / sqrt(alpha^2 + beta^2), and alpha and beta are the same for like instances.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ongoing:
    """A running or just ended request at an instance."""

    instance: int
    predicted: float
    """Output tokens."""
    made: float
    ended: bool


@dataclass(frozen=True, slots=True)
class Error:
    """By how much an instance is fuller (above 0) or emptier than planned."""

    tokens: float = 0.0
    requests: float = 0.0

    def find_ms(self, k2: float, c2: float) -> float:
        """What that adds to a decode pass (Eq. 3)."""
        return k2 * self.tokens + c2 * self.requests


@dataclass(frozen=True, slots=True)
class New:
    """A placed request that has not begun."""

    instance: int
    predicted: float
    """Output tokens."""


def find_errors(
    ongoing: Sequence[Ongoing], repredicted: Sequence[float], instances: int
) -> list[Error]:
    """The errors l^e and b^e of each instance.

    `repredicted`: for each ongoing request that has outrun its prediction, what is predicted for
    it now; other entries are not read.
    """
    tokens, requests = [0.0] * instances, [0.0] * instances
    for request, again in zip(ongoing, repredicted, strict=True):
        i = request.instance
        if request.made > request.predicted:
            tokens[i] += again
            requests[i] += 1
        if request.ended and request.made < request.predicted:
            tokens[i] += request.made - request.predicted
            requests[i] -= 1
    return [Error(*each) for each in zip(tokens, requests, strict=True)]


def rebalance(
    new: Sequence[New], errors: Sequence[Error], k2: float, c2: float
) -> Mapping[int, int]:
    """New request (its index) -> the instance it moves to; those that stay are left out.

    Greedy, the longest first: one move at a time, each to where it lowers the sum of distances
    most. Ends after at most one move per request.
    """
    off = [error.find_ms(k2, c2) for error in errors]
    moves: dict[int, int] = {}
    for index in sorted(range(len(new)), key=lambda each: -new[each].predicted):
        request = new[index]
        ms = k2 * request.predicted + c2
        here = request.instance
        gain_here = abs(off[here]) - abs(off[here] - ms)
        there = min(
            (i for i in range(len(off)) if i != here),
            key=lambda i: abs(off[i] + ms) - abs(off[i]),
            default=here,
        )
        if there != here and gain_here > abs(off[there] + ms) - abs(off[there]):
            off[here] -= ms
            off[there] += ms
            moves[index] = there
    return moves
