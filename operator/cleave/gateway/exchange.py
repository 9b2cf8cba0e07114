"""The life of one completion request: attempts at engines, one answer to the client.

Made by a client's connection for each request; lives until the answer is complete, has failed or
the client is gone. Its attempt and the client's connection call back, the sweeper looks after the
deadline. What is hard: until the first byte has gone to the client everything may be tried again
elsewhere, after it another engine has to go on where this one was lost; and whichever way it ends,
books and connections are released exactly once.
"""

from http import HTTPStatus
from typing import Protocol

from cleave.gateway import head
from cleave.gateway.attempt import Attempt
from cleave.gateway.completion import Completion
from cleave.gateway.context import Context
from cleave.gateway.door import Visit
from cleave.gateway.engine import Call
from cleave.gateway.errors import (
    ApiError,
    fail_engine,
    from_router,
    is_missing_page,
    lack_page,
)
from cleave.gateway.handoff import HandoffError, read_usage, strip_handoff
from cleave.gateway.recovery import Failure, Recovery, choose
from cleave.gateway.relay import Relay, StreamLostError
from cleave.gateway.resume import RESUMABLE, Ending, NotResumableError, plan
from cleave.gateway.splice import SpliceError
from cleave.gateway.tally import Tally
from cleave.gateway.tenants import EVERYBODY, Tenant
from cleave.router.errors import NoInstance, QueueFull, RouterError, UnknownModel
from cleave.router.router import Phase

PARKED_S = 0.5
"""Between two looks for an instance that can go on with a stream."""

_LEAK = fail_engine(HTTPStatus.BAD_GATEWAY, "the engine's answer cannot be passed on")


class Client(Protocol):
    """Where the answer goes."""

    chunked: bool
    """Whether it understands chunked bodies (HTTP/1.1)."""
    keep_alive: bool
    """Whether it may send another request over its connection."""
    blocked: bool
    """Whether it takes bytes more slowly than they come."""

    def write(self, data: bytes) -> None:
        """Send bytes of the response."""

    def end(self, reusable: bool) -> None:
        """The response is complete; not reusable: close the connection after it."""

    def drop(self) -> None:
        """Close the connection at once."""


class Exchange:
    """One completion request. Events come from the client, from its attempt and the sweeper."""

    def __init__(
        self,
        context: Context,
        client: Client,
        path: bytes,
        request_id: bytes,
        body: Completion,
        tenant: Tenant = EVERYBODY,
    ) -> None:
        self._context = context
        self._client = client
        self._path = path
        self._request_id = request_id
        self._completion = body
        self._tenant = tenant
        self._visit: Visit | None = None
        """At the door; None: it was open."""
        self._tally = Tally(context.metrics, body.model)
        self._work = path, body
        """What engines are asked: the request, or the rest of it."""
        self._recovery: Recovery | None = None
        self._attempt: Attempt | None = None
        self._relay: Relay | None = None
        """The stream to the client, once it has begun."""
        self._progress = self._swept_progress = 0
        self._lost_at = 0
        """Events that had passed when an engine was lost in mid-stream."""
        self._loss: ApiError | None = None
        """Why the stream stands still, until another engine has gone on with it."""
        self._how = ""
        """How one does."""
        self._parked_until = self._next_look = 0.0
        self._started = context.clock()

    # --- what the client's connection and the sweeper call ---

    def start(self) -> None:
        """Place the request and send it off."""
        context = self._context
        context.exchanges.add(self)
        context.unanswered += 1
        context.metrics.in_flight += 1
        if context.unanswered > context.config.queue_limit:
            context.metrics.shed[self._tenant.name, "queue_full"] += 1
            self._answer_error(from_router(QueueFull("too many requests wait already")), "shed")
        elif context.door.open:
            self._try()
        else:
            self._knock()

    def admit(self) -> None:
        """It is its turn."""
        self._try()

    def turn_away(self, error: ApiError) -> None:
        """It has waited in vain."""
        self._answer_error(error, "shed")

    def cancel(self) -> None:
        """The client is gone: stop whatever runs for it."""
        self._end("cancelled")

    def hold(self, blocked: bool) -> None:
        """The client takes no more, or takes bytes again."""
        if self._attempt is not None:
            self._attempt.hold(blocked)

    def sweep(self, now: float) -> None:
        """Keep the deadline, which moves with every piece of a stream."""
        attempt = self._attempt
        if attempt is None:
            if self._loss is not None and now >= self._next_look:
                self._look_again(now, self._loss)
        elif self._progress != self._swept_progress:
            self._swept_progress = self._progress
            attempt.deadline = now + self._context.config.timeouts.idle_s
            attempt.pool.pulse.beat(now)
        elif now > attempt.deadline:
            if self._client.blocked:
                self._end("cancelled")
                self._client.drop()
            else:
                self.fail(Failure.TIMEOUT, "took too long")
        elif attempt.streaming and not self._client.blocked:
            pulse = attempt.pool.pulse
            if now - pulse.last > pulse.patience_s():
                self.fail(Failure.STALL, "stopped in the middle of its streams")

    # --- what the attempt calls ---

    def begin(self, call: Call) -> None:
        """A stream begins: from here on another attempt can only go on with it."""
        attempt, client, context = self._attempt, self._client, self._context
        assert attempt is not None
        now = context.clock()
        attempt.pool.pulse.start(now)
        # The first byte has come, so the prompt is computed.
        context.router.release(attempt.pick, Phase.PREFILL)
        if not context.breaker.calm:
            context.breaker.succeed(attempt.target.instance)
        self._loss = None
        if self._relay is not None:
            context.metrics.recoveries[self._completion.model, self._how] += 1
            attempt.hold(client.blocked)
            return
        context.unanswered -= 1
        self._tally.prompt_tokens = attempt.prompt_tokens or self._completion.prompt_tokens
        self._tally.begin("decode" if attempt.pick.prefill else "whole", attempt.sent_at, now)
        if self._visit is not None:
            context.door.observe(self._visit, now)
        fields = head.pass_on(call.headers) + attempt.labels
        if not client.keep_alive:
            fields += head.CLOSE
        first = head.build_stream_head(call.status, fields, self._request_id, client.chunked)
        self._relay = Relay(
            first,
            client.chunked,
            now,
            hides_ids=self._completion.numbered,
            opaque=self._path not in RESUMABLE,
        )

    def pass_on(self, piece: bytes, complete: bool) -> None:
        """Some of the stream."""
        relay = self._relay
        assert relay is not None
        self._progress += 1
        try:
            data = relay.pass_on(piece, complete)
        except HandoffError:
            self._break_off(relay, _LEAK)
            return
        except StreamLostError as lost:
            if lost.data:
                self._client.write(lost.data)
            self.fail(Failure.LOST, str(lost))
            return
        except SpliceError as error:
            name = self._name_instance()
            self._break_off(relay, fail_engine(HTTPStatus.BAD_GATEWAY, f"instance {name} {error}"))
            return
        if data:
            self._client.write(data)
        if self._tally.timed:
            self._tally.note_piece(self._context.clock())
        if complete:
            self._finish(relay)

    def answer(self, call: Call, body: bytes) -> None:
        """An answer that is not streamed."""
        attempt = self._attempt
        assert attempt is not None
        if self._relay is not None:
            self.fail(Failure.STATUS, "did not go on with the stream")
            return
        if not self._context.breaker.calm:
            self._context.breaker.succeed(attempt.target.instance)
        try:
            stripped = strip_handoff(body)
        except HandoffError:
            self._answer_error(_LEAK, "failed")
            return
        usage = read_usage(body)
        self._tally.output_tokens = usage.completion_tokens or 0
        self._tally.prompt_tokens = attempt.prompt_tokens or usage.prompt_tokens
        self._respond(call.status, head.pass_on(call.headers) + attempt.labels, stripped, "ok")

    def refuse(self, call: Call, body: bytes) -> None:
        """An engine's own 4xx goes to the client unchanged, unless it quotes the hand-off."""
        attempt = self._attempt
        assert attempt is not None
        if self._relay is not None:
            self.fail(Failure.STATUS, f"refused to go on with the stream: status {call.status}")
            return
        if self._path not in RESUMABLE and is_missing_page(call.status, body):
            self._answer_error(lack_page(self._path, self._completion.model), "refused")
            return
        if b"remote_engine_id" in body and attempt.prefill is None:
            refusal = ApiError(
                HTTPStatus(call.status), "the engine refused the request", "invalid_request_error"
            )
            self._answer_error(refusal, "refused")
            return
        self._respond(call.status, head.pass_on(call.headers), body, "refused")

    def fail(self, failure: Failure, reason: str) -> None:
        """An engine let the request down: again elsewhere, or tell the client."""
        attempt = self._attempt
        assert attempt is not None
        name = self._name_instance()
        late = failure in (Failure.TIMEOUT, Failure.STALL)
        status = HTTPStatus.GATEWAY_TIMEOUT if late else HTTPStatus.BAD_GATEWAY
        error = fail_engine(status, f"instance {name} {reason}")
        phase = "decode" if attempt.prefill is None else "prefill"
        context = self._context
        context.metrics.retries[phase, failure.value] += 1
        context.breaker.fail(name, context.clock(), surely=failure is Failure.STALL)
        if not self._note_failure(attempt, name, failure):
            self._give_up(error, "failed")
            return
        self._attempt = None
        attempt.end()
        if self._relay is None:
            self._try()
        else:
            self._resume(self._relay, error)

    def _note_failure(self, attempt: Attempt, name: str, failure: Failure) -> bool:
        """Whether another attempt is left."""
        recovery, relay = self._find_recovery(), self._relay
        if relay is not None and relay.events > self._lost_at:
            self._lost_at = relay.events
            if not recovery.renew():
                return False
        if attempt.prefill is None:
            split = attempt.pick.prefill is not None
            return recovery.note_decode(name, failure, split)
        return recovery.note_prefill(name) or self._context.router.allows_whole(True)

    def _name_instance(self) -> str:
        assert self._attempt is not None
        return self._attempt.target.instance

    def _find_recovery(self) -> Recovery:
        if self._recovery is None:
            self._recovery = Recovery()
        return self._recovery

    # --- doing ---

    def _knock(self) -> None:
        """Ask at the door."""
        completion = self._completion
        try:
            self._visit = self._context.door.enter(
                self, self._tenant, completion.model, completion.prompt_tokens, self._started
            )
        except ApiError as error:
            self._answer_error(error, "shed")
            return
        if not self._visit.waits:
            self._try()

    def _try(self) -> None:
        """Pick instances and make an attempt there."""
        context, (path, completion) = self._context, self._work
        doubt = () if context.breaker.calm else context.breaker.doubted(context.clock())
        try:
            pick = choose(context.router, completion, self._recovery, doubt)
        except RouterError as error:
            self._miss(error)
            return
        context.metrics.dispatches[completion.model, pick.reason] += 1
        self._attempt = Attempt(context, self, path, completion, pick)
        self._attempt.start()

    def _miss(self, error: RouterError) -> None:
        """No instance can take it now: wait for one, or give up."""
        context = self._context
        empty = isinstance(error, UnknownModel) and not context.router.directory.models
        missing = isinstance(error, NoInstance) or empty
        wake_s = context.config.timeouts.wake_s
        if missing and self._loss is None and wake_s > 0:
            self._loss = from_router(error)
            self._parked_until = context.clock() + wake_s
        if missing and self._loss is not None:
            self._next_look = context.clock() + PARKED_S
        else:
            self._give_up(from_router(error), "unavailable" if missing else "refused")

    def _resume(self, relay: Relay, error: ApiError) -> None:
        """Go on with a stream that lost its engine."""
        context, completion = self._context, self._completion
        if self._loss is None:
            self._parked_until = context.clock() + context.config.timeouts.resume_s
        self._loss = error
        try:
            planned = plan(
                self._path,
                completion,
                relay.read(),
                relay.prompt_ids,
                context.router.directory.find_max_model_len(completion.model),
            )
        except NotResumableError as reason:
            error.message = f"{error.message}; {reason}"
            self._break_off(relay, error)
            return
        if isinstance(planned, Ending):
            self._client.write(relay.finish(planned.events))
            self._finish(relay)
            return
        relay.splice(planned.splice)
        self._work = planned.path, planned.completion
        self._how = planned.how
        self._try()

    def _look_again(self, now: float, loss: ApiError) -> None:
        """No instance could go on with the stream; perhaps one can now."""
        if now > self._parked_until:
            self._give_up(loss, "unavailable")
        else:
            self._find_recovery().forgive()
            self._try()

    def _give_up(self, error: ApiError, outcome: str) -> None:
        """Tell the client, in the way that is left."""
        if self._relay is not None:
            self._break_off(self._relay, error)
        else:
            self._answer_error(error, outcome)

    def _finish(self, relay: Relay) -> None:
        """A stream is complete."""
        self._tally.end_stream(relay, self._started, self._context.clock(), complete=True)
        self._end("ok")
        self._client.end(reusable=True)

    def _break_off(self, relay: Relay, error: ApiError) -> None:
        """End a stream that has begun."""
        self._client.write(relay.break_off(error))
        self._tally.end_stream(relay, self._started, self._context.clock(), complete=False)
        self._end("broken")
        self._client.end(reusable=False)

    def _answer_error(self, error: ApiError, outcome: str) -> None:
        fields = head.JSON
        if error.retry_after_s is not None:
            fields += b"retry-after: %d\r\n" % error.retry_after_s
        self._respond(error.status, fields, error.to_json(), outcome)

    def _respond(self, status: int, fields: bytes, body: bytes, outcome: str) -> None:
        reusable = self._client.keep_alive and not self._context.draining
        if not reusable:
            fields += head.CLOSE
        self._client.write(head.build_head(status, fields, self._request_id, len(body)) + body)
        self._end(outcome)
        self._client.end(reusable)

    def _end(self, outcome: str) -> None:
        """Release everything, once."""
        context = self._context
        if self not in context.exchanges:
            return
        context.exchanges.discard(self)
        if self._relay is None:
            context.unanswered -= 1
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.end()
        context.metrics.in_flight -= 1
        model = self._completion.model
        known = model if model in context.router.directory.models else ""
        if self._relay is not None:
            self._tally.output_tokens = self._relay.events
        self._tally.end(known, self._tenant.name, outcome)
        visit, self._visit = self._visit, None
        if visit is not None:
            context.door.leave(visit, self._tally.output_tokens, context.clock())
