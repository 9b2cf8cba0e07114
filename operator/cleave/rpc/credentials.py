"""The token with which a process calls agents, and how it is sent.

Used by gateways, agents, the operator and `cleave status`. In a cluster it is a token of the pod's
service account, for agents only (AUDIENCE), which kubelet replaces every hour. On one machine it is
a random file in the deployment's folder. Hence it is read again for each call; calls are rare.
"""

import os
from pathlib import Path

TOKEN_ENV = "CLEAVE_TOKEN_FILE"  # noqa: S105 - the name of a variable
"""Environment variable with the path of the token."""
ACCOUNTS_ENV = "CLEAVE_TRUSTED_ACCOUNTS"
"""Environment variable with the service accounts that agents of the version before accept for all
methods, separated by commas: the gateways', the operator's and the workers'. Newer agents use it
only where CALLERS_ENV is not set, by an operator of the version before."""
CALLERS_ENV = "CLEAVE_CALLER_ACCOUNTS"
"""Environment variable with those that may call all methods: the gateways' and the operator's."""
PEERS_ENV = "CLEAVE_PEER_ACCOUNTS"
"""Environment variable with those that may only ask agents for their health: the workers'."""
AUDIENCE = "cleave.dev/agents"
"""Audience of the tokens: the API server does not accept them."""
METADATA_KEY = "authorization"
SCHEME = "Bearer "

Metadata = tuple[tuple[str, str], ...]


def build_metadata(token_file: Path | None = None) -> Metadata:
    """The gRPC metadata of a call to an agent; empty without a token.
    `token_file`: its path; None: from TOKEN_ENV."""
    path = token_file or os.environ.get(TOKEN_ENV)
    if not path:
        return ()
    try:
        token = Path(path).read_text().strip()
    except OSError:
        # The agent refuses the call, and the caller tries again.
        return ()
    return ((METADATA_KEY, f"{SCHEME}{token}"),)
