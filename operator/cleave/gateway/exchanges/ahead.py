"""A prefill whose KV the decode engine follows: both are asked at the same time.

Made by an attempt where engines can do that and the decode engine has room at once; otherwise the
prompt's KV waits in the prefill engine, whose memory is the queue. The decode engine compares what
it follows itself. What is hard: two answers come, in any order. The decode engine's first byte says
that the prompt is computed; until then a failed prefill fails the attempt, afterwards nothing does.
"""

from http import HTTPStatus
from typing import Protocol

from cleave.gateway.completion import Completion, build_decode, build_prefill
from cleave.gateway.context import Context
from cleave.gateway.engines.engine import Call, EnginePool
from cleave.gateway.engines.handoff import ask_ahead, promise
from cleave.gateway.recovery.recovery import Failure
from cleave.router.instance import Target
from cleave.router.router import Pick

_MAX_ANSWER_BYTES = 16 << 20
"""Of a prefill: one token, its hand-off, what log-probabilities were asked for."""
_OK = HTTPStatus.OK.value


class Waiting(Protocol):
    """The attempt that the prefill is for."""

    def prefilled(self, prefill: Target, body: bytes) -> None:
        """Its answer is there."""

    def lose_prefill(self, failure: Failure, reason: str) -> None:
        """It failed."""

    def refuse_prefill(self, call: Call, body: bytes) -> None:
        """The engine found fault with the request."""


def may_follow(context: Context, pick: Pick, prompt_tokens: int) -> bool:
    """Whether the decode engine had better be asked now.

    Blocks that wait for a prompt serve nobody: both engines must be able to begin at once.
    """
    prefill = pick.prefill
    # Who cannot be followed cannot follow either.
    if prefill is None or not prefill.kv_port or not pick.decode.kv_port:
        return False
    least = prefill.ahead_from_tokens or context.config.ahead_from_tokens
    if not least or prompt_tokens < least:
        return False
    known = context.router.directory.instances
    one, other = known.get(prefill.instance), known.get(pick.decode.instance)
    return (
        one is not None
        and other is not None
        and not one.load.num_waiting
        and other.has_room(prompt_tokens)
    )


def bodies(completion: Completion, prefill: Target, name: bytes) -> tuple[bytes, bytes]:
    """What prefill and decode engine are asked; `name`: of this attempt and no other."""
    return (
        build_prefill(completion, ask_ahead(name)),
        build_decode(completion, promise(prefill, name)),
    )


class Prefill:
    """The call to the prefill engine, while another runs at the decode engine."""

    __slots__ = ("_call", "_parts", "_size", "_target", "_waiting")

    def __init__(self, waiting: Waiting, target: Target, pool: EnginePool, payload: bytes) -> None:
        self._waiting = waiting
        self._target = target
        self._parts: list[bytes] = []
        self._size = 0
        self._call: Call | None = pool.send(self, payload)

    def end(self) -> None:
        """Its answer is not wanted any more; the engine stops."""
        call, self._call = self._call, None
        if call is not None:
            call.abort()

    def receive(self, call: Call, piece: bytes, complete: bool) -> None:
        """Bytes of the answer."""
        self._parts.append(piece)
        self._size += len(piece)
        if self._size > _MAX_ANSWER_BYTES:
            self.end()
            self._waiting.lose_prefill(Failure.STATUS, "sent an answer that is too long")
        elif complete:
            self._call = None
            body = b"".join(self._parts)
            if call.status == _OK:
                self._waiting.prefilled(self._target, body)
            elif call.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                self._waiting.lose_prefill(Failure.STATUS, f"answered with status {call.status}")
            else:
                self._waiting.refuse_prefill(call, body)

    def lose(self, call: Call, reason: str) -> None:
        """The call failed."""
        self._call = None
        self._waiting.lose_prefill(Failure.LOST if call.sent else Failure.UNREACHED, reason)
