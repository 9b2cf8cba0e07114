"""Checks who calls an agent, before its service sees the call.

Used by the agent's server. In a cluster callers send tokens of service accounts, which the API
server has signed. They are verified here with its public keys, so that a caller costs the API
server nothing and the agent works while it is away. What is hard: keys change, and an unknown
caller must not make the agent ask for them again and again.
"""

import asyncio
import base64
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import grpc
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from cleave.rpc import kube_api
from cleave.rpc.credentials import AUDIENCE, METADATA_KEY, SCHEME
from cleave.rpc.http_client import HttpError
from cleave.rpc.kube_api import AccessError, ApiServerError

_log = logging.getLogger(__name__)

_AGENT_METHODS = "/cleave.rpc.v1.Agent/"
"""The standard health protocol stays open: kubelet's probes send no token."""
_KEYS_PATH = "/openid/v1/jwks"
_FETCH_TIMEOUT_S = 5.0
_REFETCH_S = 10.0
"""Shortest time between two requests for the API server's keys."""
_CLOCK_SKEW_S = 60.0
_MAX_TOKEN_BYTES = 16 << 10

_Key = rsa.RSAPublicKey | ec.EllipticCurvePublicKey
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class AuthenticationError(ValueError):
    """A caller is not accepted; the message is one line without the token."""


class Authenticator(Protocol):
    """Verifies a caller's token."""

    async def verify(self, token: str) -> None:
        """Raises AuthenticationError."""


class SharedToken:
    """One token for all processes of a deployment on one machine."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when the file cannot be read."""
        self._token = path.read_text().strip().encode()

    async def verify(self, token: str) -> None:
        """Raises AuthenticationError."""
        if not hmac.compare_digest(token.encode(), self._token):
            raise AuthenticationError("the token is another one")


class ServiceAccountTokens:
    """Tokens of service accounts, verified with the keys of the API server."""

    def __init__(
        self,
        accounts: Collection[str],
        fetch_keys: Callable[[], Awaitable[Mapping[str, _Key]]] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`accounts`: as `system:serviceaccount:NAMESPACE:NAME`; `now`: seconds since the epoch."""
        self._accounts = frozenset(accounts)
        self._fetch_keys, self._now = fetch_keys or _fetch_keys, now
        self._keys: Mapping[str, _Key] = {}
        self._fetched_at = float("-inf")
        self._lock = asyncio.Lock()

    async def verify(self, token: str) -> None:
        """Raises AuthenticationError."""
        try:
            signed, _, signature = token.rpartition(".")
            header, claims = (json.loads(_decode(part)) for part in signed.split("."))
            key = await self._get_key(str(header["kid"]))
            _verify_signature(key, header["alg"], _decode(signature), signed.encode())
            self._check_claims(claims)
        except AuthenticationError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise AuthenticationError("the token is not one of a service account") from None
        except InvalidSignature:
            raise AuthenticationError("the token is not signed by the API server") from None

    def _check_claims(self, claims: dict[str, Any]) -> None:
        audiences, now = claims["aud"], self._now()
        if AUDIENCE not in ([audiences] if isinstance(audiences, str) else audiences):
            raise AuthenticationError(f"the token is for {audiences}, not for {AUDIENCE}")
        if not claims.get("nbf", 0) - _CLOCK_SKEW_S <= now <= claims["exp"] + _CLOCK_SKEW_S:
            raise AuthenticationError("the token has expired")
        if claims["sub"] not in self._accounts:
            raise AuthenticationError(f"{claims['sub']} has no access")

    async def _get_key(self, key_id: str) -> _Key:
        async with self._lock:
            since_s = time.monotonic() - self._fetched_at
            if key_id not in self._keys and since_s >= _REFETCH_S:
                self._fetched_at = time.monotonic()
                try:
                    self._keys = await self._fetch_keys()
                except (AccessError, ApiServerError, HttpError, OSError) as error:
                    _log.warning("cannot read the API server's keys: %s", error)
        if key_id not in self._keys:
            raise AuthenticationError("the token is signed with an unknown key")
        return self._keys[key_id]


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
        if handler is None or not str(details.method).startswith(_AGENT_METHODS):
            return handler
        try:
            await self._authenticator.verify(_read_token(details))
        except AuthenticationError as error:
            return _build_refusal(handler, str(error))
        return handler


def parse_keys(document: Mapping[str, Any]) -> dict[str, _Key]:
    """The public keys of a JSON Web Key Set, by id; keys of other kinds are skipped."""
    keys: dict[str, _Key] = {}
    for each in document["keys"]:
        number = {name: int.from_bytes(_decode(each[name])) for name in "nexy" if name in each}
        if each["kty"] == "RSA":
            keys[each["kid"]] = rsa.RSAPublicNumbers(number["e"], number["n"]).public_key()
        elif each["kty"] == "EC" and each["crv"] == "P-256":
            curve = ec.SECP256R1()
            numbers = ec.EllipticCurvePublicNumbers(number["x"], number["y"], curve)
            keys[each["kid"]] = numbers.public_key()
    return keys


async def _fetch_keys() -> Mapping[str, _Key]:
    document = await kube_api.get_object(kube_api.find_access(), _KEYS_PATH, _FETCH_TIMEOUT_S)
    try:
        return parse_keys(document)
    except (KeyError, TypeError, ValueError) as error:
        raise HttpError(f"the API server sent an invalid key set: {error!r}") from None


def _verify_signature(key: _Key, algorithm: str, signature: bytes, signed: bytes) -> None:
    """Raises InvalidSignature, AuthenticationError. The key decides what a signature is."""
    match key, algorithm:
        case rsa.RSAPublicKey(), "RS256":
            key.verify(signature, signed, padding.PKCS1v15(), SHA256())
        case ec.EllipticCurvePublicKey(), "ES256":
            parts = (int.from_bytes(half) for half in (signature[:32], signature[32:]))
            key.verify(encode_dss_signature(*parts), signed, ec.ECDSA(SHA256()))
        case _:
            raise AuthenticationError(f"the token is signed by {algorithm}")


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def _read_token(details: grpc.HandlerCallDetails) -> str:
    metadata = dict(details.invocation_metadata or ())
    text = str(metadata.get(METADATA_KEY, ""))
    if not text.startswith(SCHEME) or len(text) > _MAX_TOKEN_BYTES:
        raise AuthenticationError("the call has no token")
    return text.removeprefix(SCHEME)


def _build_refusal(handler: _Handler, fault: str) -> _Handler:
    async def refuse(_request: object, context: _Context) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, fault)

    async def refuse_stream(request: object, context: _Context) -> Any:  # noqa: ANN401 - never yields
        await refuse(request, context)
        yield

    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse_stream)
    return grpc.unary_unary_rpc_method_handler(refuse)
