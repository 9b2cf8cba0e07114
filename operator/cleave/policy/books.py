"""How many tokens wait at an instance, from own dispatches and a stale report.

Called by the router at every dispatch, release and load report. Where several routers send, reports
are up to 100 ms old and count everybody's work; a router's own books are exact but know only its
own. Least pending tokens on their sum stays within 1-15 % of an oracle where stale reports alone
fall far behind.
What is hard: what is both in the report and in the books must count once.
"""

import math

INTERVAL_MS = 100
"""Of reports to a router that is one of several."""
MAX_INTERVAL_MS = 500
"""Far below what makes an instance doubtful."""
ALONE = 5
"""How many times as long a router can wait that alone sends requests."""


def find_interval_ms(asked_ms: int, routers: int) -> int:
    """How often an instance reports to one of so many routers (0: to somebody who sends nothing).

    Who alone sends requests knows them all, and dispatches as well without any report
    (benchmarks/dispatch); it hears what engines alone know: free blocks, whether they stand still.
    """
    return max(asked_ms, min(ALONE * asked_ms, MAX_INTERVAL_MS)) if routers == 1 else asked_ms


def estimate_pending(own: float, reported: float, own_at_report: float) -> float:
    """Tokens pending now: `own` live plus what others had when the report was taken.

    Others' share is the report less the own outstanding tokens at that time, floored at 0 because
    the engine works down own requests that the books hold in full until they are closed.
    """
    return own + max(reported - own_at_report, 0.0)


NOMINAL_TOKEN_MS = 0.1
"""Of a prompt, before anything is learnt."""
FADING = 1 - 1 / 200
"""About the last 200 passes count."""
TOGETHER = 0.1
"""Of the usual time for its tokens: what is answered faster was not computed by itself."""

MARGIN = 1.5
"""Of the spread that lengths do not explain; least is waited so (benchmarks/dispatch)."""

Sums = tuple[float, float, float, float, float, float, float, float, float]
"""Over what was answered: passes, prompts, their tokens, 1 / tokens of each pass, ms, ms / tokens
and ms squared / tokens of each pass; tokens and ms of the latest one."""
NOMINAL_SUMS: Sums = (0.1, 0.1, 200.0, 0.000_05, 20.0, 0.01, 2.0, 0.0, 0.0)
"""Before anything is learnt: a tenth of a prompt of 2,000 tokens."""


def predict_end_ms(
    pending: float, prompts: float, since_ms: float, prompt_ms: float, token_ms: float, tie: float
) -> float:
    """When a queue of `pending` tokens in `prompts` is through, in ms of a clock; no queue: `tie`.

    `since_ms`: when its first prompt began, which is when the one before it was answered. Times of
    one clock compare as what is left of the work does, without looking at the clock.
    """
    return tie if pending < 0.5 else since_ms + prompts * prompt_ms + pending * token_ms


def add_answer(sums: Sums, tokens: float, ms: float) -> Sums:
    """A prompt was answered, `ms` after it came first in its queue.

    Prompts of one pass are answered together, and all but the first seem to take no time. So the
    line is one through passes: what is answered that fast belongs to the pass before.
    """
    passes, prompts, all_tokens, inverses, all_ms, rates, squares, pass_tokens, pass_ms = sums
    whole, whole_ms = tokens, ms
    if ms * all_tokens < TOGETHER * tokens * all_ms and pass_tokens > 0.0:
        fading, begun = 1.0, 0.0
        whole, whole_ms = pass_tokens + tokens, pass_ms + ms
        inverses -= 1.0 / pass_tokens
        rates -= pass_ms / pass_tokens
        squares -= pass_ms * pass_ms / pass_tokens
    else:
        fading, begun = FADING, 1.0
    return (
        passes * fading + begun,
        prompts * fading + 1.0,
        all_tokens * fading + tokens,
        inverses * fading + 1.0 / whole,
        all_ms * fading + ms,
        rates * fading + whole_ms / whole,
        squares * fading + whole_ms * whole_ms / whole,
        whole,
        whole_ms,
    )


def fit_line(sums: Sums) -> tuple[float, float, float]:
    """(ms of a prompt, ms of each of its tokens, the same with a margin); none is below 0.

    By least squares of errors that grow as the root of the tokens: those of long prompts are larger
    and short ones tell most of what each takes. One pass more is added that takes no time, for
    where all are alike nothing tells the two apart, and all is the tokens' then.
    What the line does not explain, mistaken lengths above all, makes the margin: of a prompt that
    should be through by now nobody knows how much is left, so that too late is foretold rather
    than too early.
    """
    passes, prompts, tokens, inverses, ms, rates, squares, _, _ = sums
    spread = inverses * tokens + passes - passes * passes
    each_ms = 0.0
    # Sums that several have told at the very same time may not go together.
    if spread > 0.0:
        each_ms = min(max((rates * tokens - ms * passes) / spread, 0.0), ms / passes)
    token_ms = (ms - each_ms * passes) / tokens
    unexplained = squares - each_ms * rates - token_ms * ms
    unexplained -= each_ms * (rates - each_ms * inverses - token_ms * passes)
    margin_ms = MARGIN * math.sqrt(max(unexplained, 0.0) / tokens)
    return each_ms * passes / prompts, token_ms, token_ms + min(margin_ms, ms / tokens)


class Queue:
    """How fast an instance computes prompts, and since when it is at the first in its queue.

    What is hard: a prompt that is half computed still counts in full in the books, which makes
    pending tokens choose a third worse than the remaining work would (benchmarks/dispatch). What
    has passed since the last answer tells how much of it is done.
    """

    __slots__ = ("_sums", "prompt_ms", "safe_token_ms", "since_ms", "token_ms")

    def __init__(self) -> None:
        self.since_ms = 0.0
        self._sums: Sums = NOMINAL_SUMS
        self.prompt_ms = 0.0
        """Time for a prompt, however short."""
        self.token_ms = NOMINAL_TOKEN_MS
        """Time for each of its tokens."""
        self.safe_token_ms = NOMINAL_TOKEN_MS
        """The same with a margin, by which queues are compared."""

    def answer(self, tokens: float, now_ms: float, others: float = 0.0) -> float:
        """A prompt of that many tokens was answered, the next one begins; how long it took.

        `others`: tokens that others have sent there, which may be what took the time.
        """
        ms = now_ms - self.since_ms
        self.since_ms = now_ms
        # What was cached in full tells nothing.
        if tokens >= 1.0 and others < 0.5:
            self._sums = add_answer(self._sums, tokens, ms)
            self.prompt_ms, self.token_ms, self.safe_token_ms = fit_line(self._sums)
        return ms

    def predict_ms(self, tokens: float, prompts: float) -> float:
        """How long that much will take."""
        return prompts * self.prompt_ms + tokens * self.token_ms

    def count_prompts(self, tokens: float) -> float:
        """How many prompts that many tokens are."""
        return tokens * self._sums[1] / self._sums[2]


class Book:
    """Tokens outstanding at one instance in one phase. All amounts in tokens."""

    __slots__ = ("_others", "own")

    def __init__(self) -> None:
        self.own = 0.0
        self._others = 0.0

    @property
    def others(self) -> float:
        """What those have there that keep books of their own, as the latest report tells."""
        return self._others

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

    def report(self, reported: float) -> float:
        """The instance's own count arrived; what is outstanding of those that keep this book."""
        self._others = estimate_pending(0.0, reported, self.own)
        return self.own
