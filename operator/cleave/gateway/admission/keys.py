"""API keys of clients. Asked for every request; read at the start and whenever the file changes.

What is hard: a Secret that is mounted changes by a link that is swapped, and one that is emptied by
mistake must not open the gateway, so an unusable file leaves the keys that were read before.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from cleave.gateway.admission.tenants import EVERYBODY, KeysError, Tenant, digest, read_tenants

log = logging.getLogger(__name__)


class Keys:
    """The keys that are accepted, and whose they are; without any, everybody is."""

    def __init__(self, tenants: Mapping[bytes, Tenant] | None) -> None:
        """`tenants`: by digest of their keys."""
        self._tenants = tenants

    @property
    def tenants(self) -> set[Tenant]:
        """All of them."""
        return set((self._tenants or {}).values())

    def accept(self, authorization: bytes | None) -> bool:
        """Whether the value of an Authorization header carries one of the keys."""
        return self._tenants is None or self.find(authorization) is not None

    def find(self, authorization: bytes | None) -> Tenant | None:
        """Whose key the value of an Authorization header carries; None: nobody's."""
        if self._tenants is None:
            return EVERYBODY
        if authorization is None or authorization[:7].lower() != b"bearer ":
            return None
        return self._tenants.get(digest(authorization[7:].strip()))


class KeysFile:
    """The keys of a file, kept up to date by `refresh`."""

    def __init__(self, path: Path | None) -> None:
        """Raises KeysError when the keys cannot be read."""
        self._path = path
        self._stamp = stamp(path)
        self.keys = read_keys(path)

    def refresh(self) -> None:
        """Read the file again if it has changed; called every few seconds."""
        found = stamp(self._path)
        if found == self._stamp:
            return
        self._stamp = found
        try:
            self.keys = read_keys(self._path)
        except KeysError as error:
            log.error("API keys stay as they were: %s", error)
        else:
            log.info("API keys read again")


def read_keys(path: Path | None) -> Keys:
    """Keys of a file; without one everybody is accepted. Raises KeysError."""
    return Keys(read_tenants(path) if path is not None else None)


def stamp(path: Path | None) -> tuple[int, int, int] | None:
    """What differs between two states of a file, or of what a link leads to."""
    try:
        found = path.stat() if path is not None else None
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size) if found is not None else None
