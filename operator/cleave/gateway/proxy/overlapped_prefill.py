"""Overlapped prefill: the prefill and the decode engine are called at the same time.

Made by an attempt if both engines can transfer KV while it is computed and the decode engine has
room at once; otherwise the prompt's KV waits in the prefill engine, whose memory is the queue. The
decode engine itself checks which prefill the KV belongs to. What is hard: two responses come, in
any order. The decode engine's first byte proves that the prompt is computed; until then a failed
prefill fails the attempt, afterwards it changes nothing.
"""

from http import HTTPStatus
from typing import Protocol

from cleave.gateway.context import GatewayContext
from cleave.gateway.failover.retry_policy import Failure
from cleave.gateway.http.completion_request import (
    CompletionRequest,
    Fields,
    Piece,
    build_decode_fields,
    build_prefill_fields,
)
from cleave.gateway.upstream import kv_transfer_params
from cleave.gateway.upstream.collected_answer import CollectedAnswer, join_handoff
from cleave.gateway.upstream.connection_pool import EnginePool, UpstreamCall
from cleave.gateway.upstream.engine_errors import cut_error
from cleave.router.instance import Target
from cleave.router.router import Pick

_MAX_RESPONSE_BYTES = 16 << 20
"""Of a prefill's response. Only a rejection, which may quote the request, is as long."""
_OK = HTTPStatus.OK.value
UNAUTHORIZED = HTTPStatus.UNAUTHORIZED.value
"""The engine was started again and has another key: not the client's fault."""


class PrefillListener(Protocol):
    """The attempt that the prefill belongs to."""

    def on_prefill_done(self, prefill: Target, body: bytes) -> None:
        """The prefill has responded."""

    def on_prefill_failed(self, failure: Failure, reason: str) -> None:
        """The prefill failed."""

    def on_prefill_rejected(self, call: UpstreamCall, body: bytes) -> None:
        """The engine rejected the request."""

    def fail(self) -> None:
        """A fault of this program has interrupted the call."""


def can_overlap(context: GatewayContext, pick: Pick, prompt_tokens: int) -> bool:
    """Whether to call the decode engine at once instead of after the prefill.
    Blocks reserved for a prompt that is still queued would be wasted, so both engines must be able
    to begin immediately."""
    prefill = pick.prefill
    # Overlap needs the KV service at both ends.
    if prefill is None or not prefill.kv_port or not pick.decode.kv_port:
        return False
    min_tokens = prefill.overlap_min_tokens or context.ahead_from_tokens
    if not min_tokens or prompt_tokens < min_tokens:
        return False
    instances = context.router.registry.instances
    prefiller, decoder = instances.get(prefill.instance), instances.get(pick.decode.instance)
    if prefiller is None or decoder is None:
        return False
    return not prefiller.load.num_waiting and decoder.has_room(prompt_tokens)


def build_overlapped_fields(
    completion: CompletionRequest, prefill: Target, name: bytes
) -> tuple[Fields, Fields]:
    """Those for the prefill and the decode engine; `name`: the attempt's unique id."""
    return (
        build_prefill_fields(completion, kv_transfer_params.build_overlapped_prefill_params(name)),
        build_decode_fields(completion, kv_transfer_params.build_pending_handoff(prefill, name)),
    )


class OverlappedPrefill:
    """The call to the prefill engine that runs beside the call to the decode engine."""

    __slots__ = ("_answer", "_call", "_listener", "_target")

    def __init__(
        self, listener: PrefillListener, target: Target, pool: EnginePool, payload: list[Piece]
    ) -> None:
        self._listener = listener
        self._target = target
        self._answer: CollectedAnswer | None = None
        self._call: UpstreamCall | None = pool.send(self, payload)

    def abort(self) -> None:
        """The response is no longer needed: abort, which stops the engine."""
        call, self._call = self._call, None
        if call is not None:
            call.abort()

    def on_data(self, call: UpstreamCall, piece: bytes, complete: bool) -> None:
        """Bytes of the response."""
        if self._answer is None:
            self._answer = CollectedAnswer(piece)
        else:
            self._answer.add(piece)
        if len(self._answer) > _MAX_RESPONSE_BYTES:
            self._fail_as_too_long()
        elif complete:
            self._call = None
            body = self._answer.take()
            if call.status == _OK:
                if (handoff := join_handoff(body)) is None:
                    self._fail_as_too_long()
                else:
                    self._listener.on_prefill_done(self._target, handoff)
            elif 400 <= call.status < 500 and call.status != UNAUTHORIZED:
                self._listener.on_prefill_rejected(call, cut_error(body))
            else:
                reason = f"answered with status {call.status}"
                self._listener.on_prefill_failed(Failure.STATUS, reason)

    def _fail_as_too_long(self) -> None:
        self.abort()
        self._listener.on_prefill_failed(Failure.STATUS, "sent an answer that is too long")

    def on_call_failed(self, call: UpstreamCall, reason: str) -> None:
        """The call failed."""
        self._call = None
        self._listener.on_prefill_failed(Failure.LOST if call.sent else Failure.UNREACHED, reason)

    def fail(self) -> None:
        """A fault of this program has interrupted the call."""
        self._listener.fail()
