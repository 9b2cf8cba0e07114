"""One attempt at a request: the picked instances, the calls to them, the handoff between them.

Made by the proxied request, which may make another when this one fails. What is hard: an engine can
fail in five ways (no connection, an error status, a handoff of another boot, an error as the first
event of a stream, something that is no answer), and all must be detected before anything goes to
the client.
"""

from http import HTTPStatus
from typing import Protocol

import msgspec

from cleave.gateway.context import GatewayContext
from cleave.gateway.failover.resumption import RESUMABLE_PATHS
from cleave.gateway.failover.retry_policy import Failure
from cleave.gateway.http import headers
from cleave.gateway.http.completion_request import (
    CompletionRequest,
    Fields,
    Piece,
    build_decode_fields,
    build_prefill_fields,
    encode_fields,
    set_engine_model,
    set_targets,
)
from cleave.gateway.http.errors import RESPONSE_TOO_LONG, GatewayError
from cleave.gateway.proxy.overlapped_prefill import (
    UNAUTHORIZED,
    OverlappedPrefill,
    build_overlapped_fields,
    can_overlap,
)
from cleave.gateway.proxy.request_observer import RequestObserver
from cleave.gateway.upstream.circuit_breaker import StallDetector
from cleave.gateway.upstream.collected_answer import AnswerBody, CollectedAnswer, join_handoff
from cleave.gateway.upstream.connection_pool import EnginePool, UpstreamCall
from cleave.gateway.upstream.engine_errors import cut_error
from cleave.gateway.upstream.kv_transfer_params import (
    HandoffError,
    build_prefix_source_params,
    read_handoff,
)
from cleave.gateway.upstream.prompt_details import PromptDetails
from cleave.gateway.upstream.stream_start import PendingStart, StreamStart, classify_start
from cleave.policy.prompt_order import HANDOFF_SHARE
from cleave.router.instance import Target
from cleave.router.router import Pick, RequestPhase

MAX_RESPONSE_BYTES = 64 << 20
"""Of a response that is not streamed, which is buffered until it is complete."""
SMALL_RESPONSE_BYTES = 16 << 10
"""Responses of one piece that is no longer do not count toward the buffer budget."""
SMALL_START_BYTES = 4 << 10
"""Longer beginnings of streams count toward it while they are held."""
KV_LEASE_S = 30.0
"""How long a prefill engine keeps KV for a decode engine that sends no heartbeats."""

# Enum attribute look-ups cost as much as a call, and these are compared for every request.
_OK = HTTPStatus.OK.value
_PENDING, _STARTED = StreamStart.PENDING, StreamStart.STARTED
_FAILED = StreamStart.FAILED
_PREFILL = RequestPhase.PREFILL


class ResponseHandler(Protocol):
    """Receives the outcome of an attempt: exactly one of `on_response`,
    `on_rejection`, `on_attempt_failed`, or `on_stream_started`.

    After `on_stream_started` it becomes the listener of the call: `on_data`, first with the bytes
    that began the stream, and `on_call_failed`.
    """

    def on_response(self, call: UpstreamCall, body: AnswerBody) -> None:
        """The complete response."""

    def on_rejection(self, call: UpstreamCall, body: bytes) -> None:
        """An engine rejected the request with a status below 500."""

    def on_stream_started(self, call: UpstreamCall) -> None:
        """A stream has begun."""

    def on_data(self, call: UpstreamCall, piece: bytes, complete: bool) -> None:
        """A piece of the stream."""

    def on_call_failed(self, call: UpstreamCall, reason: str) -> None:
        """The stream broke off; the reason continues `instance NAME ...`."""

    def on_attempt_failed(
        self, failure: Failure, reason: str, error: GatewayError | None = None
    ) -> None:
        """The attempt failed; the reason continues `instance NAME ...`. `error`: for the client;
        None: names the instance and the reason."""

    def fail(self) -> None:
        """End the request with an error, after a fault of this program."""


class Attempt:
    """Calls to one or two engines: one after the other, or both at once where the decode engine
    pulls KV while it is computed (overlapped_prefill.py). Start it once; end it once it is over."""

    __slots__ = (
        "_answer",
        "_arrived_at",
        "_buffered_bytes",
        "_call",
        "_completion",
        "_context",
        "_fields",
        "_handler",
        "_observer",
        "_overlapped_prefill",
        "_path",
        "_pending_start",
        "_request_id",
        "_sends_targets",
        "deadline",
        "instance_headers",
        "pick",
        "prefill",
        "prompt_details",
        "prompt_tokens",
        "sent_at",
        "stall_detector",
        "streaming",
    )  # fmt: skip

    def __init__(
        self,
        context: GatewayContext,
        handler: ResponseHandler,
        path: bytes,
        completion: CompletionRequest,
        pick: Pick,
        fields: bytes = b"",
        observer: RequestObserver | None = None,
        arrived_at: float | None = None,
        *,
        sends_targets: bool = False,
    ) -> None:
        """`fields`: header lines to add to the requests to engines, which an observer replaces.
        `sends_targets`: add latency targets; `arrived_at`: when the client's request arrived, by
        the context's clock; None: it has its first token, and no target for it."""
        self._context = context
        self._handler = handler
        self._path = path
        if pick.engine_model:
            completion = set_engine_model(completion, pick.engine_model)
        self._completion = completion
        self._arrived_at = arrived_at
        self._sends_targets = sends_targets
        # A new id for each attempt: an engine may still have the previous one.
        self._request_id = context.make_request_id()
        self._fields = fields
        self._observer = observer
        self._call: UpstreamCall | None = None
        self._overlapped_prefill: OverlappedPrefill | None = None
        """The prefill call that runs beside the decode engine's call."""
        self._answer: CollectedAnswer | None = None
        """What has come of a response that is not streamed."""
        self._buffered_bytes = 0
        """What it has reserved of the buffer budget for it."""
        self._pending_start: PendingStart | None = None
        """The beginning of a stream that may still turn out to be an error."""
        self.stall_detector: StallDetector
        """Stall detection of the engine that works on the request."""
        self.streaming = False
        """Whether `on_stream_started` has been called."""
        self.pick = pick
        self.prefill = pick.prefill
        """Computes the prompt now; None: the prompt is computed, or the decode instance does it."""
        self.prompt_tokens = 0
        """As the prefill engine counted them."""
        self.prompt_details: PromptDetails | None = None
        """Of an overlapped prefill; None: there is none, so the decode engine is right."""
        self.sent_at = self.deadline = 0.0
        """Seconds: when the newest call was sent, and until when the next bytes must come."""
        self.instance_headers = b""
        """Header lines for the client that name the instances."""

    @property
    def target(self) -> Target:
        """The instance that works on the request now."""
        return self.prefill or self.pick.decode

    # --- what the proxied request calls ---

    def start(self) -> None:
        """Send the first call."""
        pick, context = self.pick, self._context
        pool = context.get_pool(pick.decode)
        self.instance_headers = pool.decode_header
        if self.prefill is None:
            self._send(pool, self._with_targets().fields)
            return
        prefill = context.get_pool(self.prefill)
        self.instance_headers = prefill.prefill_header + self.instance_headers
        if self.prefill.kv_port and can_overlap(context, pick, self._completion.prompt_tokens):
            self._send_overlapped(self.prefill, prefill, pool)
        else:
            source, completion = pick.source, self._with_targets(HANDOFF_SHARE)
            if source is None:
                fields = build_prefill_fields(completion)
            else:
                fields = build_prefill_fields(completion, build_prefix_source_params(source))
            self._send(prefill, fields)

    def find_timeout(self, now: float) -> Failure | None:
        """Whether its next bytes take too long. What takes a working engine longer would take any
        other as long; but before its first bytes a decode engine may wait for KV in vain."""
        if self.streaming and self._has_stalled(now):
            return Failure.STALL
        if now <= self.deadline:
            return None
        # Engines may hide the reasoning before an answer, or parse a call, after the role.
        has_begun = self.streaming or self._pending_start is not None
        waits = self.prefill is None and self.pick.prefill is not None and self._completion.stream
        if (waits and not has_begun) or not self.is_working(now):
            return Failure.TIMEOUT
        since = self.deadline if self.streaming else self.sent_at
        is_late = now - since > self._context.config.timeouts.response_s
        return None if has_begun and not is_late else Failure.TOO_LONG

    def _has_stalled(self, now: float) -> bool:
        """Whether all streams of the engine are silent, and it reports no steps, for too long."""
        detector, timeout_s = self.stall_detector, self.stall_detector.compute_stall_timeout_s()
        self.is_working(now)
        return now - detector.last_progress_at > timeout_s

    def is_working(self, now: float) -> bool:
        """Whether the engine has reported a step too recently to count as hung; the step counts as
        progress."""
        detector, target = self.stall_detector, self.target
        timeout_s = detector.compute_stall_timeout_s()
        instance = self._context.router.registry.instances.get(target.instance)
        if instance is None or instance.target.boot_id != target.boot_id:
            return False
        detector.record_progress(instance.stepped_at)
        return now - instance.stepped_at <= timeout_s

    def set_paused(self, blocked: bool) -> None:
        """Stop reading the response, or read again."""
        if self._call is not None:
            if blocked:
                self._call.pause()
            else:
                self._call.resume()

    def end(self) -> None:
        """Abort the calls that still run and release the instances' load accounting."""
        if self._call is not None:
            self._call.abort()
        if self._overlapped_prefill is not None:
            self._overlapped_prefill.abort()
        self._context.router.release(self.pick)
        self._pending_start = self._answer = None
        if self._buffered_bytes:
            self._release_buffered()

    # --- callbacks of engine calls ---

    def on_data(self, call: UpstreamCall, piece: bytes, complete: bool) -> None:
        """Bytes of an engine's response."""
        if self._overlapped_prefill is not None:
            # The decode engine cannot respond before the prompt is computed.
            self.prefill = None
        if self.prefill is not None or call.status != _OK or not _is_stream(call):
            self._buffer_body(call, piece, complete)
        elif self._completion.stream:
            self._start_stream(call, piece, complete)
        else:
            reason = "sent a stream that was not requested"
            self._handler.on_attempt_failed(Failure.STATUS, reason)

    def on_call_failed(self, call: UpstreamCall, reason: str) -> None:
        """A call failed."""
        if self._overlapped_prefill is not None:
            self.prefill = None
        self._handler.on_attempt_failed(Failure.LOST if call.sent else Failure.UNREACHED, reason)

    def fail(self) -> None:
        """A fault of this program has interrupted a call."""
        self._handler.fail()

    # --- callbacks of an overlapped prefill ---

    def on_prefill_done(self, prefill: Target, body: bytes) -> None:
        """The overlapped prefill is done; the decode engine has its KV already, or soon."""
        if self._observer is not None:
            self._observer.on_prefill_done(body)
        assert self.prompt_details is not None
        self.prompt_details.read(body)
        if self.prefill is None:
            self._context.metrics.handoffs["ahead"] += 1
        elif self._read_handoff(prefill, body, "ahead"):
            self.prefill = None
            timeouts = self._context.config.timeouts
            stream = self._completion.stream
            self.sent_at = self._context.clock()
            self.deadline = self.sent_at + (
                timeouts.first_byte_s if stream else timeouts.response_s
            )

    def on_prefill_failed(self, failure: Failure, reason: str) -> None:
        """The overlapped prefill failed; it matters only until the decode engine responds."""
        if self.prefill is not None:
            self._handler.on_attempt_failed(failure, reason)

    def on_prefill_rejected(self, call: UpstreamCall, body: bytes) -> None:
        """The prefill engine rejected the request; as `on_prefill_failed`."""
        if self.prefill is not None:
            self._handler.on_rejection(call, body)

    # --- sending ---

    def _send(self, pool: EnginePool, fields: Fields) -> None:
        if self._observer is not None:
            is_decode = self._overlapped_prefill is not None or self.prefill is None
            phase = "prefill" if not is_decode else "decode" if self.pick.prefill else "whole"
            target = self.pick.decode if is_decode else self.target
            self._fields = self._observer.on_call_sent(phase, target)
        timeouts = self._context.config.timeouts
        whole_response = self.prefill is None and not self._completion.stream
        wait_s = timeouts.response_s if whole_response else timeouts.first_byte_s
        self.sent_at = self._context.clock()
        self.deadline = self.sent_at + wait_s
        self.stall_detector = pool.stall_detector
        self._call = pool.send(self, self._build_payload(pool, fields))

    def _send_overlapped(self, prefill: Target, pool: EnginePool, decode: EnginePool) -> None:
        if self._observer is not None:
            self._fields = self._observer.on_call_sent("prefill", prefill)
        first, second = build_overlapped_fields(self._with_targets(), prefill, self._request_id)
        payload = self._build_payload(pool, first)
        self._overlapped_prefill = OverlappedPrefill(self, prefill, pool, payload)
        self.prompt_details = PromptDetails()
        self._send(decode, second)

    def _with_targets(self, reserved_share: float = 0.0) -> CompletionRequest:
        """The request with what is left of its targets, less this share of the whole TTFT."""
        if not self._sends_targets:
            return self._completion
        arrived_at, config, left_ms = self._arrived_at, self._context.config, None
        if arrived_at is not None:
            waited_ms = (self._context.clock() - arrived_at) * 1000
            left_ms = (1.0 - reserved_share) * config.ttft_slo_ms - waited_ms
        return set_targets(self._completion, left_ms, config.tpot_slo_ms)

    def _build_payload(self, pool: EnginePool, fields: Fields) -> list[Piece]:
        body, lines = encode_fields(fields), pool.key_header + self._fields
        size = sum(map(len, body))
        head = headers.build_request_head(self._path, pool.host, self._request_id, size, lines)
        return [head + body[0], *body[1:]]

    def _start_decode(self, prefill: Target, body: bytes) -> None:
        """The prefill is done: continue on the decode engine."""
        if self._observer is not None:
            self._observer.on_prefill_done(body)
        result = self._read_handoff(prefill, body, "used")
        if result is None:
            return
        self.prefill = None
        completion = self._with_targets()
        handoff = result[0]
        fields = completion.fields if handoff is None else build_decode_fields(completion, handoff)
        self._send(self._context.get_pool(self.pick.decode), fields)

    def _read_handoff(
        self, prefill: Target, body: bytes, result: str
    ) -> tuple[msgspec.Raw | None] | None:
        """A tuple with the handoff of a prefill response or None; None: it must not be used."""
        context = self._context
        try:
            handoff, prompt_tokens = read_handoff(body, prefill.boot_id, self._request_id)
        except HandoffError as error:
            context.metrics.handoffs["refused"] += 1
            self._handler.on_attempt_failed(Failure.HANDOFF, f"sent a handoff that {error}")
            return None
        context.metrics.handoffs[result if handoff is not None else "none"] += 1
        counted = context.metrics.models[self._completion.model]
        counted.phases["prefill"].observe(context.clock() - self.sent_at)
        self.prompt_tokens = prompt_tokens
        if handoff is not None:
            counted.handoff_tokens += prompt_tokens
        context.router.release(self.pick, _PREFILL)
        return (handoff,)

    # --- receiving ---

    def _buffer_body(self, call: UpstreamCall, piece: bytes, complete: bool) -> None:
        answer = self._answer
        if answer is None:
            if complete and len(piece) <= SMALL_RESPONSE_BYTES:
                self._handle_response(call, piece)
                return
            self._answer = answer = CollectedAnswer(piece)
        else:
            answer.add(piece)
        size = len(answer)
        if not self._reserve(size):
            self._fail_as_too_long()
        elif complete:
            body = answer.take()
            if isinstance(body, bytes):
                self._answer = None
            self._handle_response(call, body)

    def _fail_as_too_long(self) -> None:
        reason = "sent an answer that is too long"
        self._handler.on_attempt_failed(Failure.TOO_LONG, reason, RESPONSE_TOO_LONG)

    def _reserve(self, size: int) -> bool:
        """Reserve room for a large response; False: it exceeds its limit, or there is none."""
        growth = size - self._buffered_bytes
        if size > MAX_RESPONSE_BYTES or not self._context.buffer_budget.reserve(growth):
            return False
        self._buffered_bytes = size
        return True

    def _release_buffered(self) -> None:
        self._context.buffer_budget.release(self._buffered_bytes)
        self._buffered_bytes = 0

    def _handle_response(self, call: UpstreamCall, body: AnswerBody) -> None:
        status = call.status
        if 400 <= status < 500 and status != UNAUTHORIZED:
            self._handler.on_rejection(call, cut_error(body))
        elif status != _OK:
            self._record_failed_handoff()
            self._handler.on_attempt_failed(Failure.STATUS, f"answered with status {status}")
        elif self.prefill is not None:
            if (handoff := join_handoff(body)) is None:
                self._fail_as_too_long()
            else:
                self._answer = None
                self._release_buffered()
                self._start_decode(self.prefill, handoff)
        elif self._may_have_stale_kv():
            self._discard_response()
        elif self._completion.stream and self._path in RESUMABLE_PATHS:
            self._handler.on_attempt_failed(Failure.STATUS, "did not send the requested stream")
        else:
            if self.prompt_details is not None:
                body = self.prompt_details.replace_in_answer(body)
            self._handler.on_response(call, body)

    def _start_stream(self, call: UpstreamCall, piece: bytes, complete: bool) -> None:
        """The first bytes of a stream: its beginning, or an error that follows a status of 200."""
        held = self._pending_start
        verdict = classify_start(piece) if held is None else _PENDING
        if verdict is _PENDING:
            if held is None:
                self._pending_start = held = PendingStart()
            verdict = held.add(piece)
            if len(held.data) > SMALL_START_BYTES and not self._reserve(len(held.data)):
                self._fail_as_too_long()
                return
        if verdict is _FAILED or (complete and verdict is not _STARTED):
            self._record_failed_handoff()
            reason = "answered with an error in its stream, or with none"
            self._handler.on_attempt_failed(Failure.STATUS, reason)
        elif self._may_have_stale_kv():
            self._discard_response()
        elif verdict is _STARTED:
            if held is not None:
                piece, self._pending_start = bytes(held.data), None
                self._release_buffered()
            self.streaming = True
            if not complete:
                # The handler takes over the call, which saves a function call per token.
                call.listener = self._handler
            self._handler.on_stream_started(call)
            self._handler.on_data(call, piece, complete)

    def _record_failed_handoff(self) -> None:
        """An error from the decode engine means that the handed-over KV did not arrive."""
        if self.prefill is None and self.pick.prefill is not None:
            self._context.metrics.handoffs["failed"] += 1

    def _may_have_stale_kv(self) -> bool:
        """Whether the KV behind this response may have been overwritten when it was pulled.
        vLLM pulls the blocks that the handoff names even after its lease has expired. The lease
        expires only if the decode engine stood still, because it then sent no heartbeats."""
        if self.pick.prefill is None or self._context.clock() - self.sent_at < KV_LEASE_S:
            return False
        instance = self._context.router.registry.instances.get(self.pick.decode.instance)
        return instance is not None and instance.stalled_at > self.sent_at

    def _discard_response(self) -> None:
        self._record_failed_handoff()
        self._handler.on_attempt_failed(Failure.STATUS, "may have pulled KV whose lease was over")


def _is_stream(call: UpstreamCall) -> bool:
    return call.headers.get(headers.CONTENT_TYPE, b"").startswith(headers.STREAM_TYPE)
