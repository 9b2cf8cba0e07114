"""Verifies calls that are signed as a service account of the cluster.

Used by the agent's authentication. A call shows a token of its caller's account, which the API
server has signed and which names a key, and a signature with that key for this agent alone
(`cleave.rpc.account_identity`). The API server's public keys suffice to verify it: a caller costs
the API server nothing, and the agent works while it is away. What is hard: keys change, and an
unknown caller must not make the agent ask for them again and again.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import jwt

from cleave.rpc import account_identity, kube_api
from cleave.rpc.credentials import build_audience
from cleave.rpc.http_client import HttpError
from cleave.rpc.kube_api import AccessError, ApiServerError
from cleave_worker.agent.authentication import (
    AccessDeniedError,
    AgentMethod,
    AuthenticationError,
    Freshness,
)

_log = logging.getLogger(__name__)

_KEYS_PATH = "/openid/v1/jwks"
_ALGORITHMS = ["RS256", "ES256"]
_FETCH_TIMEOUT_S = 5.0
_REFETCH_S = 10.0
"""Shortest time between two requests for the API server's keys."""
_FIRST_FETCH_S = 1.0
"""The same while no key is known."""
_CLOCK_SKEW_S = 60.0
_MAX_LIFE_S = account_identity.TOKEN_LIFE_S + 2 * _CLOCK_SKEW_S
"""Of a token: a longer one was not requested by a process of Cleave."""
_OF_FURTHER_PODS = (AgentMethod.DRAIN, AgentMethod.JOIN_GANG)
"""Methods for the other pods of the agent's instance."""


class AccountSignatures:
    """The accounts that an agent trusts, and the keys that it knows."""

    def __init__(
        self,
        accounts: Collection[str],
        peers: Collection[str],
        instance: str,
        pod_uid: str,
        fetch_keys: Callable[[], Awaitable[Mapping[str, jwt.PyJWK]]] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`accounts`: may call all methods, as `system:serviceaccount:NAMESPACE:NAME`. `peers`: may
        ask for the health, and drain the agent from a further pod of its own `instance`; only
        they, in those pods, may join its data-parallel ranks. `pod_uid`: of the agent's pod, for
        which calls must be signed."""
        self._accounts = frozenset(accounts)
        self._peers = frozenset(peers)
        self._further_pod = re.compile(re.escape(instance) + "-[0-9]+")
        self._audience = build_audience(pod_uid)
        self._fetch_keys = fetch_keys or _fetch_keys
        self._freshness = Freshness(clock)
        self._keys: Mapping[str, jwt.PyJWK] = {}
        self._fetched_at = float("-inf")
        self._lock = asyncio.Lock()

    async def verify(self, credential: str, method: AgentMethod) -> None:
        """Raises AuthenticationError, AccessDeniedError."""
        token, proof = account_identity.split_credential(credential)
        claims = await self._verify_token(token, self._verify_signature(proof))
        account = claims["sub"]
        if account in self._accounts and method is not AgentMethod.JOIN_GANG:
            return
        if account not in self._peers:
            raise AuthenticationError(f"{account} has no access")
        if not (
            method is AgentMethod.HEALTH
            or (method in _OF_FURTHER_PODS and self._is_further_pod(claims))
        ):
            raise AccessDeniedError(f"{account} may not call {method}")

    def _verify_signature(self, proof: str) -> str:
        """Return the audience of the token that has to confirm the key of this signature. Raises
        AuthenticationError."""
        try:
            public = jwt.get_unverified_header(proof)["jwk"]
            audience = account_identity.build_caller_audience(public)
            claims = jwt.decode(
                proof,
                jwt.PyJWK(public, account_identity.ALGORITHM),
                algorithms=[account_identity.ALGORITHM],
                audience=self._audience,
                options={"require": ["aud", "iat"], "verify_iat": False},
            )
            issued_s = float(claims["iat"])
        except jwt.InvalidAudienceError:
            raise AuthenticationError("the call is signed for another agent") from None
        except (jwt.PyJWTError, LookupError, TypeError, ValueError, RecursionError):
            raise AuthenticationError("the call is not signed as a service account") from None
        self._freshness.check(issued_s)
        return audience

    async def _verify_token(self, token: str, audience: str) -> Mapping[str, Any]:
        """Return the claims of a token for this audience. Raises AuthenticationError."""
        try:
            key = await self._get_key(str(jwt.get_unverified_header(token).get("kid")))
            claims: Mapping[str, Any] = jwt.decode(
                token,
                key,
                algorithms=_ALGORITHMS,
                audience=audience,
                leeway=_CLOCK_SKEW_S,
                options={"require": ["aud", "exp", "iat", "sub"]},
            )
            life_s = float(claims["exp"]) - float(claims["iat"])
        except AuthenticationError:
            raise
        except jwt.InvalidSignatureError:
            raise AuthenticationError("the token is not signed by the API server") from None
        except (jwt.ExpiredSignatureError, jwt.ImmatureSignatureError):
            raise AuthenticationError("the token has expired or is not valid yet") from None
        except jwt.InvalidAudienceError:
            raise AuthenticationError("the token confirms another key") from None
        except jwt.InvalidAlgorithmError:
            raise AuthenticationError(f"the token is not signed by {_ALGORITHMS}") from None
        except (jwt.PyJWTError, TypeError, ValueError, RecursionError):
            raise AuthenticationError("the token is not one of a service account") from None
        if not life_s <= _MAX_LIFE_S:
            raise AuthenticationError(f"the token is for {life_s:.0f} s: {_MAX_LIFE_S:.0f} at most")
        return claims

    def _is_further_pod(self, claims: Mapping[str, Any]) -> bool:
        """Whether the token is one of a pod that has another part of this agent's engine."""
        try:
            name = claims["kubernetes.io"]["pod"]["name"]
        except (LookupError, TypeError):
            return False
        return isinstance(name, str) and self._further_pod.fullmatch(name) is not None

    async def _get_key(self, key_id: str) -> jwt.PyJWK:
        # Known keys do not wait for a request that an unknown one has caused.
        if key_id in self._keys:
            return self._keys[key_id]
        async with self._lock:
            since_s = time.monotonic() - self._fetched_at
            least_s = _REFETCH_S if self._keys else _FIRST_FETCH_S
            if key_id not in self._keys and since_s >= least_s:
                self._fetched_at = time.monotonic()
                try:
                    self._keys = await self._fetch_keys()
                except (AccessError, ApiServerError, HttpError, OSError) as error:
                    _log.warning("cannot read the API server's keys: %s", error)
        if key_id not in self._keys:
            raise AuthenticationError("the token is signed with an unknown key")
        return self._keys[key_id]


def parse_keys(document: dict[str, Any]) -> dict[str, jwt.PyJWK]:
    """The public keys of a JSON Web Key Set, by id; keys of other kinds are skipped.
    Raises PyJWTError."""
    return {str(key.key_id): key for key in jwt.PyJWKSet.from_dict(document).keys}


async def _fetch_keys() -> Mapping[str, jwt.PyJWK]:
    document = await kube_api.get_object(kube_api.find_access(), _KEYS_PATH, _FETCH_TIMEOUT_S)
    try:
        return parse_keys(dict(document))
    except (jwt.PyJWTError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise HttpError(f"the API server sent an invalid key set: {error!r}") from None
