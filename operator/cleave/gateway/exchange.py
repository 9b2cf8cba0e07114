"""The life of one completion request: pick, prefill, hand-off, decode, and what goes wrong between.

Made by a client's connection for each request; lives until the answer is complete, has failed or
the client is gone. Calls to engines and the client's connection call back, the sweeper looks after
the deadline. What is hard: until the first byte has gone to the client everything may be tried
again elsewhere, after it nothing may; and whichever way it ends, books and connections are released
exactly once.
"""

from http import HTTPStatus
from typing import Protocol

import msgspec

from cleave.gateway import head
from cleave.gateway.completion import (
    Completion,
    build_decode,
    build_prefill,
    build_whole,
)
from cleave.gateway.context import Context
from cleave.gateway.engine import Call, EnginePool
from cleave.gateway.errors import ApiError, fail_engine, from_router
from cleave.gateway.handoff import (
    HandoffError,
    read_handoff,
    read_usage,
    strip_handoff,
)
from cleave.gateway.opening import Opening, judge_opening
from cleave.gateway.recovery import Failure, Recovery, choose
from cleave.gateway.relay import Relay
from cleave.router.errors import NoInstance, QueueFull, RouterError
from cleave.router.router import Phase, Pick

MAX_ANSWER_BYTES = 64 << 20
"""Of an answer that is not streamed, which has to be held whole."""

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
    """One completion request. Events come from the client, from calls and from the sweeper."""

    def __init__(
        self, context: Context, client: Client, path: bytes, request_id: bytes, body: Completion
    ) -> None:
        self._context = context
        self._client = client
        self._path = path
        self._request_id = request_id
        self._completion = body
        self._recovery: Recovery | None = None
        self._pick: Pick | None = None
        self._call: Call | None = None
        self._prefilling = False
        self._answer: list[bytes] = []
        self._answer_bytes = 0
        self._opening = b""
        """Of a stream, while it cannot be told from a failure."""
        self._relay: Relay | None = None
        self._answered = False
        self._progress = self._swept_progress = 0
        self._started = context.clock()
        self._deadline = 0.0
        self._engine_id = b""
        """Sent to engines; another one for each attempt, lest it meets its predecessor there."""
        self._labels = b""
        """Header lines that name the instances."""

    # --- what others call ---

    def start(self) -> None:
        """Place the request and send it off."""
        context = self._context
        context.exchanges.add(self)
        context.unanswered += 1
        context.metrics.in_flight += 1
        if context.unanswered > context.config.queue_limit:
            self._answer_error(from_router(QueueFull("too many requests wait already")), "shed")
        else:
            self._place()

    def cancel(self) -> None:
        """The client is gone: stop whatever runs for it."""
        self._end("cancelled")

    def receive(self, call: Call, piece: bytes, complete: bool) -> None:
        """Bytes of an engine's answer."""
        self._progress += 1
        if self._relay is not None:
            self._pass_on(self._relay, piece, complete)
        elif not self._prefilling and call.status == HTTPStatus.OK and _is_stream(call):
            self._open_stream(call, piece, complete)
        else:
            self._gather(call, piece, complete)

    def lose(self, call: Call, reason: str) -> None:
        """A call failed."""
        del call
        self._fail(Failure.LOST, reason)

    def hold(self, blocked: bool) -> None:
        """The client takes no more, or takes bytes again."""
        if self._call is not None:
            if blocked:
                self._call.pause()
            else:
                self._call.resume()

    def sweep(self, now: float) -> None:
        """Keep the deadline, which moves with every piece of a stream."""
        if self._relay is not None and self._progress != self._swept_progress:
            self._swept_progress = self._progress
            self._deadline = now + self._context.config.timeouts.idle_s
        elif now > self._deadline:
            if self._client.blocked:
                self._end("cancelled")
                self._client.drop()
            else:
                self._fail(Failure.TIMEOUT, "took too long")

    # --- sending ---

    def _place(self) -> None:
        """Pick instances and send the first call."""
        completion = self._completion
        try:
            pick = choose(self._context.router, completion, self._recovery)
        except RouterError as error:
            self._answer_error(
                from_router(error), "unavailable" if isinstance(error, NoInstance) else "refused"
            )
            return
        self._pick = pick
        self._engine_id = self._context.make_id()
        self._context.metrics.dispatches[completion.model, pick.reason] += 1
        pool = self._context.find_pool(pick.decode)
        if pick.prefill is None:
            self._labels = b"x-cleave-decode: %b\r\n" % pool.name
            self._send(pool, build_whole(completion))
            return
        prefill_pool = self._context.find_pool(pick.prefill)
        self._labels = b"x-cleave-prefill: %b\r\nx-cleave-decode: %b\r\n" % (
            prefill_pool.name,
            pool.name,
        )
        self._prefilling = True
        self._send(prefill_pool, build_prefill(completion))

    def _send(self, pool: EnginePool, body: bytes) -> None:
        timeouts = self._context.config.timeouts
        whole_answer = not self._prefilling and not self._completion.stream
        wait_s = timeouts.answer_s if whole_answer else timeouts.first_byte_s
        self._deadline = self._context.clock() + wait_s
        payload = head.build_engine_head(self._path, pool.host, self._engine_id, len(body)) + body
        self._call = pool.send(self, payload)

    # --- receiving ---

    def _gather(self, call: Call, piece: bytes, complete: bool) -> None:
        """Hold an answer until it is whole."""
        self._answer.append(piece)
        self._answer_bytes += len(piece)
        if self._answer_bytes > MAX_ANSWER_BYTES:
            self._fail(Failure.STATUS, "sent an answer that is too long")
        elif complete:
            body = b"".join(self._answer)
            self._answer.clear()
            self._answer_bytes = 0
            self._call = None
            if call.status >= 500:
                self._fail(Failure.STATUS, f"answered with status {call.status}")
            elif call.status != HTTPStatus.OK:
                self._pass_refusal(call, body)
            elif self._prefilling:
                self._hand_over(body)
            else:
                self._answer_whole(call, body)

    def _hand_over(self, body: bytes) -> None:
        """Prefill is done: continue on the decode engine."""
        pick, metrics = self._pick, self._context.metrics
        assert pick is not None
        assert pick.prefill is not None
        try:
            handoff, prompt_tokens = read_handoff(body, pick.prefill.boot_id)
        except HandoffError as error:
            metrics.handoffs["refused"] += 1
            self._fail(Failure.HANDOFF, f"gave a hand-off that {error}")
            return
        metrics.models[self._completion.model].prompt_tokens += prompt_tokens
        self._context.router.release(pick, Phase.PREFILL)
        self._prefilling = False
        pool = self._context.find_pool(pick.decode)
        metrics.handoffs["used" if handoff is not None else "none"] += 1
        self._send(pool, self._build_second(handoff))

    def _build_second(self, handoff: msgspec.Raw | None) -> bytes:
        if handoff is None:
            return build_whole(self._completion)
        return build_decode(self._completion, handoff)

    def _open_stream(self, call: Call, piece: bytes, complete: bool) -> None:
        """The first bytes of a stream: an answer, or a failure that came after the status."""
        opening = self._opening + piece
        verdict = judge_opening(opening)
        if verdict is Opening.FAIL:
            self._fail(Failure.STATUS, "answered with an error in its stream")
        elif verdict is Opening.BEGIN or complete:
            self._begin_stream(call, opening, complete)
        else:
            self._opening = opening

    def _begin_stream(self, call: Call, piece: bytes, complete: bool) -> None:
        """From here on there is no second attempt."""
        self._opening = b""
        self._note_answered()
        client = self._client
        fields = head.pass_on(call.headers) + self._labels
        if not client.keep_alive:
            fields += head.CLOSE
        first = head.build_stream_head(call.status, fields, self._request_id, client.chunked)
        relay = self._relay = Relay(first, client.chunked, self._context.clock())
        self._pass_on(relay, piece, complete)

    def _pass_on(self, relay: Relay, piece: bytes, complete: bool) -> None:
        try:
            data = relay.pass_on(piece, complete)
        except HandoffError:
            self._break_off(relay, _LEAK)
            return
        self._client.write(data)
        if complete:
            self._call = None
            self._observe(relay)
            self._end("ok")
            self._client.end(reusable=True)

    def _break_off(self, relay: Relay, error: ApiError) -> None:
        """End a stream that has begun."""
        self._client.write(relay.break_off(error))
        self._observe(relay)
        self._end("broken")
        self._client.end(reusable=False)

    def _answer_whole(self, call: Call, body: bytes) -> None:
        try:
            stripped = strip_handoff(body)
        except HandoffError:
            self._answer_error(_LEAK, "failed")
            return
        usage = read_usage(body)
        counted = self._context.metrics.models[self._completion.model]
        counted.output_tokens += usage.completion_tokens or 0
        pick = self._pick
        if pick is not None and pick.prefill is None:
            counted.prompt_tokens += usage.prompt_tokens
        self._respond(call.status, head.pass_on(call.headers) + self._labels, stripped, "ok")

    def _pass_refusal(self, call: Call, body: bytes) -> None:
        """An engine's own 4xx goes to the client unchanged, unless it quotes the hand-off."""
        if b"remote_engine_id" in body and not self._prefilling:
            refusal = ApiError(
                HTTPStatus(call.status), "the engine refused the request", "invalid_request_error"
            )
            self._answer_error(refusal, "refused")
            return
        self._respond(call.status, head.pass_on(call.headers), body, "refused")

    # --- failing ---

    def _fail(self, failure: Failure, reason: str) -> None:
        """An engine let the request down: again elsewhere, or tell the client."""
        pick = self._pick
        assert pick is not None
        self._abandon()
        status = HTTPStatus.BAD_GATEWAY
        if failure is Failure.TIMEOUT:
            status = HTTPStatus.GATEWAY_TIMEOUT
        prefill = pick.prefill if self._prefilling else None
        name = (prefill or pick.decode).instance
        error = fail_engine(status, f"instance {name} {reason}")
        metrics = self._context.metrics
        metrics.retries["prefill" if prefill is not None else "decode", failure.value] += 1
        if self._relay is not None:
            self._break_off(self._relay, error)
            return
        if self._recovery is None:
            self._recovery = Recovery()
        if prefill is not None:
            again = self._recovery.note_prefill(name) or self._context.router.allows_whole(True)
        else:
            again = self._recovery.note_decode(name, failure, pick.prefill is not None)
        self._prefilling = False
        if again:
            self._place()
        else:
            self._answer_error(error, "failed")

    def _abandon(self) -> None:
        """Drop the running call and release the books."""
        call, self._call = self._call, None
        if call is not None:
            call.abort()
        pick, self._pick = self._pick, None
        if pick is not None:
            self._context.router.release(pick)
        self._answer.clear()
        self._answer_bytes = 0
        self._opening = b""

    # --- ending ---

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

    def _observe(self, relay: Relay) -> None:
        """Count a stream that is over."""
        counted = self._context.metrics.models[self._completion.model]
        counted.ttft.observe(relay.began_at - self._started)
        counted.output_tokens += relay.events
        if relay.events > 1:
            elapsed = self._context.clock() - relay.began_at
            counted.tpot.observe(elapsed / (relay.events - 1))
        if self._pick is not None and self._pick.prefill is None:
            counted.prompt_tokens += self._completion.prompt_tokens

    def _note_answered(self) -> None:
        """The first byte has come, so the prompt is computed."""
        self._answered = True
        self._context.unanswered -= 1
        if self._pick is not None:
            self._context.router.release(self._pick, Phase.PREFILL)

    def _end(self, outcome: str) -> None:
        """Release everything, once."""
        context = self._context
        if self not in context.exchanges:
            return
        context.exchanges.discard(self)
        if not self._answered:
            context.unanswered -= 1
        self._abandon()
        context.metrics.in_flight -= 1
        known = self._completion.model in context.router.directory.models
        context.metrics.requests[self._completion.model if known else "", outcome] += 1


def _is_stream(call: Call) -> bool:
    for name, value in call.headers:
        if name == b"content-type":
            return value.startswith(b"text/event-stream")
    return False
