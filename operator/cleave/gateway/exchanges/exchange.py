"""The life of one completion request: attempts at engines, one answer to the client.

Made by a client's connection for each request; lives until the answer is complete, has failed or
the client is gone. Its attempt and the client's connection call back, the sweeper looks after the
deadline. What is hard: until the first byte has gone to the client everything may be tried again
elsewhere, after it another engine has to go on where this one was lost; and whichever way it ends,
books and connections are released exactly once.
"""

from http import HTTPStatus

from cleave.gateway import head
from cleave.gateway.admission.door import Visit
from cleave.gateway.admission.tenants import EVERYBODY, Tenant
from cleave.gateway.completion import Completion
from cleave.gateway.context import Context
from cleave.gateway.counts.tally import TIMED_MASK, count
from cleave.gateway.engines.engine import Call
from cleave.gateway.engines.handoff import HandoffError, read_usage, strip_handoff
from cleave.gateway.errors import (
    LEAK,
    ApiError,
    build_error_fields,
    fail_engine,
    from_router,
    hide_refusal,
    is_missing_page,
    lack_page,
)
from cleave.gateway.exchanges.attempt import Attempt
from cleave.gateway.exchanges.audience import Client
from cleave.gateway.exchanges.relay import Relay, StreamLostError
from cleave.gateway.exchanges.rescue import Rescue
from cleave.gateway.recovery.recovery import Failure, choose
from cleave.gateway.recovery.resume import RESUMABLE, NotResumableError
from cleave.gateway.recovery.splice import SpliceError
from cleave.router.errors import NoInstance, QueueFull, RouterError
from cleave.router.router import Phase, Pick

_PREFILL = Phase.PREFILL


class Exchange:
    """One completion request. Events come from the client, from its attempt and the sweeper."""

    _attempt_type: type[Attempt] = Attempt

    def __init__(
        self,
        context: Context,
        client: Client,
        path: bytes,
        request_id: bytes,
        body: Completion,
        tenant: Tenant = EVERYBODY,
        session: bytes | None = None,
        fields: bytes = b"",
    ) -> None:
        self._context = context
        self._client = client
        self._path = path
        self._request_id = request_id
        self._completion = body
        self._tenant = tenant
        self._session = session
        self._fields = fields
        self._visit: Visit | None = None
        """At the door; None: it was open."""
        self._rescue: Rescue | None = None
        """None: nothing has failed."""
        self._attempt: Attempt | None = None
        self._relay: Relay | None = None
        """The stream to the client, once it has begun."""
        self._pick: Pick | None = None
        """Whose stream began."""
        self._progress = self._swept_progress = 0
        self._gap_from = 0.0
        """Seconds, when a piece came; 0: its gaps are not timed."""
        self._prompt_tokens = self._output_tokens = 0
        self._started = context.clock()

    # --- what the client's connection and the sweeper call ---

    def start(self) -> None:
        """Place the request and send it off."""
        context = self._context
        context.exchanges.add(self)
        context.unanswered += 1
        context.metrics.in_flight += 1
        if context.unanswered > context.queue_limit:
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
            if self._rescue is not None and self._rescue.looks(now):
                self._try()
        elif self._progress != self._swept_progress:
            self._swept_progress = self._progress
            attempt.deadline = now + self._context.config.timeouts.idle_s
            attempt.pulse.beat(now)
        elif now > attempt.deadline:
            if self._client.blocked:
                self._end("cancelled")
                self._client.drop()
            else:
                self.fail(Failure.TIMEOUT, "took too long")
        elif attempt.streaming and not self._client.blocked:
            pulse = attempt.pulse
            if now - pulse.last > pulse.patience_s():
                self.fail(Failure.STALL, "stopped in the middle of its streams")

    # --- what the attempt calls ---

    def begin(self, call: Call) -> None:
        """A stream begins: from here on another attempt can only go on with it."""
        attempt, client, context = self._attempt, self._client, self._context
        assert attempt is not None
        now = context.clock()
        # What was before may have been an idle time, so it is no pause of the engine's.
        attempt.pulse.last = now
        # The first byte has come, so the prompt is computed.
        context.router.release(attempt.pick, _PREFILL)
        if context.breaker.standing:
            context.breaker.succeed(attempt.target.instance)
        rescue = self._rescue
        if rescue is not None:
            rescue.loss = None
        if self._relay is not None:
            assert rescue is not None
            context.metrics.recoveries[self._completion.model, rescue.how] += 1
            attempt.hold(client.blocked)
            return
        context.unanswered -= 1
        self._prompt_tokens = attempt.prompt_tokens or self._completion.prompt_tokens
        self._pick = attempt.pick
        metrics = context.metrics
        metrics.streams = number = metrics.streams + 1
        if not number & TIMED_MASK:
            self._gap_from = now
        if attempt.pick.prefill is not None:
            phases = metrics.models[self._completion.model].phases
            phases["decode"].observe(now - attempt.sent_at)
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
            self._completion.numbered,
            self._path not in RESUMABLE,
            self._completion.asks_ids,
        )

    def receive(self, call: Call, piece: bytes, complete: bool) -> None:
        """Some of the stream."""
        del call
        relay = self._relay
        assert relay is not None
        self._progress += 1
        try:
            data = relay.pass_on(piece, complete)
        except HandoffError:
            self._break_off(relay, LEAK)
            return
        except StreamLostError as lost:
            if lost.data:
                self._client.write(lost.data)
            self.fail(Failure.LOST, str(lost))
            return
        except SpliceError as error:
            assert self._attempt is not None
            name = self._attempt.target.instance
            self._break_off(relay, fail_engine(HTTPStatus.BAD_GATEWAY, f"instance {name} {error}"))
            return
        if data:
            self._client.write(data)
        if self._gap_from:
            self._note_gap()
        if complete:
            self._finish()

    def lose(self, call: Call, reason: str) -> None:
        """The stream broke."""
        del call
        self.fail(Failure.LOST, reason)

    def answer(self, call: Call, body: bytes) -> None:
        """An answer that is not streamed."""
        attempt = self._attempt
        assert attempt is not None
        if self._relay is not None:
            self.fail(Failure.STATUS, "did not go on with the stream")
            return
        if self._context.breaker.standing:
            self._context.breaker.succeed(attempt.target.instance)
        try:
            stripped = strip_handoff(body)
        except HandoffError:
            self._answer_error(LEAK, "failed")
            return
        usage = read_usage(body)
        self._output_tokens = usage.completion_tokens or 0
        self._prompt_tokens = attempt.prompt_tokens or usage.prompt_tokens
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
            self._answer_error(hide_refusal(call.status), "refused")
            return
        self._respond(call.status, head.pass_on(call.headers), body, "refused")

    def fail(self, failure: Failure, reason: str) -> None:
        """An engine let the request down: again elsewhere, or tell the client."""
        attempt = self._attempt
        assert attempt is not None
        name = attempt.target.instance
        late = failure in (Failure.TIMEOUT, Failure.STALL)
        status = HTTPStatus.GATEWAY_TIMEOUT if late else HTTPStatus.BAD_GATEWAY
        error = fail_engine(status, f"instance {name} {reason}")
        phase = "decode" if attempt.prefill is None else "prefill"
        context = self._context
        context.metrics.retries[phase, failure.value] += 1
        context.breaker.fail(name, context.clock(), surely=failure is Failure.STALL)
        rescue = self._find_rescue()
        if not rescue.note(attempt, failure, self._relay):
            self._give_up(error, "failed")
            return
        self._attempt = None
        attempt.end()
        if self._relay is None:
            self._try()
        else:
            self._resume(rescue, self._relay, error)

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
        context, rescue = self._context, self._rescue
        path, completion, past = self._path, self._completion, None
        if rescue is not None:
            (path, completion), past = rescue.work, rescue.recovery
        doubt = context.breaker.doubted(context.clock()) if context.breaker.standing else ()
        try:
            pick = choose(context.router, completion, past, doubt, self._session)
        except RouterError as error:
            self._miss(error)
            return
        context.metrics.dispatches[completion.model, pick.reason] += 1
        self._attempt = self._attempt_type(context, self, path, completion, pick, self._fields)
        self._attempt.start()

    def _miss(self, error: RouterError) -> None:
        """No instance can take it now: wait for one, or give up."""
        context = self._context
        missing = isinstance(error, NoInstance)
        told = from_router(error)
        if missing:
            rescue = self._find_rescue()
            if rescue.loss is None:
                rescue.wait_for(told, context.config.timeouts.wake_s)
            if rescue.park():
                return
            told = rescue.loss or told
        self._give_up(told, "unavailable" if missing else "refused")

    def _resume(self, rescue: Rescue, relay: Relay, error: ApiError) -> None:
        """Go on with a stream that lost its engine."""
        try:
            ending = rescue.resume(relay, error)
        except NotResumableError as reason:
            error.message = f"{error.message}; {reason}"
            self._break_off(relay, error)
            return
        if ending is None:
            self._try()
        else:
            self._client.write(relay.finish(ending.events))
            self._finish()

    def _find_rescue(self) -> Rescue:
        if self._rescue is None:
            self._rescue = Rescue(self._context, self._path, self._completion)
        return self._rescue

    def _note_gap(self) -> None:
        now = self._context.clock()
        assert self._pick is not None
        counted = self._context.metrics.models[self._completion.model]
        counted.itl[self._pick.decode.role].observe(now - self._gap_from)
        self._gap_from = now

    def _give_up(self, error: ApiError, outcome: str) -> None:
        """Tell the client, in the way that is left."""
        if self._relay is not None:
            self._break_off(self._relay, error)
        else:
            self._answer_error(error, outcome)

    def _finish(self) -> None:
        """A stream is complete."""
        self._end("ok")
        self._client.end(reusable=True)

    def _break_off(self, relay: Relay, error: ApiError) -> None:
        """End a stream that has begun."""
        self._client.write(relay.break_off(error))
        self._end("broken")
        self._client.end(reusable=False)

    def _answer_error(self, error: ApiError, outcome: str) -> None:
        self._respond(error.status, build_error_fields(error), error.to_json(), outcome)

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
        attempt, relay, stream_s = self._attempt, self._relay, None
        if relay is None:
            context.unanswered -= 1
        else:
            self._output_tokens = relay.events
            if outcome != "cancelled":
                began = relay.began_at
                stream_s = began - self._started, context.clock() - began
        if attempt is not None:
            self._attempt = None
            if outcome == "ok" and self._path in RESUMABLE:
                context.router.learn(attempt.pick, self._output_tokens)
            attempt.end()
        metrics, model = context.metrics, self._completion.model
        metrics.in_flight -= 1
        known = model if model in context.router.directory.known else ""
        prompt, output = self._prompt_tokens, self._output_tokens
        count(metrics, known, self._tenant.name, outcome, prompt, output, stream_s, self._pick)
        visit, self._visit = self._visit, None
        if visit is not None:
            context.door.leave(visit, self._output_tokens, context.clock())
