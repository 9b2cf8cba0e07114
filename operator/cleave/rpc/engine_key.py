"""The key of one start of an engine, which its HTTP API and its KV port ask for.

The agent makes it, gives it to the engine in its environment, and to callers that it has
authenticated in its registration. Gateways, other agents and further nodes of an instance use it.
Handoffs contain a key that is derived from it, so that decode engines cannot call prefill engines'
APIs (docs/decisions/credentials.md).
"""

import hashlib
import hmac
import secrets

ENV = "CLEAVE_ENGINE_KEY"
"""Environment variable of the engine's processes; empty: the engine asks for no key."""
HEADER = "x-cleave-engine-key"
"""Header of requests to the engine. Not `authorization`: where a proxy sends requests to engines
directly, that one holds the client's own key."""
_KEY_BYTES = 32


def create_key() -> str:
    """A new key, of hexadecimal digits."""
    return secrets.token_hex(_KEY_BYTES)


def compute_kv_key(engine_key: str) -> str:
    """The key of the engine's KV port; empty without a key."""
    if not engine_key:
        return ""
    return hmac.new(engine_key.encode(), b"kv", hashlib.sha256).hexdigest()


def build_headers(engine_key: str) -> dict[str, str]:
    """What requests to the engine need."""
    return {HEADER: engine_key} if engine_key else {}
