"""One try at a request: the instances picked for it, the calls to them, the hand-off between.

Made by the exchange, which may make another when this one fails. What is hard: an engine's answer
can be a failure in four ways (no connection, a status, a hand-off of another boot, an error as the
first thing in a stream), and all of them must be known before anything goes to the client.
"""

from http import HTTPStatus
from typing import Protocol

import msgspec

from cleave.gateway import head
from cleave.gateway.completion import Completion, build_decode, build_prefill, build_whole
from cleave.gateway.context import Context
from cleave.gateway.engines.engine import Call, EnginePool
from cleave.gateway.engines.handoff import HandoffError, read_handoff
from cleave.gateway.engines.health import Pulse
from cleave.gateway.engines.opening import Opening, judge_event, skip_roles
from cleave.gateway.exchanges.ahead import Prefill, bodies, may_follow
from cleave.gateway.recovery.recovery import Failure
from cleave.router.instance import Target
from cleave.router.router import Phase, Pick

MAX_ANSWER_BYTES = 64 << 20
"""Of an answer that is not streamed, which has to be held whole."""
LEASE_S = 30.0
"""How long KV is kept for a decode engine that says nothing."""

# Looking a member up takes an enum as long as a call does; these are compared for every request.
_OK = HTTPStatus.OK.value
_BEGIN = Opening.BEGIN
_FAIL = Opening.FAIL
_PREFILL = Phase.PREFILL


class Asker(Protocol):
    """Who wants the answer. Hears of exactly one: answer, refuse, fail, or begin.

    From `begin` on it hears of the call itself: `receive`, first with what began it, and `lose`.
    """

    def answer(self, call: Call, body: bytes) -> None:
        """The whole answer."""

    def refuse(self, call: Call, body: bytes) -> None:
        """An engine found fault with the request."""

    def begin(self, call: Call) -> None:
        """A stream begins."""

    def receive(self, call: Call, piece: bytes, complete: bool) -> None:
        """Some of the stream."""

    def lose(self, call: Call, reason: str) -> None:
        """The stream broke; the reason continues `instance NAME ...`."""

    def fail(self, failure: Failure, reason: str) -> None:
        """An engine let it down; the reason continues `instance NAME ...`."""


class Attempt:
    """Calls to one or two engines, one after the other, or both at once where the decode engine
    follows the prefill (ahead.py). Start it once; end it once it is over."""

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
        asker: Asker,
        path: bytes,
        completion: Completion,
        pick: Pick,
        fields: bytes = b"",
    ) -> None:
        """`fields`: header lines for engines."""
        self._context = context
        self._asker = asker
        self._path = path
        self._completion = completion
        # Another one for each attempt, lest it meets its predecessor in an engine.
        self._id = context.make_id()
        self._fields = fields
        self._call: Call | None = None
        self._ahead: Prefill | None = None
        """Runs beside the decode engine's call."""
        self._answer: list[bytes] = []
        self._answer_bytes = 0
        self._opening = b""
        """Of a stream, while it cannot be told from a failure."""
        self._said_at = 0
        """Where in it the first event begins that does not only name a role."""
        self.pulse: Pulse
        """Of the engine that works on it."""
        self.streaming = False
        """Whether the asker has heard `begin`."""
        self.pick = pick
        self.prefill = pick.prefill
        """Computes the prompt now; None: that is done, or left to the decode instance."""
        self.prompt_tokens = 0
        """As the prefill engine counted them."""
        self.sent_at = self.deadline = 0.0
        """Seconds of the context's clock: the newest call, and for what comes next."""
        self.labels = b""
        """Header lines that name the instances."""

    @property
    def target(self) -> Target:
        """The instance that works on it now."""
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
        """Read no more of the answer, or read on."""
        if self._call is not None:
            if blocked:
                self._call.pause()
            else:
                self._call.resume()

    def end(self) -> None:
        """Stop what still runs and release the books."""
        if self._call is not None:
            self._call.abort()
        if self._ahead is not None:
            self._ahead.end()
        self._context.router.release(self.pick)

    # --- what calls to engines call ---

    def receive(self, call: Call, piece: bytes, complete: bool) -> None:
        """Bytes of an engine's answer."""
        if self._ahead is not None:
            # It could not answer if the prompt were not computed.
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

    # --- what a prefill that runs beside the decode calls ---

    def prefilled(self, prefill: Target, body: bytes) -> None:
        """The prompt is computed; the decode engine has its KV already, or soon."""
        if self.prefill is None:
            self._context.metrics.handoffs["ahead"] += 1
        elif self._read_handoff(prefill, body, "ahead"):
            self.prefill = None
            timeouts = self._context.config.timeouts
            stream = self._completion.stream
            self.sent_at = self._context.clock()
            self.deadline = self.sent_at + (timeouts.first_byte_s if stream else timeouts.answer_s)

    def lose_prefill(self, failure: Failure, reason: str) -> None:
        """The prompt was not computed there, unless the decode engine knows better."""
        if self.prefill is not None:
            self._asker.fail(failure, reason)

    def refuse_prefill(self, call: Call, body: bytes) -> None:
        """Fault was found with the request, unless the decode engine answers it."""
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
            head.build_engine_head(self._path, pool.host, self._id, len(body), self._fields) + body
        )

    def _hand_over(self, prefill: Target, body: bytes) -> None:
        """Prefill is done: continue on the decode engine."""
        completion = self._completion
        handed = self._read_handoff(prefill, body, "used")
        if handed is None:
            return
        self.prefill = None
        handoff = handed[0]
        second = build_whole(completion) if handoff is None else build_decode(completion, handoff)
        self._send(self._context.find_pool(self.pick.decode), second)

    def _read_handoff(
        self, prefill: Target, body: bytes, result: str
    ) -> tuple[msgspec.Raw | None] | None:
        """The hand-off of a prefill's answer, if it has one; None: it must not be used."""
        context = self._context
        try:
            handoff, prompt_tokens = read_handoff(body, prefill.boot_id, self._id)
        except HandoffError as error:
            context.metrics.handoffs["refused"] += 1
            self._asker.fail(Failure.HANDOFF, f"gave a hand-off that {error}")
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
        """Hold an answer until it is whole."""
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
        """The first bytes of a stream: an answer, or a failure that came after the status."""
        opening = self._opening + piece
        self._said_at = skip_roles(opening, self._said_at)
        verdict = judge_event(opening, self._said_at)
        if verdict is _FAIL:
            self._note_failed_handoff()
            self._asker.fail(Failure.STATUS, "answered with an error in its stream")
        elif self._may_be_stale():
            self._throw_away()
        elif verdict is _BEGIN or complete:
            self.streaming, self._opening = True, b""
            if not complete:
                # One call less for each token.
                call.owner = self._asker
            self._asker.begin(call)
            self._asker.receive(call, opening, complete)
        else:
            self._opening = opening

    def _note_failed_handoff(self) -> None:
        """An error in the place of an answer means, of a hand-off, that its KV did not come."""
        if self.prefill is None and self.pick.prefill is not None:
            self._context.metrics.handoffs["failed"] += 1

    def _may_be_stale(self) -> bool:
        """Whether the KV of this answer may have been another's when it was pulled.

        vLLM pulls what lies where the hand-off says, also when its lease is over. That ends only
        if the decode engine stood still, for then it sent no heartbeats.
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
