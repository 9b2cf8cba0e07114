"""How many tokens wait at an instance, from own dispatches and a stale report.

Called by the router at every dispatch, release and load report. A report is up to 100 ms old and
counts everybody's work; the router's own books are exact but know only its own. Least pending
tokens on their sum stays within 1-15 % of an oracle where stale reports alone fall far behind.
What is hard: what is both in the report and in the books must count once.
"""


def estimate_pending(own: float, reported: float, own_at_report: float) -> float:
    """Tokens pending now: `own` live plus what others had when the report was taken.

    Others' share is the report less the own outstanding tokens at that time, floored at 0 because
    the engine works down own requests that the books hold in full until they are closed.
    """
    return own + max(reported - own_at_report, 0.0)


class Book:
    """Tokens outstanding at one instance in one phase. All amounts in tokens."""

    __slots__ = ("_others", "own")

    def __init__(self) -> None:
        self.own = 0.0
        self._others = 0.0

    @property
    def pending(self) -> float:
        """The estimate that dispatch compares."""
        return self.own + self._others

    def enter(self, tokens: float) -> None:
        """A request of ours was sent there."""
        self.own += tokens

    def close(self, tokens: float) -> None:
        """That request, or its phase, has ended."""
        self.own -= tokens

    def report(self, reported: float) -> None:
        """The instance's own count arrived."""
        self._others = estimate_pending(0.0, reported, self.own)
