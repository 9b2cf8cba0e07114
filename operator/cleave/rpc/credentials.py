"""What a process shows to an agent that it calls; it is worth nothing to any other agent.

Used by gateways, agents, the operator and `cleave status`. An agent runs beside an engine and may
be in an attacker's hands, and another process may answer at its address. So callers send nothing
that their receiver could use: each call is signed for one agent and for a minute. In a cluster the
signature is of the process's service account (`rpc.account_identity`), on one machine of a token
in the deployment's folder (docs/decisions/credentials.md).
"""

import functools
import hashlib
import hmac
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cleave.rpc.account_identity import AccountIdentity

_log = logging.getLogger(__name__)

TOKEN_ENV = "CLEAVE_TOKEN_FILE"  # noqa: S105 - the name of a variable
"""Environment variable with the path of the token that processes on one machine share. It is not
sent: calls are signed with it."""
CALLERS_ENV = "CLEAVE_CALLER_ACCOUNTS"
"""Environment variable with the service accounts that may call all methods, separated by commas:
the gateways' and the operator's."""
PEERS_ENV = "CLEAVE_PEER_ACCOUNTS"
"""Environment variable with those that may only ask agents for their health: the workers'."""
PROOF_LIFE_S = 60.0
"""How long an agent accepts a signature, by its own clock."""
METADATA_KEY = "authorization"
SCHEME = "Bearer "

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class AgentEndpoint:
    """An agent as discovery knows it."""

    address: str
    """host:port."""
    pod: str = ""
    """Name of its pod; empty: the source knows no pods."""
    pod_uid: str = ""

    @property
    def audience(self) -> str:
        """Whom signatures for it name."""
        return build_audience(self.pod_uid or self.address)


def build_audience(agent: str) -> str:
    """The audience of an agent: of the uid of its pod, or of its address where it has none."""
    return f"cleave.dev/agents/{agent}"


class Credentials:
    """The credentials of this process."""

    def __init__(
        self, token_file: Path | None = None, identity: "AccountIdentity | None" = None
    ) -> None:
        """`token_file`: for agents on this machine; `identity`: for agents in pods."""
        self._token_file = token_file
        self._identity = identity

    async def build_metadata(self, agent: AgentEndpoint) -> Metadata:
        """The metadata of one call of an agent; empty without credentials: the agent refuses the
        call, unless it accepts all, and the caller tries again."""
        if not agent.pod_uid:
            return sign_with_token(self._token_file, agent.address) if self._token_file else ()
        if self._identity is None:
            self._identity = _get_identity()
        credential = await self._identity.sign(agent.audience)
        return _build_metadata(credential) if credential else ()

    async def renew(self) -> None:
        """Renew what expires soon, so that agents can be called while the API server is away. For
        processes that make no calls for hours; it costs nothing when it is not due."""
        if self._identity is not None:
            await self._identity.renew()


def find_credentials(env: Mapping[str, str] = os.environ) -> Credentials:
    """The credentials of this process, as its environment names them."""
    file = env.get(TOKEN_ENV)
    return Credentials(Path(file) if file else None)


def sign_with_token(token_file: Path, address: str) -> Metadata:
    """The metadata of one call of the agent at `address`, on this machine; empty if the token
    cannot be read."""
    try:
        token = read_token(token_file)
    except OSError as error:
        _log.warning("cannot sign calls of agents: %s", error)
        return ()
    issued_ms = int(time.time() * 1000)
    return _build_metadata(f"{issued_ms}.{compute_mac(token, address, issued_ms)}")


def read_token(file: Path) -> bytes:
    """The token of a deployment on this machine. Raises OSError."""
    token = file.read_bytes().strip()
    if not token:
        # Every caller could sign with it.
        raise OSError(f"{file} has no token: remove it, and start what needs it again")
    return token


def compute_mac(token: bytes, address: str, issued_ms: int) -> str:
    """The signature of a call of the agent at `address`, in hexadecimal digits; `issued_ms`:
    milliseconds since the epoch."""
    text = f"{build_audience(address)} {issued_ms}"
    return hmac.new(token, text.encode(), hashlib.sha256).hexdigest()


@functools.cache
def _get_identity() -> "AccountIdentity":
    """That of this process: one key, and one token."""
    # Only in clusters: elsewhere its libraries may be missing.
    from cleave.rpc.account_identity import AccountIdentity

    return AccountIdentity()


def _build_metadata(credential: str) -> Metadata:
    return ((METADATA_KEY, f"{SCHEME}{credential}"),)
