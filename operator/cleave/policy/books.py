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


NOMINAL_TOKEN_MS = 0.1
"""Of a prompt, before anything is learnt."""
NOMINAL_TOKENS = 2_000.0
"""How much that counts beside what is learnt."""
FADING = 1 - 1 / 200
"""About the last 200 prompts count."""


def predict_end_ms(pending: float, since_ms: float, token_ms: float, tie: float) -> float:
    """When a queue of `pending` prompt tokens is through, in ms of some clock; without one: `tie`.

    `since_ms`: when its first prompt began, which is when the one before it was answered. Times of
    one clock compare as what is left of the work does, without looking at the clock.
    """
    return tie if pending < 0.5 else since_ms + pending * token_ms


class Queue:
    """How fast an instance computes prompts, and since when it is at the first in its queue.

    What is hard: a prompt that is half computed still counts in full in the books, which makes
    pending tokens choose a third worse than the remaining work would (benchmarks/dispatch). What
    has passed since the last answer tells how much of it is done.
    """

    __slots__ = ("_learnt_ms", "_learnt_tokens", "since_ms", "token_ms")

    def __init__(self) -> None:
        self.since_ms = 0.0
        self._learnt_ms = NOMINAL_TOKEN_MS * NOMINAL_TOKENS
        self._learnt_tokens = NOMINAL_TOKENS
        self.token_ms = NOMINAL_TOKEN_MS
        """Time for a token of a prompt."""

    def sync(self) -> None:
        """Tell and hear what others know of it that keep the same books; there are none here."""

    def answer(self, tokens: float, now_ms: float) -> float:
        """A prompt of that many tokens was answered, the next one begins; how long it took."""
        ms = now_ms - self.since_ms
        self._learnt_ms = self._learnt_ms * FADING + ms
        self._learnt_tokens = self._learnt_tokens * FADING + tokens
        self.token_ms = self._learnt_ms / self._learnt_tokens
        self.since_ms = now_ms
        return ms


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
