"""API keys of clients. Checked for every request; the file is read at the start and when it
changes.

What is hard: a mounted Secret changes by swapping a symbolic link; and a file that is emptied by
mistake must not disable authentication, so after an unusable file the previous keys stay valid.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from cleave.gateway.admission.tenants import EVERYBODY, KeysError, Tenant, digest, read_tenants

log = logging.getLogger(__name__)


class Keys:
    """The accepted keys and their tenants; without keys, every client is accepted."""

    def __init__(self, tenants: Mapping[bytes, Tenant] | None) -> None:
        """`tenants`: by hash of their keys."""
        self._tenants = tenants

    @property
    def tenants(self) -> set[Tenant]:
        """All tenants."""
        return set((self._tenants or {}).values())

    def accept(self, authorization: bytes | None) -> bool:
        """Whether the value of an Authorization header contains an accepted key."""
        return self._tenants is None or self.find(authorization) is not None

    def find(self, authorization: bytes | None) -> Tenant | None:
        """The tenant whose key the value of an Authorization header contains; None: no valid
        key."""
        if self._tenants is None:
            return EVERYBODY
        if authorization is None or authorization[:7].lower() != b"bearer ":
            return None
        return self._tenants.get(digest(authorization[7:].strip()))


class KeysFile:
    """A file of API keys; `refresh` reads it again when it has changed."""

    def __init__(self, path: Path | None) -> None:
        """Raises KeysError when the keys cannot be read."""
        self._path = path
        self._stamp = stamp(path)
        self.keys = read_keys(path)

    def refresh(self) -> None:
        """Read the file again if it has changed; called every few seconds."""
        version = stamp(self._path)
        if version == self._stamp:
            return
        self._stamp = version
        try:
            self.keys = read_keys(self._path)
        except KeysError as error:
            log.error("API keys stay as they were: %s", error)
        else:
            log.info("API keys read again")


def read_keys(path: Path | None) -> Keys:
    """The keys of a file; None: every client is accepted. Raises KeysError."""
    return Keys(read_tenants(path) if path is not None else None)


def stamp(path: Path | None) -> tuple[int, int, int] | None:
    """Inode, modification time and size of a file, links followed; differs when the file has
    changed."""
    try:
        status = path.stat() if path is not None else None
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size) if status is not None else None
