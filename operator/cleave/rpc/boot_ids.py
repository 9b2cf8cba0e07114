"""Ids of the starts of engines, which show whose they are.

Agents make them; gateways and engines know an engine by them: connections, KV handoffs, results of
pairs and cached prompts. An agent may report another one's, whose instance would then lose what is
kept by it. So an id contains a digest of the instance's name, and where two report the same one,
the instance that it is of keeps it (`router.registry`).
"""

import hashlib
import secrets

_NONCE_DIGITS = 12


def create_boot_id(instance: str) -> str:
    """A new id for an instance, of hexadecimal digits."""
    nonce = secrets.token_hex(_NONCE_DIGITS // 2)
    return nonce + _compute_digest(nonce, instance)


def is_boot_of(boot_id: str, instance: str) -> bool:
    """Whether an id was made for this instance; vLLM appends the data-parallel rank to it."""
    nonce, digest = boot_id[:_NONCE_DIGITS], boot_id[_NONCE_DIGITS : 2 * _NONCE_DIGITS]
    return digest == _compute_digest(nonce, instance)


def _compute_digest(nonce: str, instance: str) -> str:
    return hashlib.sha256(f"{nonce} {instance}".encode()).hexdigest()[:_NONCE_DIGITS]
