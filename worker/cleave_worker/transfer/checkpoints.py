"""KV blocks as files in host memory that outlives the engine, named by a hash of their tokens.

An engine writes them while a request decodes; any engine of the same host that resumes the request
reads them. The engine that wrote a file may be dead. So each file has a header that identifies its
contents, appears atomically and is verified by checksum. Requests of several engines may share a
prefix: each engine that uses a file has its own hard link, and the one that drops the last link
removes the file.
"""

import logging
import os
import re
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from cleave_worker.transfer.handoff import RefusalReason, RefusedError

_log = logging.getLogger(__name__)
_HEADER = struct.Struct("<8s32s32sQI")
"""Magic, key, layout hash, body bytes, CRC-32 of the body."""
_MAGIC = b"cleaveK1"
_FREE_SPACE_DIVISOR = 8
"""One part in 8 of the file system stays free: other engines have KV there and die without it."""
_UNFINISHED, _USE = "part", "use"
_FILE_NAME = re.compile(rf"[0-9a-f]{{64}}-\d+(\.[0-9a-f]+\.({_UNFINISHED}|{_USE}))?")
"""Other files in the folder are left alone."""


class CheckpointStore:
    """The checkpoints of one rank in a folder that the engines of a host share."""

    def __init__(self, folder: Path, rank: int, layout: bytes, max_bytes: int) -> None:
        """`layout`: 32 bytes, equal where KV is compatible; `max_bytes`: of this rank's files.
        Raises ValueError when the folder cannot be created or other users can write to it."""
        self._folder = folder
        self._rank = rank
        self._layout = layout
        self._max_bytes = max_bytes
        # Not the process id: engines in different pods may have the same one.
        self._user_id = secrets.token_hex(8)
        self._used_bytes: dict[str, int] = {}
        """Sizes of the files that this rank uses, by key."""
        self._lock = threading.Lock()
        self._warned_full = False
        open_folder(folder)

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that this rank uses; other engines may use them, too."""
        with self._lock:
            return sum(self._used_bytes.values())

    def contains(self, key: str) -> bool:
        """Return whether a block exists; another engine may remove it at any time."""
        return self._build_path(key).exists()

    def save(self, key: str, body: bytes) -> bool:
        """Write a block unless it exists; return whether it exists now. A full disk is no error."""
        if self._link_existing(key):
            return True
        size = _HEADER.size + len(body)
        if not self._has_room(size):
            return False
        head = _HEADER.pack(_MAGIC, bytes.fromhex(key), self._layout, len(body), zlib.crc32(body))
        temporary, link = self._build_path(key, _UNFINISHED), self._build_path(key, _USE)
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(file, "wb", buffering=0) as output:
                output.write(head)
                output.write(body)
            if temporary.stat().st_size != size:
                raise OSError("short write")
            temporary.rename(link)
            os.link(link, self._build_path(key))
        except FileExistsError:
            # Another engine was faster.
            link.unlink(missing_ok=True)
            return self._link_existing(key)
        except OSError as error:
            _log.warning("a KV checkpoint was not written: %s", error)
            for path in (temporary, link):
                path.unlink(missing_ok=True)
            return False
        with self._lock:
            self._used_bytes[key] = size
        return True

    def load(self, key: str, num_bytes: int) -> memoryview:
        """Return the bytes of a block. Raises RefusedError."""
        try:
            content = memoryview(self._build_path(key).read_bytes())
        except OSError as error:
            raise RefusedError(RefusalReason.NOT_HELD, f"no checkpoint: {error}") from error
        if len(content) < _HEADER.size:
            raise RefusedError(RefusalReason.CHECKSUM, "a checkpoint without a header")
        magic, file_key, layout, size, checksum = _HEADER.unpack_from(content)
        body = content[_HEADER.size :]
        if magic != _MAGIC or layout != self._layout:
            fault = "a checkpoint of another model, data type or block size"
            raise RefusedError(RefusalReason.LAYOUT, fault)
        if file_key != bytes.fromhex(key):
            raise RefusedError(RefusalReason.PROMPT, "a checkpoint of other tokens")
        if size != len(body) or size != num_bytes or zlib.crc32(body) != checksum:
            raise RefusedError(RefusalReason.CHECKSUM, "a checkpoint whose checksum does not match")
        return body

    def drop(self, keys: Iterable[str]) -> None:
        """Stop using these blocks; files that other engines use stay."""
        for key in keys:
            with self._lock:
                used = self._used_bytes.pop(key, None)
            if used is None:
                continue
            self._build_path(key, _USE).unlink(missing_ok=True)
            # An engine that links the file meanwhile recomputes the block later.
            with suppress(FileNotFoundError):
                if self._build_path(key).stat().st_nlink == 1:
                    self._build_path(key).unlink()

    def collect_garbage(self, max_age_s: float) -> None:
        """Mark the files in use, and remove those that no engine has marked for `max_age_s`. Must
        be called several times in that time. Also removes what dead engines left."""
        with self._lock:
            used = list(self._used_bytes)
        for key in used:
            with suppress(FileNotFoundError):
                os.utime(self._build_path(key))
        before = time.time() - max_age_s
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):
                if _FILE_NAME.fullmatch(path.name) and path.stat().st_mtime < before:
                    path.unlink()

    def _link_existing(self, key: str) -> bool:
        """Use a block if it exists; return whether it does."""
        with self._lock:
            is_used = key in self._used_bytes
            remaining = self._max_bytes - sum(self._used_bytes.values())
        try:
            size = self._build_path(key).stat().st_size
            if not is_used and size <= remaining:
                os.link(self._build_path(key), self._build_path(key, _USE))
                os.utime(self._build_path(key, _USE))
                with self._lock:
                    self._used_bytes[key] = size
        except FileNotFoundError:
            return False
        return True

    def _build_path(self, key: str, suffix: str = "") -> Path:
        """Return the path of a block's file, or with `suffix` of this engine's link to it."""
        name = f"{key}-{self._rank}"
        return self._folder / (f"{name}.{self._user_id}.{suffix}" if suffix else name)

    def _has_room(self, size: int) -> bool:
        filesystem = os.statvfs(self._folder)
        free_bytes = filesystem.f_bavail * filesystem.f_frsize - size
        fits = self.num_bytes + size <= self._max_bytes
        if fits and free_bytes >= filesystem.f_blocks * filesystem.f_frsize // _FREE_SPACE_DIVISOR:
            return True
        if not self._warned_full:
            self._warned_full = True
            text = "no space for KV checkpoints in %s; none are written until some is freed"
            _log.warning(text, self._folder)
        return False


def open_folder(folder: Path) -> None:
    """Create a folder that only this user can access. Raises ValueError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ValueError(f"checkpoints.folder {folder}: {error.strerror}; name another") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise ValueError(
            f"checkpoints.folder {folder}: other users can access it; name a private folder"
        )
