"""A proxied request and its attempts that fill a record of the request. Made by `recorder`.

They override steps of the plain classes, so that unrecorded requests do not pay for any check.
"""

from http import HTTPStatus

from cleave.gateway.admission.tenants import Tenant
from cleave.gateway.context import GatewayContext
from cleave.gateway.failover.retry_policy import Failure
from cleave.gateway.http.completion_request import CompletionRequest
from cleave.gateway.http.errors import GatewayError
from cleave.gateway.proxy.attempt import Attempt, ResponseHandler
from cleave.gateway.proxy.client_stream import ClientStream
from cleave.gateway.proxy.proxied_request import ProxiedRequest
from cleave.gateway.proxy.sse_relay import SseRelay
from cleave.gateway.tracing.request_record import (
    AttemptRecord,
    CallRecord,
    RequestListener,
    RequestRecord,
)
from cleave.gateway.upstream.connection_pool import EnginePool, UpstreamCall
from cleave.gateway.upstream.kv_transfer_params import count_blocks
from cleave.router.instance import Target
from cleave.router.router import Pick


class InstrumentedAttempt(Attempt):
    """One attempt of a recorded request."""

    __slots__ = ("_attempt_record", "_request_record")

    def __init__(
        self,
        context: GatewayContext,
        handler: ResponseHandler,
        path: bytes,
        completion: CompletionRequest,
        pick: Pick,
        fields: bytes,
    ) -> None:
        super().__init__(context, handler, path, completion, pick, fields)
        assert isinstance(handler, InstrumentedRequest)
        self._request_record: RequestRecord = handler.record
        self._attempt_record = AttemptRecord(pick, handler.recovery_mode, context.clock())
        self._request_record.attempts.append(self._attempt_record)

    def _send(self, pool: EnginePool, body: bytes) -> None:
        if self._overlapped_prefill is not None:
            self._start_call("decode", self.pick.decode)
        else:
            phase = "prefill" if self.prefill else "decode" if self.pick.prefill else "whole"
            self._start_call(phase, self.target)
        super()._send(pool, body)

    def _send_overlapped(self, prefill: Target, pool: EnginePool, decode: EnginePool) -> None:
        self._start_call("prefill", prefill)
        super()._send_overlapped(prefill, pool, decode)

    def _start_decode(self, prefill: Target, body: bytes) -> None:
        self._end_call(-1, body)
        super()._start_decode(prefill, body)

    def on_prefill_done(self, prefill: Target, body: bytes) -> None:
        """The overlapped prefill is done."""
        self._end_call(-2, body)
        super().on_prefill_done(prefill, body)

    def _start_call(self, phase: str, target: Target) -> None:
        call = CallRecord(phase, target, self._context.clock())
        self._attempt_record.calls.append(call)
        if self._request_record.trace is not None:
            self._fields = self._request_record.trace.format_header(call.span_id)

    def _end_call(self, index: int, body: bytes) -> None:
        call = self._attempt_record.calls[index]
        call.ended_at, call.blocks = self._context.clock(), count_blocks(body)


class InstrumentedRequest(ProxiedRequest):
    """A request that is recorded."""

    _attempt_type = InstrumentedAttempt

    def __init__(
        self,
        listener: RequestListener,
        record: RequestRecord,
        context: GatewayContext,
        client: ClientStream,
        path: bytes,
        request_id: bytes,
        body: CompletionRequest,
        tenant: Tenant,
        session: bytes | None,
    ) -> None:
        super().__init__(context, client, path, request_id, body, tenant, session)
        self._listener = listener
        self.record = record
        record.max_tokens = body.output_tokens

    @property
    def recovery_mode(self) -> str:
        """How the next attempt relates to those before: again, continued or replayed."""
        if self._retry_state is None or not self.record.attempts:
            return ""
        return self._retry_state.recovery_mode if self._relay is not None else "again"

    def on_stream_started(self, call: UpstreamCall) -> None:
        """A stream has begun."""
        record, now = self.record, self._context.clock()
        record.attempts[-1].calls[-1].first_byte_at = now
        if not record.first_byte_at:
            record.first_byte_at, record.status = now, call.status
        super().on_stream_started(call)

    def on_attempt_failed(self, failure: Failure, reason: str) -> None:
        """The attempt failed."""
        assert self._attempt is not None
        name = self._attempt.target.instance
        self.record.fail(name, failure.value, reason, self._context.clock())
        super().on_attempt_failed(failure, reason)

    def _respond_error(self, error: GatewayError, outcome: str) -> None:
        self.record.error = error.code or error.type
        super()._respond_error(error, outcome)

    def _abort_stream(self, relay: SseRelay, error: GatewayError) -> None:
        self.record.error = error.code or error.type
        super()._abort_stream(relay, error)

    def _respond(self, status: int, fields: bytes, body: bytes, outcome: str) -> None:
        self.record.status = HTTPStatus(status)
        super()._respond(status, fields, body, outcome)

    def _release(self, outcome: str) -> None:
        if self not in self._context.active_requests:
            return
        super()._release(outcome)
        record = self.record
        record.prompt_tokens = self._prompt_tokens
        record.output_tokens = self._output_tokens
        record.end(outcome, self._context.clock())
        self._listener.on_finished(record)
