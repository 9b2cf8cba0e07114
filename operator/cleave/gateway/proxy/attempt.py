"""One attempt at a request: the picked instances, the calls to them, the handoff between them.

Made by the exchange, which may make another when this one fails. What is hard: an engine can fail
in four ways (no connection, an error status, a handoff of another boot, an error as the first
event of a stream), and all four must be detected before anything goes to the client.
"""

from http import HTTPStatus
from typing import Protocol

import msgspec

from cleave.gateway.context import Context
from cleave.gateway.failover.retry_policy import Failure
from cleave.gateway.http import headers
from cleave.gateway.http.completion_request import (
    Completion,
    build_decode,
    build_prefill,
    build_whole,
)
from cleave.gateway.proxy.overlapped_prefill import Prefill, bodies, may_follow
from cleave.gateway.upstream.circuit_breaker import Pulse
from cleave.gateway.upstream.connection_pool import Call, EnginePool
from cleave.gateway.upstream.kv_transfer_params import HandoffError, read_handoff
from cleave.gateway.upstream.stream_start import Opening, judge_event, skip_roles
from cleave.router.instance import Target
from cleave.router.router import Phase, Pick

MAX_ANSWER_BYTES = 64 << 20
"""Of a response that is not streamed, which is buffered until it is complete."""
LEASE_S = 30.0
"""How long a prefill engine keeps KV for a decode engine that sends no heartbeats."""

# Enum attribute look-ups cost as much as a call, and these are compared for every request.
_OK = HTTPStatus.OK.value
_BEGIN = Opening.BEGIN
_FAIL = Opening.FAIL
_PREFILL = Phase.PREFILL


class Asker(Protocol):
    """Receives the outcome of an attempt: exactly one of answer, refuse, fail, or begin.

    After `begin` it becomes the owner of the call: `receive`, first with the bytes that began the
    stream, and `lose`.
    """

    def answer(self, call: Call, body: bytes) -> None:
        """The complete response."""

    def refuse(self, call: Call, body: bytes) -> None:
        """An engine rejected the request with a status below 500."""

    def begin(self, call: Call) -> None:
        """A stream has begun."""

    def receive(self, call: Call, piece: bytes, complete: bool) -> None:
        """A piece of the stream."""

    def lose(self, call: Call, reason: str) -> None:
        """The stream broke off; the reason continues `instance NAME ...`."""

    def fail(self, failure: Failure, reason: str) -> None:
        """The attempt failed; the reason continues `instance NAME ...`."""


class Attempt:
    """Calls to one or two engines: one after the other, or both at once where the decode engine
    pulls KV while it is computed (ahead.py). Start it once; end it once it is over."""

    __slots__ = (
        "_ahead",
        "_answer",
        "_answer_bytes",
        "_asker",
        "_call",
        "_completion",
        "_context",
        "_fields",
        "_id",
        "_opening",
        "_path",
        "_said_at",
        "deadline",
        "labels",
        "pick",
        "prefill",
        "prompt_tokens",
        "pulse",
        "sent_at",
        "streaming",
    )

    def __init__(
        self,
        context: Context,
        handler: Asker,
        path: bytes,
        completion: Completion,
        pick: Pick,
        fields: bytes = b"",
    ) -> None:
        """`fields`: header lines to add to the requests to engines."""
        self._context = context
        self._asker = handler
        self._path = path
        self._completion = completion
        # A new id for each attempt: an engine may still have the previous one.
        self._id = context.make_id()
        self._fields = fields
        self._call: Call | None = None
        self._ahead: Prefill | None = None
        """The prefill call that runs beside the decode engine's call."""
        self._answer: list[bytes] = []
        self._answer_bytes = 0
        self._opening = b""
        """First bytes of a stream that may still turn out to be an error."""
        self._said_at = 0
        """Offset in `_opening` of the first event that carries more than a role."""
        self.pulse: Pulse
        """Stall detection of the engine that works on the request."""
        self.streaming = False
        """Whether `begin` has been called."""
        self.pick = pick
        self.prefill = pick.prefill
        """Computes the prompt now; None: the prompt is computed, or the decode instance does it."""
        self.prompt_tokens = 0
        """As the prefill engine counted them."""
        self.sent_at = self.deadline = 0.0
        """Seconds of the context's clock: when the newest call was sent, and until when the next
        bytes must come."""
        self.labels = b""
        """Header lines for the client that name the instances."""

    @property
    def target(self) -> Target:
        """The instance that works on the request now."""
        return self.prefill or self.pick.decode

    # --- what the exchange calls ---

    def start(self) -> None:
        """Send the first call."""
        pick, context = self.pick, self._context
        pool = context.find_pool(pick.decode)
        self.labels = pool.decode_label
        if self.prefill is None:
            self._send(pool, build_whole(self._completion))
            return
        prefill = context.find_pool(self.prefill)
        self.labels = prefill.prefill_label + self.labels
        if self.prefill.kv_port and may_follow(context, pick, self._completion.prompt_tokens):
            self._send_both(self.prefill, prefill, pool)
        else:
            self._send(prefill, build_prefill(self._completion))

    def hold(self, blocked: bool) -> None:
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
        if self._ahead is not None:
            self._ahead.end()
        self._context.router.release(self.pick)

    # --- callbacks of engine calls ---

    def receive(self, call: Call, piece: bytes, complete: bool) -> None:
        """Bytes of an engine's response."""
        if self._ahead is not None:
            # The decode engine cannot respond before the prompt is computed.
            self.prefill = None
        if self.prefill is None and call.status == _OK and _is_stream(call):
            self._open_stream(call, piece, complete)
        else:
            self._gather(call, piece, complete)

    def lose(self, call: Call, reason: str) -> None:
        """A call failed."""
        if self._ahead is not None:
            self.prefill = None
        self._asker.fail(Failure.LOST if call.sent else Failure.UNREACHED, reason)

    # --- callbacks of an overlapped prefill ---

    def prefilled(self, prefill: Target, body: bytes) -> None:
        """The overlapped prefill is done; the decode engine has its KV already, or soon."""
        if self.prefill is None:
            self._context.metrics.handoffs["ahead"] += 1
        elif self._read_handoff(prefill, body, "ahead"):
            self.prefill = None
            timeouts = self._context.config.timeouts
            stream = self._completion.stream
            self.sent_at = self._context.clock()
            self.deadline = self.sent_at + (timeouts.first_byte_s if stream else timeouts.answer_s)

    def lose_prefill(self, failure: Failure, reason: str) -> None:
        """The overlapped prefill failed; it matters only until the decode engine responds."""
        if self.prefill is not None:
            self._asker.fail(failure, reason)

    def refuse_prefill(self, call: Call, body: bytes) -> None:
        """The prefill engine rejected the request; it matters only until the decode engine
        responds."""
        if self.prefill is not None:
            self._asker.refuse(call, body)

    # --- sending ---

    def _send(self, pool: EnginePool, body: bytes) -> None:
        timeouts = self._context.config.timeouts
        whole_answer = self.prefill is None and not self._completion.stream
        wait_s = timeouts.answer_s if whole_answer else timeouts.first_byte_s
        self.sent_at = self._context.clock()
        self.deadline = self.sent_at + wait_s
        self.pulse = pool.pulse
        self._call = pool.send(self, self._payload(pool, body))

    def _send_both(self, prefill: Target, pool: EnginePool, decode: EnginePool) -> None:
        first, second = bodies(self._completion, prefill, self._id)
        self._ahead = Prefill(self, prefill, pool, self._payload(pool, first))
        self._send(decode, second)

    def _payload(self, pool: EnginePool, body: bytes) -> bytes:
        return (
            headers.build_engine_head(self._path, pool.host, self._id, len(body), self._fields)
            + body
        )

    def _hand_over(self, prefill: Target, body: bytes) -> None:
        """The prefill is done: continue on the decode engine."""
        completion = self._completion
        result = self._read_handoff(prefill, body, "used")
        if result is None:
            return
        self.prefill = None
        handoff = result[0]
        second = build_whole(completion) if handoff is None else build_decode(completion, handoff)
        self._send(self._context.find_pool(self.pick.decode), second)

    def _read_handoff(
        self, prefill: Target, body: bytes, result: str
    ) -> tuple[msgspec.Raw | None] | None:
        """The handoff of a prefill response, in a tuple because there may be none; None: it must
        not be used."""
        context = self._context
        try:
            handoff, prompt_tokens = read_handoff(body, prefill.boot_id, self._id)
        except HandoffError as error:
            context.metrics.handoffs["refused"] += 1
            self._asker.fail(Failure.HANDOFF, f"sent a handoff that {error}")
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

    def _gather(self, call: Call, piece: bytes, complete: bool) -> None:
        """Buffer a response until it is complete."""
        self._answer.append(piece)
        self._answer_bytes += len(piece)
        if self._answer_bytes > MAX_ANSWER_BYTES:
            self._asker.fail(Failure.STATUS, "sent an answer that is too long")
        elif complete:
            body = b"".join(self._answer)
            self._answer.clear()
            self._answer_bytes = 0
            self._judge(call, body)

    def _judge(self, call: Call, body: bytes) -> None:
        if call.status >= 500:
            self._note_failed_handoff()
            self._asker.fail(Failure.STATUS, f"answered with status {call.status}")
        elif call.status != _OK:
            self._asker.refuse(call, body)
        elif self.prefill is not None:
            self._hand_over(self.prefill, body)
        elif self._may_be_stale():
            self._throw_away()
        else:
            self._asker.answer(call, body)

    def _open_stream(self, call: Call, piece: bytes, complete: bool) -> None:
        """The first bytes of a stream: its beginning, or an error that follows a status of 200."""
        start = self._opening + piece
        self._said_at = skip_roles(start, self._said_at)
        verdict = judge_event(start, self._said_at)
        if verdict is _FAIL:
            self._note_failed_handoff()
            self._asker.fail(Failure.STATUS, "answered with an error in its stream")
        elif self._may_be_stale():
            self._throw_away()
        elif verdict is _BEGIN or complete:
            self.streaming, self._opening = True, b""
            if not complete:
                # The handler takes over the call, which saves a function call per token.
                call.owner = self._asker
            self._asker.begin(call)
            self._asker.receive(call, start, complete)
        else:
            self._opening = start

    def _note_failed_handoff(self) -> None:
        """An error from the decode engine means that the handed-over KV did not arrive."""
        if self.prefill is None and self.pick.prefill is not None:
            self._context.metrics.handoffs["failed"] += 1

    def _may_be_stale(self) -> bool:
        """Whether the KV behind this response may have been overwritten when it was pulled.

        vLLM pulls the blocks that the handoff names even after its lease has expired. The lease
        expires only if the decode engine stood still, because it then sent no heartbeats.
        """
        if self.pick.prefill is None or self._context.clock() - self.sent_at < LEASE_S:
            return False
        instance = self._context.router.directory.instances.get(self.pick.decode.instance)
        return instance is not None and instance.stood_still_at > self.sent_at

    def _throw_away(self) -> None:
        self._note_failed_handoff()
        self._asker.fail(Failure.STATUS, "may have pulled KV whose lease was over")


def _is_stream(call: Call) -> bool:
    for name, value in call.headers:
        if name == b"content-type":
            return value.startswith(b"text/event-stream")
    return False
