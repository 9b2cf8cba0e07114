"""API keys of clients, checked for every request, from a file that is read when it changes.

What is hard: a mounted Secret changes by swapping a symbolic link; and a file that is emptied by
mistake must not disable authentication, so after an unusable file the previous keys stay valid.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from cleave.gateway.admission.tenants import (
    DEFAULT_TENANT,
    ApiKeysError,
    Tenant,
    hash_key,
    read_tenants,
)

log = logging.getLogger(__name__)


class ApiKeys:
    """The accepted keys and their tenants; without keys, every client is accepted."""

    def __init__(self, tenants: Mapping[bytes, Tenant] | None) -> None:
        """`tenants`: by hash of their keys."""
        self._tenants = tenants

    @property
    def tenants(self) -> set[Tenant]:
        """All tenants."""
        return set((self._tenants or {}).values())

    def accepts(self, authorization: bytes | None) -> bool:
        """Whether the value of an Authorization header contains an accepted key."""
        return self._tenants is None or self.find_tenant(authorization) is not None

    def find_tenant(self, authorization: bytes | None) -> Tenant | None:
        """The tenant whose key an Authorization header's value contains; None: no valid key."""
        if self._tenants is None:
            return DEFAULT_TENANT
        if authorization is None or authorization[:7].lower() != b"bearer ":
            return None
        return self._tenants.get(hash_key(authorization[7:].strip()))


class ApiKeysFile:
    """A file of API keys; `refresh` reads it again when it has changed."""

    def __init__(self, path: Path | None) -> None:
        """Raises ApiKeysError when the keys cannot be read."""
        self._path = path
        self._file_version = get_file_version(path)
        self.keys = read_api_keys(path)
        self.is_stale = False
        """Whether the file could not be read when it changed last, so a removed key still works."""

    def refresh(self) -> None:
        """Read the file again if it has changed; called every few seconds."""
        version = get_file_version(self._path)
        if version == self._file_version:
            return
        self._file_version = version
        try:
            self.keys = read_api_keys(self._path)
        except ApiKeysError as error:
            self.is_stale = True
            log.error("API keys stay as they were: %s", error)
        else:
            self.is_stale = False
            log.info("API keys read again")


def read_api_keys(path: Path | None) -> ApiKeys:
    """The keys of a file; None: every client is accepted. Raises ApiKeysError."""
    return ApiKeys(read_tenants(path) if path is not None else None)


def get_file_version(path: Path | None) -> tuple[int, int, int] | None:
    """Inode, modification time and size of a file, links followed; they differ once it changed."""
    try:
        status = path.stat() if path is not None else None
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size) if status is not None else None
