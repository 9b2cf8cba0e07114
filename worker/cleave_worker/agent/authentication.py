"""Checks who calls an agent, before its service sees the call.

Used by the agent's server, and by the launcher of data-parallel ranks. In a cluster callers send
tokens of service accounts (see `cleave_worker.agent.service_account_tokens`), on one machine the
token of their deployment.
"""

import hmac
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import grpc

from cleave.rpc.credentials import METADATA_KEY, SCHEME

_AGENT_METHODS = "/cleave.rpc.v1.Agent/"
"""All are checked. The standard health protocol stays open: kubelet's probes send no token."""
_MAX_TOKEN_BYTES = 16 << 10

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class AuthenticationError(ValueError):
    """A caller is not accepted; the message is one line without the token."""


class AccessDeniedError(AuthenticationError):
    """The caller is known, and may not call this method."""


class AgentMethod(StrEnum):
    """Methods whose callers are checked."""

    WATCH = f"{_AGENT_METHODS}Watch"
    SET_ROLE = f"{_AGENT_METHODS}SetRole"
    SET_ADAPTERS = f"{_AGENT_METHODS}SetAdapters"
    DRAIN = f"{_AGENT_METHODS}Drain"
    HEALTH = f"{_AGENT_METHODS}Health"
    RECORD_PAIRS = f"{_AGENT_METHODS}RecordPairs"
    JOIN_GANG = "/cleave.rpc.v1.Gang/Join"
    """Served by the launcher of data-parallel ranks."""
    PROBE_WATCH = "/grpc.health.v1.Health/Watch"
    """Probes do not use it, and its streams would take the places of calls with a token."""


_CHECKED_METHODS = frozenset(AgentMethod)


class Authenticator(Protocol):
    """Verifies a caller's token."""

    async def verify(self, token: str, method: AgentMethod) -> None:
        """Raises AuthenticationError, AccessDeniedError."""


class SharedToken:
    """One token for all processes of a deployment on one machine."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when the file cannot be read."""
        self._token = path.read_text().strip().encode()

    async def verify(self, token: str, method: AgentMethod) -> None:  # noqa: ARG002
        """Raises AuthenticationError."""
        if not hmac.compare_digest(token.encode(), self._token):
            raise AuthenticationError("the token is another one")


class AuthenticationInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls of the agent's methods whose token is not accepted."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["_Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        """The handler of a call, or one that refuses it; None: there is no such method."""
        handler, details = await continuation(handler_call_details), handler_call_details
        name = str(details.method)
        if handler is None or not (name in _CHECKED_METHODS or name.startswith(_AGENT_METHODS)):
            return handler
        if name not in _CHECKED_METHODS:
            fault = f"{name} has no rule of who may call it"
            return _build_refusal(handler, grpc.StatusCode.PERMISSION_DENIED, fault)
        try:
            await self._authenticator.verify(_read_token(details), AgentMethod(name))
        except AccessDeniedError as error:
            return _build_refusal(handler, grpc.StatusCode.PERMISSION_DENIED, str(error))
        except AuthenticationError as error:
            return _build_refusal(handler, grpc.StatusCode.UNAUTHENTICATED, str(error))
        return handler


def _read_token(details: grpc.HandlerCallDetails) -> str:
    metadata = dict(details.invocation_metadata or ())
    text = str(metadata.get(METADATA_KEY, ""))
    if not text.startswith(SCHEME) or len(text) > _MAX_TOKEN_BYTES:
        raise AuthenticationError("the call has no token")
    return text.removeprefix(SCHEME)


def _build_refusal(handler: _Handler, code: grpc.StatusCode, fault: str) -> _Handler:
    async def refuse(_request: object, context: _Context) -> None:
        await context.abort(code, fault)

    async def refuse_stream(request: object, context: _Context) -> Any:  # noqa: ANN401 - never yields
        await refuse(request, context)
        yield

    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse_stream)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse_stream)
    return grpc.unary_unary_rpc_method_handler(refuse)
