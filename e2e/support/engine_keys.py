"""The keys that engines ask for, as their agents have sent them to this process."""

from cleave.rpc.engine_key import build_headers
from cleave.rpc.v1 import agent_pb2

_keys: dict[str, str] = {}
"""By engine URL."""


def remember(registration: agent_pb2.Registration) -> None:
    _keys[registration.engine_url] = registration.engine_key


def headers_for(url: str) -> dict[str, str]:
    """For requests to this URL: an engine's, or another one, which needs none."""
    return build_headers(_keys.get(url, ""))
