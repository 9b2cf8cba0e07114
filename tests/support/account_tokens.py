"""Tokens of service accounts as the API server issues them, and calls that are signed with them."""

import base64
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

from cleave.rpc.account_identity import AccountIdentity, IssuedToken, RequestToken
from cleave.rpc.credentials import Credentials
from cleave_worker.agent.account_signatures import parse_keys

LIFE_S = 3_600.0


def encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


@dataclass
class TokenIssuer:
    """An API server."""

    key: Any = field(default_factory=lambda: rsa.generate_private_key(65_537, 2_048))
    requests: list[str] = field(default_factory=list)
    """The audiences of all requests."""
    fault: Exception | None = None
    """Why it issues none."""

    @property
    def key_set(self) -> dict[str, Any]:
        modulus = self.key.public_key().public_numbers().n
        return {
            "keys": [
                {
                    "kty": "RSA",
                    "kid": "r",
                    "n": encode(modulus.to_bytes(256)),
                    "e": encode(b"\1\0\1"),
                }
            ]
        }

    async def fetch_keys(self) -> Mapping[str, jwt.PyJWK]:
        return parse_keys(self.key_set)

    def issue(self, subject: str, audience: str, pod: str = "p", **claims: object) -> str:
        """A token of an account, in this pod."""
        now = time.time()
        own = {"namespace": subject.split(":")[2], "pod": {"name": pod, "uid": f"uid-of-{pod}"}}
        usual = {"aud": [audience], "sub": subject, "iat": now, "nbf": now, "exp": now + LIFE_S}
        payload = {**usual, "kubernetes.io": own, **claims}
        return jwt.encode(payload, self.key, "RS256", headers={"kid": "r"})

    def requests_of(self, subject: str, pod: str = "p") -> RequestToken:
        """How a process of this account requests tokens."""

        async def request(audience: str) -> IssuedToken:
            self.requests.append(audience)
            if self.fault is not None:
                raise self.fault
            return IssuedToken(self.issue(subject, audience, pod), time.time() + LIFE_S)

        return request

    def credentials_of(
        self, subject: str, pod: str = "p", clock: Callable[[], float] = time.time
    ) -> Credentials:
        """Those of a process of this account."""
        return Credentials(identity=AccountIdentity(self.requests_of(subject, pod), clock))
