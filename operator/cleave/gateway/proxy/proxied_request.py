"""One proxied completion request: admission, attempts at engines, one response to the client.

Made by `GatewayRequestHandler` for each request. Events come from the client's connection, the
admission controller, the attempt (`on_...`) and the sweeper (`check_deadline`, every 0.2 s):

    new        start: too many waiting -> ended (429); no limits -> picking; else -> queued
    queued     admit -> picking; reject -> ended (429)
    picking    instances picked -> calling; none can take it -> waiting, or ended (503);
               too many retries run -> waiting; it ends engines -> ended (502)
    waiting    check_deadline, every RETRY_INTERVAL_S; for the retry budget, every time -> picking
    calling    on_stream_started -> streaming; on_response, on_rejection -> ended;
               on_attempt_failed -> picking, or ended (502, 504)
    streaming  on_data -> streaming, after the last piece ended;
               on_call_failed, on_attempt_failed -> resuming
    resuming   the rest can be generated -> picking, keeping the relay; else -> ended
    any        cancel, fail -> ended; check_deadline at the deadline, a stall -> on_attempt_failed

What is hard: until the first byte has gone to the client, all of it can be tried again elsewhere;
after it, another engine has to continue the stream. Load accounting, the admission ticket and
connections are released exactly once, in `_release`.
"""

from http import HTTPStatus

from cleave.gateway.admission.tenants import DEFAULT_TENANT, Tenant
from cleave.gateway.admission.ticket import AdmissionTicket
from cleave.gateway.context import GatewayContext
from cleave.gateway.event_loop_faults import contain
from cleave.gateway.failover.resumption import RESUMABLE_PATHS, NotResumableError
from cleave.gateway.failover.retry_policy import Failure
from cleave.gateway.failover.splice import SpliceError
from cleave.gateway.http import errors, headers
from cleave.gateway.http.completion_request import CompletionRequest, set_cache_salt
from cleave.gateway.http.errors import GatewayError, convert_router_error
from cleave.gateway.metrics.gateway_metrics import ITL_SAMPLE_MASK, record_completed, record_flex
from cleave.gateway.proxy.attempt import Attempt
from cleave.gateway.proxy.client_stream import ClientStream
from cleave.gateway.proxy.request_observer import RequestObserver
from cleave.gateway.proxy.retry_state import RetryDecision, RetryState, pick_for
from cleave.gateway.proxy.sse_relay import SseRelay, StreamLostError, make_relay
from cleave.gateway.proxy.token_charge import bound_prompt, bound_unseen, count_charged
from cleave.gateway.proxy.waiting_client import SILENCE_S, WAIT_S, send_comment
from cleave.gateway.upstream.answers import NoAnswerError, read_usage
from cleave.gateway.upstream.collected_answer import AnswerBody, Pieces
from cleave.gateway.upstream.connection_pool import UpstreamCall
from cleave.gateway.upstream.engine_errors import convert_engine_error, is_rejection
from cleave.gateway.upstream.kv_transfer_params import HandoffError, contains_origin, strip_answer
from cleave.gateway.upstream.model_names import find_names
from cleave.router.errors import NoInstance, QueueFull, RouterError
from cleave.router.router import Pick, RequestPhase

_PREFILL = RequestPhase.PREFILL


class ProxiedRequest:
    """One completion request; see the state table in the module's docstring."""

    def __init__(
        self,
        context: GatewayContext,
        client: ClientStream,
        path: bytes,
        request_id: bytes,
        body: CompletionRequest,
        tenant: Tenant = DEFAULT_TENANT,
        session: bytes | None = None,
        sender: str = "",
        fields: bytes = b"",
        observer: RequestObserver | None = None,
    ) -> None:
        """`sender`: as `suspect_senders` names it. `observer`: follows this request, if given."""
        self._context = context
        self._client = client
        self._path = path
        self._request_id = request_id
        if tenant.cache_salt:
            set_cache_salt(body, tenant.cache_salt)
        self._completion = body
        self._tenant = tenant
        self._session = session
        self._sender = sender
        self._fields = fields
        self._observer = observer
        self._ticket: AdmissionTicket | None = None
        """From the admission controller; None: admission was not needed."""
        self._retry_state: RetryState | None = None
        """None until an attempt fails or no instance is available."""
        self._attempt: Attempt | None = None
        self._relay: SseRelay | None = None
        """The stream to the client, once it has begun."""
        self._pick: Pick | None = None
        """The instances of the attempt whose stream began."""
        self._progress = self._checked_progress = 0
        self._last_piece_at = 0.0
        """Seconds, when the last piece came; 0: the gaps of this stream are not sampled."""
        self._prompt_tokens = self._output_tokens = 0
        self._unseen_tokens = 0
        """Output of failed attempts that their engines may have generated and not reported."""
        self._paused_at = 0.0
        """When the client last began to read more slowly than the stream came; 0: it never has."""
        self._max_model_len = -1
        """The largest of the model's instances, in tokens; below 0: not looked up yet."""
        self._has_written = False
        """Whether anything of a stream was sent since the sweeper looked last."""
        self._silent_since = self._started_at = context.clock()

    @property
    def model(self) -> str:
        """As the client named it."""
        return self._completion.model

    def count_prompt(self) -> int:
        """Tokens of the prompt, estimated until an engine has counted them."""
        prompt = self._relay.prompt_tokens if self._relay is not None else 0
        return prompt or self._prompt_tokens or self._completion.prompt_tokens

    # --- what the client's connection and the sweeper call ---

    def start(self) -> None:
        """Ask for admission, then pick instances and send the request."""
        context = self._context
        context.active_requests.add(self)
        if not self._completion.is_flex:
            context.num_awaiting_first_byte += 1
            context.metrics.in_flight += 1
        suspects = context.suspect_requests
        if suspects.shapes and suspects.contains(self._path, self._completion):
            self._respond_error(errors.SUSPECT_REQUEST, "refused")
        elif context.num_awaiting_first_byte > context.queue_limit:
            context.metrics.rejections[self._tenant.name, "queue_full"] += 1
            error = convert_router_error(QueueFull("too many requests wait already"))
            self._respond_error(error, "shed")
        elif context.admission.is_disabled and not self._completion.is_flex:
            self._start_attempt()
        else:
            self._request_admission()

    def admit(self) -> None:
        """The admission controller lets a queued request through."""
        self._start_attempt()

    def reject(self, error: GatewayError) -> None:
        """The admission controller refuses a queued request."""
        self._respond_error(error, "shed")

    def cancel(self) -> None:
        """The client has disconnected, or is given up: stop the attempt."""
        self._release("cancelled")
        self._client.drop()

    def fail(self) -> None:
        """A fault of this program has interrupted it: end it with an error, or close."""
        relay, active = self._relay, self._context.active_requests
        if self not in active or (relay is not None and relay.transcript.done):
            self._client.drop()
        else:
            contain(self._client.drop, self._give_up, errors.INTERNAL_FAULT, "failed")

    def set_paused(self, blocked: bool) -> None:
        """Pause reading from the engine while the client takes no bytes."""
        if blocked:
            self._paused_at = self._context.clock()
        if self._attempt is not None:
            self._attempt.set_paused(blocked)

    def check_deadline(self, now: float) -> None:
        """Check the deadline, which each piece of a stream moves; working engines may be silent."""
        self._send_comment(now)
        attempt = self._attempt
        if attempt is None:
            if self._retry_state is not None and self._retry_state.check_retry_due(now):
                self._start_attempt()
        elif self._progress != self._checked_progress:
            self._checked_progress = self._progress
            attempt.deadline = now + self._context.config.timeouts.idle_s
            attempt.stall_detector.record_progress(now)
            if self._ticket is not None and self._tenant.limits.tokens_per_minute:
                self._context.admission.charge(self._ticket, self._count_charged(), now)
        elif self._client.blocked:
            if now > attempt.deadline:
                self.cancel()
        elif failure := attempt.find_timeout(now):
            is_stall = failure is Failure.STALL
            reason = "stopped in the middle of its streams" if is_stall else "took too long"
            error = errors.RESPONSE_TOO_SLOW if failure is Failure.TOO_LONG else None
            self.on_attempt_failed(failure, reason, error)

    def _send_comment(self, now: float) -> None:
        """Send a comment to the client of a stream who has received nothing for long."""
        limit_s = WAIT_S if self._relay is None else SILENCE_S
        if self._has_written:
            self._has_written, self._silent_since = False, now
        elif now - self._silent_since > limit_s and not self._client.blocked:
            self._silent_since = now
            if self._completion.stream and self._completion.report is not None:
                self._client = send_comment(self._client, self._request_id, self._relay is not None)

    # --- what the attempt calls ---

    def on_stream_started(self, call: UpstreamCall) -> None:
        """A stream has begun: from now on another attempt can only continue it."""
        attempt, client, context = self._attempt, self._client, self._context
        assert attempt is not None
        if self._observer is not None:
            self._observer.on_stream_started(call.status)
        now = context.clock()
        # The engine may have been idle before, so that time does not count as a pause.
        attempt.stall_detector.last_progress_at = now
        context.suspect_senders.record_answer(self._sender, attempt.pick)
        # The first byte proves that the prompt has been computed.
        context.router.release(attempt.pick, _PREFILL)
        if context.circuit_breaker.failure_states:
            context.circuit_breaker.record_success(attempt.target.instance)
        retry = self._retry_state
        if retry is not None:
            retry.pending_error = None
            retry.release_slot()
        if self._relay is not None:
            self._relay.prompt_details = attempt.prompt_details
            assert retry is not None
            context.metrics.recoveries[self._completion.model, retry.recovery_mode] += 1
            attempt.set_paused(client.blocked)
            return
        context.num_awaiting_first_byte -= not self._completion.is_flex
        self._prompt_tokens = attempt.prompt_tokens or self._completion.prompt_tokens
        self._pick = attempt.pick
        context.metrics.streams = number = context.metrics.streams + 1
        if not (number & ITL_SAMPLE_MASK or self._completion.is_flex):
            self._last_piece_at = now
        if attempt.pick.prefill is not None:
            phases = context.metrics.models[self._completion.model].phases
            phases["decode"].observe(now - attempt.sent_at)
        if self._ticket is not None:
            context.admission.observe_first_token(self._ticket, now)
        fields = headers.build_forwarded_headers(call.headers) + attempt.instance_headers
        if not client.keep_alive:
            fields += headers.CONNECTION_CLOSE
        first = headers.build_stream_head(call.status, fields, self._request_id, client.chunked)
        names = find_names(self._completion.model, attempt.pick.engine_model)
        options = client.chunked, now, names, context.buffer_budget, attempt.prompt_details
        self._relay = make_relay(self._completion, first, *options)

    def on_data(self, call: UpstreamCall, piece: bytes, complete: bool) -> None:
        """A piece of the stream."""
        del call
        relay = self._relay
        assert relay is not None
        self._progress += 1
        try:
            data = relay.forward(piece, complete)
            if data:
                self._has_written = True
                self._client.write(data)
        except (GatewayError, HandoffError) as fault:
            error = fault if isinstance(fault, GatewayError) else errors.HANDOFF_LEAK
            self._abort_stream(relay, error)
            return
        except StreamLostError as lost:
            if self._write(relay, lost.data):
                self.on_attempt_failed(lost.failure, str(lost), lost.error)
            return
        except SpliceError as error:
            assert self._attempt is not None
            reason = f"instance {self._attempt.target.instance} {error}"
            self._abort_stream(relay, errors.build_engine_error(HTTPStatus.BAD_GATEWAY, reason))
            return
        if self._last_piece_at:
            self._record_gap()
        if complete:
            self._finish_stream()

    def on_call_failed(self, call: UpstreamCall, reason: str) -> None:
        """The engine's stream broke off."""
        del call
        self.on_attempt_failed(Failure.LOST, reason)

    def on_response(self, call: UpstreamCall, body: AnswerBody) -> None:
        """A complete response that is not streamed."""
        attempt = self._attempt
        assert attempt is not None
        if self._relay is not None:
            self.on_attempt_failed(Failure.STATUS, "did not go on with the stream")
            return
        try:
            usage = read_usage(call.headers, body, is_completion=self._path in RESUMABLE_PATHS)
            pieces: Pieces = strip_answer(body)
        except NoAnswerError as error:
            self.on_attempt_failed(Failure.STATUS, str(error))
            return
        except HandoffError:
            self._respond_error(errors.HANDOFF_LEAK, "failed")
            return
        if self._context.circuit_breaker.failure_states:
            self._context.circuit_breaker.record_success(attempt.target.instance)
        if usage is not None:
            self._output_tokens = usage.completion_tokens or 0
            self._prompt_tokens = usage.prompt_tokens
        elif self._completion.report is not None:
            # An engine that does not count: a token has a byte at least.
            self._output_tokens = len(body)
        self._prompt_tokens = attempt.prompt_tokens or self._prompt_tokens
        fields = headers.build_forwarded_headers(call.headers) + attempt.instance_headers
        if names := find_names(self._completion.model, attempt.pick.engine_model):
            pieces = names.restore_first(pieces)
        self._respond(call.status, fields, pieces, "ok")

    def on_rejection(self, call: UpstreamCall, body: bytes) -> None:
        """An engine's own 4xx goes to the client, unless it quotes the handoff."""
        attempt = self._attempt
        assert attempt is not None
        if self._relay is not None:
            reason = f"refused to go on with the stream: status {call.status}"
            self.on_attempt_failed(Failure.STATUS, reason)
            return
        if self._path not in RESUMABLE_PATHS and errors.is_unknown_route(call.status, body):
            self._respond_error(errors.build_not_offered(self._path, self.model), "refused")
            return
        if not is_rejection(body):
            reason = f"answered with status {call.status} and no error of its API"
            self.on_attempt_failed(Failure.STATUS, reason)
            return
        if contains_origin(body) and attempt.prefill is None:
            self._respond_error(errors.REDACTED_REJECTION, "refused")
            return
        if names := find_names(self._completion.model, attempt.pick.engine_model):
            if call.status == HTTPStatus.NOT_FOUND:
                self.on_attempt_failed(Failure.ADAPTER, "has unloaded the adapter")
                return
            body = names.restore_in_text(body)
        if (refusal := convert_engine_error(call.status, body)) is not None:
            # Its message is not recorded: engines quote the request.
            body = refusal.to_json()
        self._respond(call.status, headers.JSON_CONTENT, [body], "refused")

    def on_attempt_failed(
        self, failure: Failure, reason: str, error: GatewayError | None = None
    ) -> None:
        """The attempt failed: retry on other instances, or respond with an error."""
        attempt = self._attempt
        assert attempt is not None
        name = attempt.target.instance
        if self._observer is not None:
            self._observer.on_attempt_failed(name, failure, reason)
        timed_out = failure in (Failure.TIMEOUT, Failure.STALL)
        status = HTTPStatus.GATEWAY_TIMEOUT if timed_out else HTTPStatus.BAD_GATEWAY
        error = error or errors.build_engine_error(status, f"instance {name} {reason}")
        if timed_out or failure is Failure.TOO_LONG:
            self._unseen_tokens += self._bound_unseen(attempt, self._relay)
        context = self._context
        phase = "decode" if attempt.prefill is None else "prefill"
        context.metrics.retries[phase, failure.value] += 1
        if failure not in (Failure.TOO_LONG, Failure.ADAPTER):
            is_stall = failure is Failure.STALL
            context.circuit_breaker.record_failure(name, context.clock(), immediately=is_stall)
        retry = self._get_retry_state()
        retry.last_error = error
        if not retry.record_failure(attempt, failure, self._relay):
            self._give_up(error, "failed")
            return
        self._attempt = None
        attempt.end()
        if self._relay is None:
            self._start_attempt()
        else:
            self._resume_stream(retry, self._relay, error)

    # --- transitions ---

    def _request_admission(self) -> None:
        """Ask the admission controller, which may queue or refuse the request."""
        body = self._completion
        options = body.model, body.prompt_tokens, self._started_at, body.is_flex
        try:
            self._ticket = self._context.admission.admit_or_queue(self, self._tenant, *options)
        except GatewayError as error:
            self._respond_error(error, "shed")
            return
        if not self._ticket.is_waiting:
            self._start_attempt()

    def _start_attempt(self) -> None:
        context, retry = self._context, self._retry_state
        path, completion, history = self._path, self._completion, None
        if retry is not None:
            decision = retry.decide()
            if decision is not RetryDecision.START:
                self._handle_retry_decision(retry, decision)
                return
            (path, completion), history = retry.next_request, retry.history
        try:
            pick = pick_for(context, completion, history, self._sender, self._session)
        except RouterError as error:
            self._handle_no_instance(error)
            return
        if self._pick is not None and pick.engine_model != self._pick.engine_model:
            context.router.release(pick)
            self._give_up(errors.ADAPTER_CHANGED, "failed")
            return
        context.metrics.dispatches[completion.model, pick.reason] += 1
        observer = self._observer
        if observer is not None:
            observer.on_attempt(pick, retry.recovery_mode if retry is not None else "again")
        arrived_at = self._started_at if self._relay is None else None
        sends_targets = context.config.sends_targets and path in RESUMABLE_PATHS
        self._attempt = Attempt(
            *(context, self, path, completion, pick, self._fields, observer, arrived_at),
            sends_targets=sends_targets,
        )
        self._attempt.start()

    def _handle_retry_decision(self, retry: RetryState, decision: RetryDecision) -> None:
        """Another attempt must not start now, or not at all."""
        if decision is RetryDecision.REFUSE:
            retry.record_suspect(self._request_id)
            self._give_up(errors.SUSPECT_REQUEST, "failed")
        elif decision is RetryDecision.GIVE_UP:
            assert retry.last_error is not None
            self._give_up(retry.last_error, "failed")

    def _handle_no_instance(self, error: RouterError) -> None:
        """No instance can take the request now: wait for one, or respond with an error."""
        context = self._context
        is_unavailable = isinstance(error, NoInstance)
        client_error = convert_router_error(error)
        if is_unavailable and self._sender in context.suspect_senders:
            client_error = errors.SUSPECT_SENDER
        if is_unavailable:
            retry = self._get_retry_state()
            # While it waits it burdens no engine; when one is back, retries start by the budget.
            retry.release_slot()
            # What an engine did says more than that no other is left.
            client_error = retry.last_error or client_error
            if retry.pending_error is None:
                retry.start_waiting(client_error, context.config.timeouts.wake_s)
            if retry.wait_for_instance():
                return
            client_error = retry.pending_error or client_error
        self._give_up(client_error, "unavailable" if is_unavailable else "refused")

    def _resume_stream(self, retry: RetryState, relay: SseRelay, error: GatewayError) -> None:
        """Continue a stream on another engine after its engine was lost."""
        try:
            ending = retry.prepare_resume(relay, error)
        except NotResumableError as reason:
            error.message = f"{error.message}; {reason}"
            self._abort_stream(relay, error)
            return
        if ending is None:
            self._start_attempt()
        elif self._write(relay, relay.build_end(ending.events)):
            self._finish_stream()

    def _get_retry_state(self) -> RetryState:
        options = self._context, self._path, self._completion, self._sender
        self._retry_state = self._retry_state or RetryState(*options)
        return self._retry_state

    def _record_gap(self) -> None:
        now = self._context.clock()
        assert self._pick is not None
        counted = self._context.metrics.models[self._completion.model]
        counted.itl[self._pick.decode.role].observe(now - self._last_piece_at)
        self._last_piece_at = now

    def _give_up(self, error: GatewayError, outcome: str) -> None:
        """Report an error: as a response, or as the last event of a stream that has begun."""
        if self._relay is not None:
            self._abort_stream(self._relay, error)
        else:
            self._respond_error(error, outcome)

    def _finish_stream(self) -> None:
        self._release("ok")
        self._client.end(reusable=True)

    def _write(self, relay: SseRelay, data: bytes) -> bool:
        """Send bytes of a stream; False: they cannot be sent in the client's API, so it ends."""
        try:
            self._client.write(data)
        except GatewayError as error:
            self._abort_stream(relay, error)
        return self in self._context.active_requests

    def _abort_stream(self, relay: SseRelay, error: GatewayError) -> None:
        """End a stream that has begun, with an error event."""
        if self._observer is not None:
            self._observer.on_error(error)
        self._client.write(relay.build_error_end(error))
        self._release("broken")
        self._client.end(reusable=False)

    def _respond_error(self, error: GatewayError, outcome: str) -> None:
        if self._observer is not None:
            self._observer.on_error(error)
        self._respond(error.status, errors.build_error_headers(error), [error.to_json()], outcome)

    def _respond(self, status: int, fields: bytes, body: Pieces, outcome: str) -> None:
        if self._observer is not None:
            self._observer.on_response(status)
        reusable = self._client.keep_alive and not self._context.draining
        if not reusable:
            fields += headers.CONNECTION_CLOSE
        size = sum(map(len, body))
        head = headers.build_response_head(status, fields, self._request_id, size)
        # First, because what the client does not take at once is reserved again for it.
        self._release(outcome)
        is_joined = size <= headers.MAX_JOINED_BYTES
        for piece in [b"".join((head, *body))] if is_joined else [head, *body]:
            self._client.write(piece)
        self._client.end(reusable)

    def _release(self, outcome: str) -> None:
        """Release everything and count the outcome; calls after the first do nothing."""
        context = self._context
        if self not in context.active_requests:
            return
        context.active_requests.discard(self)
        attempt, relay, self._attempt, stream_s = self._attempt, self._relay, None, None
        is_flex = self._completion.is_flex
        if relay is None:
            context.num_awaiting_first_byte -= not is_flex
        else:
            self._output_tokens = relay.num_tokens
            self._prompt_tokens = relay.prompt_tokens or self._prompt_tokens
            if outcome != "cancelled":
                stream_s = relay.started_at - self._started_at, context.clock() - relay.started_at
        # An answer that came in the end is charged once, whatever was computed before.
        unseen = self._unseen_tokens if outcome != "ok" else 0
        if outcome == "cancelled":
            unseen += self._bound_unseen(attempt, relay)
        if attempt is not None:
            if outcome in ("ok", "refused"):
                context.suspect_senders.record_answer(self._sender, attempt.pick)
            if outcome == "ok" and self._path in RESUMABLE_PATHS:
                observed = attempt.pick, self._output_tokens
                contain(attempt.end, context.router.observe_completion, *observed)
            attempt.end()
        metrics, model = context.metrics, self._completion.model
        if self._retry_state is not None:
            self._retry_state.release_slot()
        label = model if model in context.router.registry.known_models else ""
        prompt, output, tenant = self._prompt_tokens, self._output_tokens, self._tenant.name
        if is_flex:
            record_flex(metrics, label, tenant, outcome, prompt, output)
        else:
            metrics.in_flight -= 1
            record_completed(metrics, label, tenant, outcome, prompt, output, stream_s, self._pick)
            if context.admission.flex.is_active and relay is not None and outcome == "ok":
                self._observe_beside_flex(relay)
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            charged = ticket.charged_tokens
            if self._tenant.limits.tokens_per_minute:
                charged = self._count_charged(unseen, attempt if outcome == "cancelled" else None)
            context.admission.release(ticket, charged, context.clock(), is_ok=outcome == "ok")
        if relay is not None:
            context.metrics.streams_not_kept += relay.transcript.is_dropped
            relay.close()
        if self._observer is not None:
            self._observer.on_finished(outcome, prompt, output)

    def _observe_beside_flex(self, relay: SseRelay) -> None:
        """A stream has ended while requests of the tier flex ran, which must not slow it down; one
        that its client took slowly says nothing of that."""
        if self._output_tokens > 1 and not self._paused_at:
            now, began_at = self._context.clock(), relay.started_at
            tpot_s = (now - began_at) / (self._output_tokens - 1)
            self._context.admission.observe_stream(self.model, began_at, tpot_s, now)

    def _count_charged(self, unseen: int = 0, left: Attempt | None = None) -> int:
        """Tokens of prompt and output to charge to a tenant with a limit; `unseen`: output tokens
        besides those that the engine has reported; `left`: the attempt that the client left."""
        context, completion, relay = self._context, self._completion, self._relay
        output = self._output_tokens if relay is None else relay.limit_tokens()
        prompt, reported = self.count_prompt(), relay.prompt_tokens if relay is not None else 0
        if left is not None and not (reported or left.prompt_tokens):
            prompt = bound_prompt(completion)
        if self._max_model_len < 0:
            self._max_model_len = context.router.registry.find_longest_model_len(completion.model)
        return count_charged(completion, prompt, output + unseen, self._max_model_len)

    def _bound_unseen(self, attempt: Attempt | None, relay: SseRelay | None) -> int:
        """The most unread tokens that the engine has generated for an attempt that ends now."""
        report = self._completion.report
        if attempt is None or attempt.prefill is not None or report is None:
            return 0
        now, unseen_s = self._context.clock(), 0.0
        if relay is not None and self._client.blocked:
            unseen_s = now - self._paused_at
        elif relay is None and not report.has_ids:
            unseen_s = now - attempt.sent_at
        elif not report.has_ids and self._progress == self._checked_progress:
            # Ids come with every token; for reasoning that it hides an engine writes no event.
            unseen_s = max(now - attempt.deadline + self._context.config.timeouts.idle_s, 0.0)
        return bound_unseen(self._completion, unseen_s, is_streamed=relay is not None)
