"""Requests with `service_tier: flex` fill idle capacity: when one may start, and how many may run.

Used by the admission controller, one window per model. Pure; time is passed in. The tier is that of
OpenAI's API: cheaper, slower, refused when resources are short. What is hard: what looks idle is
not, because a request holds its seat until its last token, while others arrive at any time. Three
rules keep room for them. A request of this tier starts only where the prompt queue is next to empty
and KV is free, so that a prompt which arrives waits for little. And as many run as leave the time
per token of the other streams well below its target: the number grows as they finish, and halves
when a stream comes near the target (additive increase, multiplicative decrease; Chiu, Jain, 1989).
"""

import math

BACKLOG_LIMIT_TOKENS = 512.0
"""Prompt tokens in the shortest queue up to which a request may start there: a quarter of the size
at which prefill saturates (Splitwise, section IV-B)."""
TTFT_SHARE = 0.1
"""Share of the TTFT target that these tokens may take, once it is known how long they take."""
MAX_KV_USAGE = 0.75
"""Used share of the KV up to which a request may start; others and growing outputs get the rest."""
WAITING_SHARE = 1 / 16
"""Requests that may wait in an engine, of those that run there, and one more: whose KV arrives."""
INITIAL_LIMIT = 4.0
MAX_LIMIT = 4_096.0
NEAR_SHARE = 0.8
"""Share of the TPOT target from which a stream counts as near it."""
SETTLE_S = 1.0
"""Streams that began earlier after a decrease say nothing about the smaller number."""


def has_idle_capacity(backlog_tokens: float, limit_tokens: float, kv_usage: float) -> bool:
    """Whether a request of this tier may start. `backlog_tokens`: prompt tokens in the shortest
    queue, at most `limit_tokens` of them; `kv_usage`: used share of the emptiest KV, 0..1."""
    return backlog_tokens <= limit_tokens and kv_usage <= MAX_KV_USAGE


def has_seats(num_running: int, num_waiting: int) -> bool:
    """Whether an engine with these requests lets none wait for a seat. Those whose KV is on its way
    wait as well, a few at a time."""
    return num_waiting <= 1 + WAITING_SHARE * num_running


class FlexWindow:
    """How many requests of the tier may run at a time for one model."""

    __slots__ = ("_settled_at", "_slow_from", "limit", "num_running")

    def __init__(self) -> None:
        self.limit = INITIAL_LIMIT
        self.num_running = 0
        self._slow_from = math.inf
        """Limit above which it grows slowly, as it was too high once."""
        self._settled_at = -math.inf
        """Seconds; streams that began later ran beside at most `limit` requests. Infinite after a
        decrease, while more run."""

    @property
    def is_open(self) -> bool:
        """Whether one more may run."""
        return self.num_running + 1 <= self.limit

    def start(self) -> None:
        """A request of the tier starts."""
        self.num_running += 1

    def finish(self, now: float, *, is_ok: bool) -> None:
        """One has ended. Where as many ran as may, more may run from now on: twice as many after
        each round, and one more above a limit that was too high once. One that was not answered
        raises no limit: it may have ended at once, so it shows of no other that there is room."""
        was_full = not self.is_open
        self.num_running -= 1
        if self._settled_at == math.inf and self.num_running <= self.limit:
            self._settled_at = now + SETTLE_S
        elif is_ok and was_full and now >= self._settled_at:
            step = 1.0 if self.limit < self._slow_from else 1.0 / self.limit
            self.limit = min(self.limit + step, MAX_LIMIT)

    def observe_stream(self, began_at: float, tpot_s: float, target_s: float, now: float) -> None:
        """A stream of another tier has ended; `began_at`: when its first byte came. Without a
        target (0) nothing follows."""
        if not self.num_running or began_at < self._settled_at or target_s <= 0:
            return
        if tpot_s > NEAR_SHARE * target_s:
            self.limit = self._slow_from = max(1.0, min(self.limit, self.num_running) / 2)
            self._settled_at = math.inf if self.num_running > self.limit else now + SETTLE_S
