"""What a request has been through, and what is asked next. Made by its exchange when one fails.

No I/O: it decides between another attempt, the rest of a stream from another engine, a wait for one
and the end. `recovery` knows the budgets, `resume` the ways to go on.
"""

from cleave.gateway.completion import Completion
from cleave.gateway.context import Context
from cleave.gateway.errors import ApiError
from cleave.gateway.exchanges.attempt import Attempt
from cleave.gateway.exchanges.relay import Relay
from cleave.gateway.recovery.recovery import Failure, Recovery
from cleave.gateway.recovery.resume import Ending, plan

PARKED_S = 0.5
"""Between two looks for an instance."""


class Rescue:
    """One request in trouble."""

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
        """What engines are asked: the request, or the rest of it."""
        self.recovery: Recovery | None = None
        self.how = ""
        """How another engine goes on with the stream."""
        self.loss: ApiError | None = None
        """Why it stands still, until an instance has taken it."""
        self._lost_at = 0
        """Events that had passed when an engine was lost in mid-stream."""
        self._until = self._next_look = 0.0

    def note(self, attempt: Attempt, failure: Failure, relay: Relay | None) -> bool:
        """An attempt failed; whether another is left."""
        recovery = self._find_recovery()
        if relay is not None and relay.events > self._lost_at:
            self._lost_at = relay.events
            if not recovery.renew():
                return False
        name = attempt.target.instance
        if attempt.prefill is None:
            prefill = attempt.pick.prefill
            if prefill is not None:
                recovery.note_prompt(prefill.boot_id, attempt.prompt_tokens, failure)
            return recovery.note_decode(name, failure, prefill is not None)
        return recovery.note_prefill(name) or self._context.router.allows_whole(True)

    def resume(self, relay: Relay, error: ApiError) -> Ending | None:
        """Prepare another engine to go on with a stream, unless only its end is missing.

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

    def wait_for(self, loss: ApiError, seconds: float) -> None:
        """Wait so long for an instance, counted from the first time it is said."""
        if self.loss is None:
            self._until = self._context.clock() + seconds
        self.loss = loss

    def park(self) -> bool:
        """No instance can take it: whether it may wait until one can."""
        now = self._context.clock()
        self._next_look = now + PARKED_S
        return self.loss is not None and now < self._until

    def looks(self, now: float) -> bool:
        """Whether it is time to look for an instance again."""
        if self.loss is None or now < self._next_look:
            return False
        self._find_recovery().forgive()
        return True

    def _find_recovery(self) -> Recovery:
        if self.recovery is None:
            self.recovery = Recovery()
        return self.recovery
