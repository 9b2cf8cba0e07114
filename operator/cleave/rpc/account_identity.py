"""Signs calls of agents as the service account of this pod.

The process makes a key at its start and has the API server confirm it: it requests a token of its
own account for the audience `cleave.dev/callers/THUMBPRINT`, where the thumbprint is that of the
key (RFC 7638). Each call carries this token and a signature for one agent, as in OAuth's DPoP
(RFC 9449). Its receiver has neither the key nor a signature for another agent. One token an hour
serves for all agents; one for each agent would be thousands.

What is hard: calls go on while the API server is away. So a token is renewed long before its end,
and a failed attempt is not repeated at each call.
"""

import asyncio
import base64
import binascii
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric import ec

from cleave.rpc import kube_api
from cleave.rpc.http_client import HttpError
from cleave.rpc.kube_api import AccessError, ApiServerError

_log = logging.getLogger(__name__)

ALGORITHM = "ES256"
"""Of the signatures of calls."""
TOKEN_LIFE_S = 3_600
_RENEWAL_S = 1_800.0
"""A token with less than this left is renewed."""
_RETRY_S = 10.0
"""From a failed request of a token to the next one, if there is a token that is still valid."""
_FIRST_RETRY_S = 1.0
"""The same without one."""
_TIMEOUT_S = 5.0
_SEPARATOR = "~"


@dataclass(frozen=True, slots=True)
class IssuedToken:
    """A token of the account."""

    text: str
    expires_s: float
    """Seconds since the epoch."""


RequestToken = Callable[[str], Awaitable[IssuedToken]]
"""Requests a token for an audience. Raises AccessError, ApiServerError, HttpError."""


class AccountIdentity:
    """The key of this process, and the token that confirms it."""

    def __init__(
        self, request: RequestToken | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """`request`: of a token; None: from the API server. `clock`: seconds since the epoch."""
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._public = export_public_key(self._key)
        self._audience = build_caller_audience(self._public)
        self._request = request or request_token
        self._clock = clock
        self._token: IssuedToken | None = None
        self._next_attempt_s = float("-inf")
        self._lock = asyncio.Lock()

    async def sign(self, audience: str) -> str:
        """What a call of the agent with this audience shows; empty: there is no token, and the log
        says why."""
        await self.renew()
        token, now = self._token, self._clock()
        if token is None or token.expires_s <= now:
            return ""
        claims = {"aud": audience, "iat": now}
        proof = jwt.encode(claims, self._key, ALGORITHM, headers={"jwk": self._public})
        return f"{token.text}{_SEPARATOR}{proof}"

    async def renew(self) -> None:
        """Request another token if the present one expires soon."""
        async with self._lock:
            now = self._clock()
            left_s = self._token.expires_s - now if self._token else 0.0
            if left_s > _RENEWAL_S or now < self._next_attempt_s:
                return
            try:
                self._token = await self._request(self._audience)
            except (AccessError, ApiServerError, HttpError, OSError) as error:
                _log.warning("cannot get a token of the own service account: %s", error)
                self._next_attempt_s = now + (_RETRY_S if left_s > 0 else _FIRST_RETRY_S)


def split_credential(credential: str) -> tuple[str, str]:
    """(the token, the signature) of what a call shows; the latter is empty if there is none."""
    token, _, proof = credential.partition(_SEPARATOR)
    return token, proof


def build_caller_audience(public_key: Mapping[str, str]) -> str:
    """The audience of tokens that confirm a public key, which is given as a JSON Web Key."""
    members = {name: public_key[name] for name in ("crv", "kty", "x", "y")}
    return f"cleave.dev/callers/{_encode(sha256(msgspec.json.encode(members)).digest())}"


def export_public_key(key: ec.EllipticCurvePrivateKey) -> dict[str, str]:
    """The public key as a JSON Web Key."""
    numbers = key.public_key().public_numbers()
    point = {"x": numbers.x, "y": numbers.y}
    return {"kty": "EC", "crv": "P-256", **{k: _encode(n.to_bytes(32)) for k, n in point.items()}}


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod and its service account, as its token for the API server names them."""

    namespace: str
    account: str
    name: str
    uid: str


def read_own_pod() -> Pod:
    """The pod of this process. Raises AccessError."""
    return read_pod(kube_api.find_access().token)


async def request_token(audience: str) -> IssuedToken:
    """Request a token of the account of this pod, which ends with the pod. Raises AccessError,
    ApiServerError, HttpError."""
    access = kube_api.find_access()
    pod = read_pod(access.token)
    path = f"/api/v1/namespaces/{pod.namespace}/serviceaccounts/{pod.account}/token"
    bound_to = {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}
    spec = {
        "audiences": [audience],
        "expirationSeconds": TOKEN_LIFE_S,
        "boundObjectRef": bound_to,
    }
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    async with asyncio.timeout(_TIMEOUT_S):
        response = await kube_api.create_object(access, path, body, _TIMEOUT_S)
    try:
        status = response["status"]
        expiry = datetime.fromisoformat(status["expirationTimestamp"])
        return IssuedToken(str(status["token"]), expiry.timestamp())
    except (LookupError, TypeError, ValueError) as error:
        raise HttpError(f"the API server sent no token: {error!r}") from None


def read_pod(token: str) -> Pod:
    """The pod that a token for the API server was mounted in. Raises AccessError."""
    try:
        claims: Any = msgspec.json.decode(_decode(token.split(".")[1]))["kubernetes.io"]
        account, pod = claims["serviceaccount"], claims["pod"]
        return Pod(claims["namespace"], account["name"], pod["name"], pod["uid"])
    except (LookupError, TypeError, ValueError, binascii.Error, msgspec.DecodeError):
        raise AccessError("the token for the API server is not one of a pod") from None


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
