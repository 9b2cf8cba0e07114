"""Retry state of one request: what failed so far, and what to send next. Made after the first
failure.

Used by the exchange; no I/O. It chooses between another attempt, the rest of a stream from another
engine, waiting for an instance, and the end. `recovery` holds the retry budgets, `resume` plans the
continuation of a stream.
"""

from cleave.gateway.context import Context
from cleave.gateway.failover.resumption import Ending, plan
from cleave.gateway.failover.retry_policy import Failure, Recovery
from cleave.gateway.http.completion_request import Completion
from cleave.gateway.http.errors import ApiError
from cleave.gateway.proxy.attempt import Attempt
from cleave.gateway.proxy.sse_relay import Relay

PARKED_S = 0.5
"""Between two tries to find an instance."""


class Rescue:
    """Retry state of one request."""

    __slots__ = (
        "_context",
        "_lost_at",
        "_next_look",
        "_path",
        "_until",
        "completion",
        "how",
        "loss",
        "recovery",
        "work",
    )

    def __init__(self, context: Context, path: bytes, completion: Completion) -> None:
        self._context = context
        self._path = path
        self.completion = completion
        self.work = path, completion
        """The path and body of the next attempt: the request, or the rest of it."""
        self.recovery: Recovery | None = None
        self.how = ""
        """How another engine continues the stream: continued or replayed; empty before."""
        self.loss: ApiError | None = None
        """The error to report if no instance takes the request in time; None when one has."""
        self._lost_at = 0
        """Events sent to the client when an engine was last lost in mid-stream."""
        self._until = self._next_look = 0.0

    def note(self, attempt: Attempt, failure: Failure, relay: Relay | None) -> bool:
        """Record a failed attempt; returns whether another one is within the budget."""
        recovery = self._find_recovery()
        if relay is not None and relay.events > self._lost_at:
            self._lost_at = relay.events
            if not recovery.renew():
                return False
        instance = attempt.target.instance
        if attempt.prefill is None:
            prefill = attempt.pick.prefill
            if prefill is not None:
                recovery.note_prompt(prefill.boot_id, attempt.prompt_tokens, failure)
            return recovery.note_decode(instance, failure, prefill is not None)
        return recovery.note_prefill(instance) or self._context.router.allows_whole(True)

    def resume(self, relay: Relay, error: ApiError) -> Ending | None:
        """Prepare the continuation of a stream; returns an Ending if only its last events are
        missing.

        Raises NotResumableError.
        """
        context, completion = self._context, self.completion
        self.wait_for(error, context.config.timeouts.resume_s)
        limit = context.router.directory.find_max_model_len(completion.model)
        planned = plan(self._path, completion, relay.read(), relay.prompt_ids, limit)
        if isinstance(planned, Ending):
            return planned
        relay.splice(planned.splice)
        self.work = planned.path, planned.completion
        self.how = planned.how
        return None

    def wait_for(self, error: ApiError, seconds: float) -> None:
        """Allow so many seconds for an instance to come, counted from the first call."""
        if self.loss is None:
            self._until = self._context.clock() + seconds
        self.loss = error

    def park(self) -> bool:
        """Schedule another try to find an instance; False: the waiting time is over."""
        now = self._context.clock()
        self._next_look = now + PARKED_S
        return self.loss is not None and now < self._until

    def looks(self, now: float) -> bool:
        """Whether another try to find an instance is due; it may use excluded instances again."""
        if self.loss is None or now < self._next_look:
            return False
        self._find_recovery().forgive()
        return True

    def _find_recovery(self) -> Recovery:
        if self.recovery is None:
            self.recovery = Recovery()
        return self.recovery
