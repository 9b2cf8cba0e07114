"""Checks who calls an agent, before its service sees the call.

Used by the agent's server, and by the launcher of data-parallel ranks. Callers sign each call for
one agent (`cleave.rpc.credentials`): in a cluster as their service account (see
`cleave_worker.agent.account_signatures`), on one machine with the token of their deployment.
"""

import hmac
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import grpc

from cleave.rpc.credentials import METADATA_KEY, PROOF_LIFE_S, SCHEME, compute_mac, read_token

_AGENT_METHODS = "/cleave.rpc.v1.Agent/"
"""All are checked. What probes call stays open (`cleave.rpc.probes`): kubelets sign nothing."""
_MAX_CREDENTIAL_BYTES = 16 << 10
_MAX_TIME_DIGITS = 15

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class AuthenticationError(ValueError):
    """A caller is not accepted; the message is one line without what it has shown."""


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


_CHECKED_METHODS = frozenset(AgentMethod)


class Authenticator(Protocol):
    """Verifies what a call shows."""

    async def verify(self, credential: str, method: AgentMethod) -> None:
        """Raises AuthenticationError, AccessDeniedError."""


class TokenSignatures:
    """Signatures with the token that the processes of a deployment on one machine share."""

    def __init__(
        self, token_file: Path, address: str, clock: Callable[[], float] = time.time
    ) -> None:
        """`address`: of this agent, as callers dial it; `clock`: seconds since the epoch. Raises
        OSError when the file cannot be read."""
        self._token = read_token(token_file)
        self._address = address
        self._freshness = Freshness(clock)

    async def verify(self, credential: str, method: AgentMethod) -> None:  # noqa: ARG002
        """Raises AuthenticationError."""
        digits, _, mac = credential.partition(".")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= _MAX_TIME_DIGITS):
            raise AuthenticationError("the call is not signed with a token file")
        issued_ms = int(digits)
        expected = compute_mac(self._token, self._address, issued_ms)
        if not hmac.compare_digest(mac.encode(), expected.encode()):
            raise AuthenticationError(
                f"the call is signed with another token, or for another agent than {self._address}"
            )
        self._freshness.check(issued_ms / 1000)


class Freshness:
    """Accepts signatures of the last minute, as far as clocks agree, and none from before the start
    of this agent: another process may have received them at its address."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds since the epoch."""
        self._clock = clock
        self._began_s = clock()

    def check(self, issued_s: float) -> None:
        """Raises AuthenticationError."""
        now_s = self._clock()
        if not abs(now_s - issued_s) <= PROOF_LIFE_S:
            raise AuthenticationError(
                f"the call was signed {now_s - issued_s:.0f} s ago: repeated, or clocks differ"
            )
        # Not after the clock was set back.
        if issued_s < self._began_s <= now_s:
            raise AuthenticationError("the call was signed before this agent started")


class AuthenticationInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls of the agent's methods that are not signed by an accepted caller."""

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
            return _build_refusal(grpc.StatusCode.PERMISSION_DENIED, fault)
        try:
            await self._authenticator.verify(_read_credential(details), AgentMethod(name))
        except AccessDeniedError as error:
            return _build_refusal(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except AuthenticationError as error:
            return _build_refusal(grpc.StatusCode.UNAUTHENTICATED, str(error))
        return handler


def _read_credential(details: grpc.HandlerCallDetails) -> str:
    metadata = dict(details.invocation_metadata or ())
    text = str(metadata.get(METADATA_KEY, ""))
    if not text.startswith(SCHEME) or len(text) > _MAX_CREDENTIAL_BYTES:
        raise AuthenticationError("the call is not signed")
    return text.removeprefix(SCHEME)


def _build_refusal(code: grpc.StatusCode, fault: str) -> _Handler:
    """A handler of streams reads no message, which those of other methods would wait for. On the
    wire both are the same."""

    async def refuse(_requests: object, context: _Context) -> None:
        await context.abort(code, fault)

    return grpc.stream_stream_rpc_method_handler(refuse)
