"""API keys of clients. Read once at the start; asked for every request.

Only digests are kept: neither a core dump nor the timing of a comparison tells a key.
"""

import hashlib
from pathlib import Path


class KeysError(ValueError):
    """The file of keys cannot be used."""


class Keys:
    """The keys that are accepted; without any, everybody is."""

    def __init__(self, digests: frozenset[bytes] | None) -> None:
        self._digests = digests

    def accept(self, authorization: bytes | None) -> bool:
        """Whether the value of an Authorization header carries one of the keys."""
        if self._digests is None:
            return True
        scheme, _, key = (authorization or b"").partition(b" ")
        return scheme.lower() == b"bearer" and digest(key.strip()) in self._digests


def read_keys(path: Path | None) -> Keys:
    """Keys of a file, one a line, `#` begins a comment. Raises KeysError when there are none."""
    if path is None:
        return Keys(None)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror}") from None
    keys = {line.partition(b"#")[0].strip() for line in lines} - {b""}
    if not keys:
        raise KeysError(f"{path}: holds no key")
    return Keys(frozenset(map(digest, keys)))


def digest(key: bytes) -> bytes:
    """What is stored of a key."""
    return hashlib.sha256(key).digest()
