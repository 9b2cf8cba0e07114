"""Requests of the witness itself to engines, over the connections that clients' requests use.

Used by canaries. A coroutine for each call, as there are a few in a second at most.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from cleave.gateway.context import GatewayContext
from cleave.gateway.http import headers
from cleave.gateway.upstream.connection_pool import EnginePool, UpstreamCall
from cleave.router.instance import Target

MAX_ANSWER_BYTES = 8 << 20


class EngineCallError(RuntimeError):
    """An engine gave no usable answer; the message continues `instance NAME ...`."""


class EngineTimeoutError(EngineCallError):
    """An engine has not answered in time; the connection is closed, so it ends the request."""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """The complete answer of an engine."""

    status: int
    body: bytes
    ms: float
    """From the request to the end of the answer."""


class _AnswerListener:
    """Collects the answer to one call."""

    def __init__(self) -> None:
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def on_data(self, call: UpstreamCall, piece: bytes, complete: bool) -> None:
        """A piece of the answer."""
        self._parts.append(piece)
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_ANSWER_BYTES:
            call.abort()
            self.on_call_failed(call, "sent an answer that is too long")
        elif complete and not self.done.done():
            self.done.set_result(b"".join(self._parts))

    def on_call_failed(self, call: UpstreamCall, reason: str) -> None:
        """No complete answer comes."""
        del call
        if not self.done.done():
            self.done.set_exception(EngineCallError(reason))

    def fail(self) -> None:
        """A fault of this program has interrupted the call."""
        if not self.done.done():
            self.done.set_exception(EngineCallError("was called by a gateway with a fault"))


async def post(
    context: GatewayContext,
    target: Target,
    path: bytes,
    fields: Mapping[str, object],
    request_id: bytes,
    seconds: float,
) -> EngineAnswer:
    """Send JSON and read the answer within `seconds`. Raises EngineCallError, of which
    EngineTimeoutError is one."""
    pool, body = context.get_pool(target), msgspec.json.encode(fields)
    head = headers.build_request_head(path, pool.host, request_id, len(body), pool.key_header)
    return await _call(context, pool, head + body, seconds)


async def fetch(
    context: GatewayContext, target: Target, path: bytes, seconds: float
) -> EngineAnswer:
    """GET a path within `seconds`. Raises EngineCallError."""
    pool = context.get_pool(target)
    head = headers.build_get_head(path, pool.host, context.make_request_id(), pool.key_header)
    return await _call(context, pool, head, seconds)


async def _call(
    context: GatewayContext, pool: EnginePool, payload: bytes, seconds: float
) -> EngineAnswer:
    sent_at, listener = context.clock(), _AnswerListener()
    call = pool.send(listener, (payload,))
    try:
        async with asyncio.timeout(seconds):
            body = await listener.done
    except TimeoutError:
        raise EngineTimeoutError(f"has not answered within {seconds:g} s") from None
    finally:
        call.abort()
    return EngineAnswer(call.status, body, (context.clock() - sent_at) * 1000)
