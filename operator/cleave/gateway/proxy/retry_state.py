"""Retry state of one request since its first failure: what failed, and what to send next.

Used by the proxied request; no I/O. It chooses between another attempt, the rest of a stream from
another engine, waiting for an instance, and the end. `retry_policy` limits the retries of one
request, `retry_budget` those of a model; `suspect_requests` assesses whether the request is the
cause; `resumption` plans the continuation of a stream.
"""

import enum
import logging

from cleave.gateway.context import GatewayContext
from cleave.gateway.failover.resumption import StreamEnding, plan_resumption
from cleave.gateway.failover.retry_policy import Failure, FailureHistory, pick_instances
from cleave.gateway.http.completion_request import CompletionRequest
from cleave.gateway.http.errors import GatewayError
from cleave.gateway.proxy.attempt import Attempt
from cleave.gateway.proxy.sse_relay import SseRelay
from cleave.gateway.upstream.suspect_requests import (
    MEMORY_S,
    RECENT_S,
    TOLERATED_ENGINES,
    EngineFailure,
    Suspicion,
    assess_failures,
)
from cleave.router.router import Pick

log = logging.getLogger(__name__)

RETRY_INTERVAL_S = 0.5
"""Between two tries to find an instance."""


class RetryDecision(enum.Enum):
    """What to do about the next attempt."""

    START = "start"
    WAIT = "wait"
    """Ask again at the next sweep."""
    GIVE_UP = "give up"
    """It has waited too long for the model's retry budget."""
    REFUSE = "refuse"
    """The request ends the engines that run it."""


class RetryState:
    """Retry state of one request."""

    __slots__ = (
        "_context", "_engine_failures", "_failed_at", "_is_waiting", "_needs_slot",
        "_next_retry_at", "_path", "_progress_at_loss", "_sender", "_slot_since", "_wait_until",
        "completion", "history", "last_error", "next_request", "pending_error", "recovery_mode",
    )  # fmt: skip

    def __init__(
        self, context: GatewayContext, path: bytes, completion: CompletionRequest, sender: str
    ) -> None:
        self._context = context
        self._sender = sender
        self._path = path
        self.completion = completion
        self.next_request = path, completion
        """The path and body of the next attempt: the request, or the rest of it."""
        self.history: FailureHistory | None = None
        self.recovery_mode = "again"
        """How another engine continues the stream: continued or replayed; again: none does."""
        self.pending_error: GatewayError | None = None
        """The error to report if no instance takes the request in time; None when one has."""
        self.last_error: GatewayError | None = None
        """Of the latest failed attempt."""
        self._progress_at_loss = 0
        """That of the relay when an engine was last lost in mid-stream."""
        self._wait_until = self._next_retry_at = self._failed_at = 0.0
        self._engine_failures: list[EngineFailure] = []
        """Failures of which the request may be the cause."""
        self._needs_slot = False
        """Whether its retries count toward the model's budget: an engine received it."""
        self._slot_since: float | None = None
        """Since when one counts; None: none does."""
        self._is_waiting = False
        """The latest decision was to wait."""

    def record_failure(self, attempt: Attempt, failure: Failure, relay: SseRelay | None) -> bool:
        """Record a failed attempt; returns whether another one is within the budget."""
        self.release_slot()
        if failure is Failure.TOO_LONG:
            return False
        history = self._get_history()
        self._failed_at = now = self._context.clock()
        self._needs_slot = self._needs_slot or failure is not Failure.UNREACHED
        has_progressed = relay is not None and relay.progress > self._progress_at_loss
        is_cause_possible = not has_progressed or now - attempt.sent_at < RECENT_S
        if failure in (Failure.LOST, Failure.STATUS) and is_cause_possible:
            target, is_broken = attempt.target, failure is Failure.LOST
            self._engine_failures.append(EngineFailure(target.instance, target.boot_id, is_broken))
        if relay is not None and has_progressed:
            self._progress_at_loss = relay.progress
            if not history.reset_budget():
                return False
        is_retried = self._record_attempt(history, attempt, failure)
        registry = self._context.router.registry
        history.extend_to_ranks(registry.list_ranks(attempt.target.instance))
        return is_retried

    def _record_attempt(self, history: FailureHistory, attempt: Attempt, failure: Failure) -> bool:
        instance = attempt.target.instance
        if attempt.prefill is None:
            prefill = attempt.pick.prefill
            if prefill is not None:
                history.record_cached_prompt(prefill.boot_id, attempt.prompt_tokens, failure)
            return history.record_decode_failure(instance, failure, prefill is not None)
        router = self._context.router
        return history.record_prefill_failure(instance) or router.allows_colocated(True)

    def decide(self) -> RetryDecision:
        """Whether the next attempt may start now. Then it counts toward the model's retry budget
        until `release_slot`."""
        context, now, model = self._context, self._context.clock(), self.completion.model
        waited_s, was_waiting = now - self._failed_at, self._is_waiting
        registry = context.router.registry
        is_suspect = context.suspect_senders.check(self._sender, registry, now)
        tolerated = 0 if is_suspect else TOLERATED_ENGINES
        suspicion = assess_failures(self._engine_failures, registry, waited_s, tolerated)
        if suspicion is Suspicion.SUSPECT:
            return RetryDecision.REFUSE
        self._is_waiting = suspicion is Suspicion.OPEN
        if not self._is_waiting and self._needs_slot and self._slot_since is None:
            if context.retry_budget.acquire(model, now):
                self._slot_since = now
            elif waited_s > context.config.timeouts.resume_s:
                return RetryDecision.GIVE_UP
            else:
                self._is_waiting = True
                if not was_waiting:
                    context.metrics.retries_delayed[model] += 1
        return RetryDecision.WAIT if self._is_waiting else RetryDecision.START

    def record_suspect(self, request_id: bytes) -> None:
        """The request has ended engines: it is refused, and its sender is confined."""
        context, now = self._context, self._context.clock()
        context.suspect_requests.add(self._path, self.completion, now)
        context.suspect_senders.add(self._sender, now)
        context.metrics.suspects[self.completion.model] += 1
        log.warning(
            "request %s to %s has ended engines: it is refused for %.0f s, and others of its "
            "sender get one engine at a time",
            request_id.decode(), self._path.decode(), MEMORY_S,
        )  # fmt: skip

    def release_slot(self) -> None:
        """The attempt has its first byte, or the request has ended; may be called again."""
        if self._slot_since is not None:
            self._context.retry_budget.release(self.completion.model, self._slot_since)
            self._slot_since = None

    def prepare_resume(self, relay: SseRelay, error: GatewayError) -> StreamEnding | None:
        """Prepare the continuation of a stream; a StreamEnding if only its last events are missing.
        Raises NotResumableError."""
        context, completion = self._context, self.completion
        self.start_waiting(error, context.config.timeouts.resume_s)
        limit = context.router.registry.find_max_model_len(completion.model)
        planned = plan_resumption(self._path, completion, relay.read_transcript(), limit)
        if isinstance(planned, StreamEnding):
            return planned
        relay.set_splice(planned.splice)
        self.next_request = planned.path, planned.completion
        self.recovery_mode = planned.mode
        return None

    def start_waiting(self, error: GatewayError, seconds: float) -> None:
        """Allow so many seconds for an instance to come, counted from the first call."""
        if self.pending_error is None:
            self._wait_until = self._context.clock() + seconds
        self.pending_error = error

    def wait_for_instance(self) -> bool:
        """Schedule another try to find an instance; False: the waiting time is over."""
        now = self._context.clock()
        self._next_retry_at = now + RETRY_INTERVAL_S
        return self.pending_error is not None and now < self._wait_until

    def check_retry_due(self, now: float) -> bool:
        """Whether another try to start an attempt is due. One that waited for an instance may use
        excluded ones again."""
        if self._is_waiting:
            return True
        if self.pending_error is None or now < self._next_retry_at:
            return False
        self._get_history().clear_exclusions()
        return True

    def _get_history(self) -> FailureHistory:
        if self.history is None:
            self.history = FailureHistory()
        return self.history


def pick_for(
    context: GatewayContext,
    completion: CompletionRequest,
    history: FailureHistory | None,
    sender: str,
    session: bytes | None,
) -> Pick:
    """Pick instances for the next attempt. Raises RouterError."""
    breaker, senders, router = context.circuit_breaker, context.suspect_senders, context.router
    suspects = breaker.list_suspects(context.clock()) if breaker.failure_states else ()
    model, registry, now = completion.model, router.registry, context.clock()
    if not senders.is_suspect(sender, registry, now):
        pick = pick_instances(router, completion, history, suspects, session)
    else:
        closed = senders.list_closed(sender, model, registry)
        pick = pick_instances(
            router, completion, history, suspects, session, is_confined=True, closed=closed
        )
    senders.record_start(sender, model, pick, registry, now)
    return pick
