"""Fills the record of one request while it runs. Made by `recorder`, called by the request."""

from collections.abc import Callable

from cleave.gateway.failover.retry_policy import Failure
from cleave.gateway.http.errors import GatewayError
from cleave.gateway.proxy.request_observer import RequestObserver
from cleave.gateway.tracing.request_record import (
    AttemptRecord,
    CallRecord,
    RequestListener,
    RequestRecord,
)
from cleave.gateway.upstream.kv_transfer_params import count_blocks
from cleave.router.instance import Target
from cleave.router.router import Pick


class RecordingObserver(RequestObserver):
    """Records one request; its listener gets the record when the request has finished."""

    __slots__ = ("_clock", "_listener", "_record")

    def __init__(
        self, listener: RequestListener, record: RequestRecord, clock: Callable[[], float]
    ) -> None:
        self._listener = listener
        self._record = record
        self._clock = clock

    def on_attempt(self, pick: Pick, recovery_mode: str) -> None:
        """An attempt begins."""
        attempts = self._record.attempts
        attempts.append(AttemptRecord(pick, recovery_mode if attempts else "", self._clock()))

    def on_call_sent(self, phase: str, target: Target) -> bytes:
        """A call begins; it continues the request's trace."""
        call = CallRecord(phase, target, self._clock())
        self._record.attempts[-1].calls.append(call)
        trace = self._record.trace
        return trace.format_header(call.span_id) if trace is not None else b""

    def on_prefill_done(self, body: bytes) -> None:
        """The prefill call has ended; an overlapped decode call may have begun after it."""
        for call in reversed(self._record.attempts[-1].calls):
            if call.phase == "prefill":
                call.ended_at, call.blocks = self._clock(), count_blocks(body)
                return

    def on_stream_started(self, status: int) -> None:
        """A stream has begun; the client sees the first one only."""
        record, now = self._record, self._clock()
        record.attempts[-1].calls[-1].first_byte_at = now
        if not record.first_byte_at:
            record.first_byte_at, record.status = now, status

    def on_attempt_failed(self, instance: str, failure: Failure, reason: str) -> None:
        """The attempt failed."""
        self._record.fail(instance, failure.value, reason, self._clock())

    def on_error(self, error: GatewayError) -> None:
        """The client gets an error."""
        self._record.error = error.code or error.type

    def on_response(self, status: int) -> None:
        """The client gets a response that is not streamed."""
        self._record.status = status

    def on_finished(self, outcome: str, prompt_tokens: int, output_tokens: int) -> None:
        """The record is complete."""
        record = self._record
        record.prompt_tokens, record.output_tokens = prompt_tokens, output_tokens
        record.end(outcome, self._clock())
        self._listener.on_finished(record)
