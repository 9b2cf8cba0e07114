"""Verifies tokens of service accounts with the public keys of the API server.

Used by the agent's authentication in a cluster. A caller costs the API server nothing, and the
agent works while the API server is away. What is hard: keys change, and an unknown caller must not
make the agent ask for them again and again.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import jwt

from cleave.rpc import kube_api
from cleave.rpc.credentials import AUDIENCE
from cleave.rpc.http_client import HttpError
from cleave.rpc.kube_api import AccessError, ApiServerError
from cleave_worker.agent.authentication import (
    AccessDeniedError,
    AgentMethod,
    AuthenticationError,
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
_OF_FURTHER_PODS = (AgentMethod.DRAIN, AgentMethod.JOIN_GANG)
"""Methods for the other pods of the agent's instance."""


class ServiceAccountTokens:
    """The accounts that an agent trusts, and the keys that it knows."""

    def __init__(
        self,
        accounts: Collection[str],
        peers: Collection[str] = (),
        instance: str = "",
        fetch_keys: Callable[[], Awaitable[Mapping[str, jwt.PyJWK]]] | None = None,
    ) -> None:
        """`accounts`: may call all methods, as `system:serviceaccount:NAMESPACE:NAME`. `peers`: may
        ask for the health, and drain the agent from a further pod of its own `instance`; only
        they, in those pods, may join its data-parallel ranks."""
        self._accounts = frozenset(accounts)
        self._peers = frozenset(peers)
        self._further_pod = re.compile(re.escape(instance) + "-[0-9]+")
        self._fetch_keys = fetch_keys or _fetch_keys
        self._keys: Mapping[str, jwt.PyJWK] = {}
        self._fetched_at = float("-inf")
        self._lock = asyncio.Lock()

    async def verify(self, token: str, method: AgentMethod) -> None:
        """Raises AuthenticationError, AccessDeniedError."""
        try:
            key = await self._get_key(str(jwt.get_unverified_header(token).get("kid")))
            claims = jwt.decode(
                token,
                key,
                algorithms=_ALGORITHMS,
                audience=AUDIENCE,
                leeway=_CLOCK_SKEW_S,
                options={"require": ["aud", "exp", "sub"]},
            )
        except AuthenticationError:
            raise
        except jwt.InvalidSignatureError:
            raise AuthenticationError("the token is not signed by the API server") from None
        except (jwt.ExpiredSignatureError, jwt.ImmatureSignatureError):
            raise AuthenticationError("the token has expired or is not valid yet") from None
        except jwt.InvalidAudienceError:
            raise AuthenticationError(f"the token is not for {AUDIENCE}") from None
        except jwt.InvalidAlgorithmError:
            raise AuthenticationError(f"the token is not signed by {_ALGORITHMS}") from None
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise AuthenticationError("the token is not one of a service account") from None
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
