"""One proxied completion request: admission, attempts at engines, one response to the client.

Made by `Pages` for each request. Events come from the client's connection, the admission
controller, the attempt and the sweeper (`sweep`, five times a second):

    new        start: too many waiting -> ended (429); door.open -> picking; else -> queued
    queued     admit -> picking; turn_away -> ended (429)
    picking    instances picked -> calling; none can take it -> waiting, or ended (503)
    waiting    sweep, every PARKED_S -> picking
    calling    begin -> streaming; answer, refuse -> ended; fail -> picking, or ended (502, 504)
    streaming  receive -> streaming, after the last piece ended; lose, fail -> resuming
    resuming   the rest can be generated -> picking, keeping the relay; else -> ended
    any        cancel -> ended; sweep after the deadline or a stall -> as fail

What is hard: until the first byte has gone to the client, all of it can be tried again elsewhere;
after it, another engine has to continue the stream. Load accounting, the admission ticket and
connections are released exactly once, in `_end`.
"""

from http import HTTPStatus

from cleave.gateway.admission.controller import Visit
from cleave.gateway.admission.tenants import EVERYBODY, Tenant
from cleave.gateway.context import Context
from cleave.gateway.failover.resumption import RESUMABLE, NotResumableError
from cleave.gateway.failover.retry_policy import Failure, choose
from cleave.gateway.failover.splice import SpliceError
from cleave.gateway.http import errors, headers
from cleave.gateway.http.completion_request import Completion
from cleave.gateway.http.errors import ApiError, from_router
from cleave.gateway.metrics.request_outcomes import TIMED_MASK, count
from cleave.gateway.proxy.attempt import Attempt
from cleave.gateway.proxy.client_stream import Client
from cleave.gateway.proxy.retry_state import Rescue
from cleave.gateway.proxy.sse_relay import Relay, StreamLostError
from cleave.gateway.upstream.connection_pool import Call
from cleave.gateway.upstream.kv_transfer_params import HandoffError, read_usage, strip_handoff
from cleave.router.errors import NoInstance, QueueFull, RouterError
from cleave.router.router import Phase, Pick

_PREFILL = Phase.PREFILL


class Exchange:
    """One completion request; see the state table in the module's docstring."""

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
        """From the admission controller; None: admission was not needed."""
        self._rescue: Rescue | None = None
        """None until an attempt fails or no instance is available."""
        self._attempt: Attempt | None = None
        self._relay: Relay | None = None
        """The stream to the client, once it has begun."""
        self._pick: Pick | None = None
        """The instances of the attempt whose stream began."""
        self._progress = self._swept_progress = 0
        self._gap_from = 0.0
        """Seconds, when the last piece came; 0: the gaps of this stream are not sampled."""
        self._prompt_tokens = self._output_tokens = 0
        self._started = context.clock()

    # --- what the client's connection and the sweeper call ---

    def start(self) -> None:
        """Ask for admission, then pick instances and send the request."""
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
        """The admission controller lets a queued request through."""
        self._try()

    def turn_away(self, error: ApiError) -> None:
        """The admission controller refuses a queued request."""
        self._answer_error(error, "shed")

    def cancel(self) -> None:
        """The client has disconnected: stop the attempt."""
        self._end("cancelled")

    def hold(self, blocked: bool) -> None:
        """Pause reading from the engine while the client takes no bytes."""
        if self._attempt is not None:
            self._attempt.hold(blocked)

    def sweep(self, now: float) -> None:
        """Check the deadline, which moves with every piece of a stream."""
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
        """A stream has begun: from now on another attempt can only continue it."""
        attempt, client, context = self._attempt, self._client, self._context
        assert attempt is not None
        now = context.clock()
        # The engine may have been idle before, so that time does not count as a pause.
        attempt.pulse.last = now
        # The first byte proves that the prompt has been computed.
        context.router.release(attempt.pick, _PREFILL)
        if context.breaker.standing:
            context.breaker.succeed(attempt.target.instance)
        retry = self._rescue
        if retry is not None:
            retry.loss = None
        if self._relay is not None:
            assert retry is not None
            context.metrics.recoveries[self._completion.model, retry.how] += 1
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
        fields = headers.pass_on(call.headers) + attempt.labels
        if not client.keep_alive:
            fields += headers.CLOSE
        first = headers.build_stream_head(call.status, fields, self._request_id, client.chunked)
        self._relay = Relay(
            first,
            client.chunked,
            now,
            self._completion.numbered,
            self._path not in RESUMABLE,
            self._completion.asks_ids,
        )

    def receive(self, call: Call, piece: bytes, complete: bool) -> None:
        """A piece of the stream."""
        del call
        relay = self._relay
        assert relay is not None
        self._progress += 1
        try:
            data = relay.pass_on(piece, complete)
        except HandoffError:
            self._break_off(relay, errors.LEAK)
            return
        except StreamLostError as lost:
            if lost.data:
                self._client.write(lost.data)
            self.fail(Failure.LOST, str(lost))
            return
        except SpliceError as error:
            assert self._attempt is not None
            reason = f"instance {self._attempt.target.instance} {error}"
            self._break_off(relay, errors.fail_engine(HTTPStatus.BAD_GATEWAY, reason))
            return
        if data:
            self._client.write(data)
        if self._gap_from:
            self._note_gap()
        if complete:
            self._finish()

    def lose(self, call: Call, reason: str) -> None:
        """The engine's stream broke off."""
        del call
        self.fail(Failure.LOST, reason)

    def answer(self, call: Call, body: bytes) -> None:
        """A complete response that is not streamed."""
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
            self._answer_error(errors.LEAK, "failed")
            return
        usage = read_usage(body)
        self._output_tokens = usage.completion_tokens or 0
        self._prompt_tokens = attempt.prompt_tokens or usage.prompt_tokens
        self._respond(call.status, headers.pass_on(call.headers) + attempt.labels, stripped, "ok")

    def refuse(self, call: Call, body: bytes) -> None:
        """An engine's own 4xx goes to the client unchanged, unless it quotes the handoff."""
        attempt = self._attempt
        assert attempt is not None
        if self._relay is not None:
            self.fail(Failure.STATUS, f"refused to go on with the stream: status {call.status}")
            return
        if self._path not in RESUMABLE and errors.is_missing_page(call.status, body):
            self._answer_error(errors.lack_page(self._path, self._completion.model), "refused")
            return
        if b"remote_engine_id" in body and attempt.prefill is None:
            self._answer_error(errors.hide_refusal(call.status), "refused")
            return
        self._respond(call.status, headers.pass_on(call.headers), body, "refused")

    def fail(self, failure: Failure, reason: str) -> None:
        """The attempt failed: retry on other instances, or respond with an error."""
        attempt = self._attempt
        assert attempt is not None
        name = attempt.target.instance
        timed_out = failure in (Failure.TIMEOUT, Failure.STALL)
        status = HTTPStatus.GATEWAY_TIMEOUT if timed_out else HTTPStatus.BAD_GATEWAY
        error = errors.fail_engine(status, f"instance {name} {reason}")
        phase = "decode" if attempt.prefill is None else "prefill"
        context = self._context
        context.metrics.retries[phase, failure.value] += 1
        context.breaker.fail(name, context.clock(), surely=failure is Failure.STALL)
        retry = self._find_rescue()
        if not retry.note(attempt, failure, self._relay):
            self._give_up(error, "failed")
            return
        self._attempt = None
        attempt.end()
        if self._relay is None:
            self._try()
        else:
            self._resume(retry, self._relay, error)

    # --- transitions ---

    def _knock(self) -> None:
        """Ask the admission controller, which may queue or refuse the request."""
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
        """Pick instances and start an attempt on them."""
        context, retry = self._context, self._rescue
        path, completion, history = self._path, self._completion, None
        if retry is not None:
            (path, completion), history = retry.work, retry.recovery
        suspects = context.breaker.doubted(context.clock()) if context.breaker.standing else ()
        try:
            pick = choose(context.router, completion, history, suspects, self._session)
        except RouterError as error:
            self._miss(error)
            return
        context.metrics.dispatches[completion.model, pick.reason] += 1
        self._attempt = self._attempt_type(context, self, path, completion, pick, self._fields)
        self._attempt.start()

    def _miss(self, error: RouterError) -> None:
        """No instance can take the request now: wait for one, or respond with an error."""
        context = self._context
        is_unavailable = isinstance(error, NoInstance)
        client_error = from_router(error)
        if is_unavailable:
            retry = self._find_rescue()
            if retry.loss is None:
                retry.wait_for(client_error, context.config.timeouts.wake_s)
            if retry.park():
                return
            client_error = retry.loss or client_error
        self._give_up(client_error, "unavailable" if is_unavailable else "refused")

    def _resume(self, retry: Rescue, relay: Relay, error: ApiError) -> None:
        """Continue a stream on another engine after its engine was lost."""
        try:
            ending = retry.resume(relay, error)
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
        """Report an error: as a response, or as the last event of a stream that has begun."""
        if self._relay is not None:
            self._break_off(self._relay, error)
        else:
            self._answer_error(error, outcome)

    def _finish(self) -> None:
        """The stream is complete."""
        self._end("ok")
        self._client.end(reusable=True)

    def _break_off(self, relay: Relay, error: ApiError) -> None:
        """End a stream that has begun, with an error event."""
        self._client.write(relay.break_off(error))
        self._end("broken")
        self._client.end(reusable=False)

    def _answer_error(self, error: ApiError, outcome: str) -> None:
        self._respond(error.status, errors.build_error_fields(error), error.to_json(), outcome)

    def _respond(self, status: int, fields: bytes, body: bytes, outcome: str) -> None:
        reusable = self._client.keep_alive and not self._context.draining
        if not reusable:
            fields += headers.CLOSE
        self._client.write(headers.build_head(status, fields, self._request_id, len(body)) + body)
        self._end(outcome)
        self._client.end(reusable)

    def _end(self, outcome: str) -> None:
        """Release everything and count the outcome; calls after the first do nothing."""
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
        label = model if model in context.router.directory.known else ""
        prompt, output = self._prompt_tokens, self._output_tokens
        count(metrics, label, self._tenant.name, outcome, prompt, output, stream_s, self._pick)
        ticket, self._visit = self._visit, None
        if ticket is not None:
            context.door.leave(ticket, self._output_tokens, context.clock())
