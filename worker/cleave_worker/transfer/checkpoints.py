"""KV blocks as files in host memory that outlives the engine, named by a hash of their tokens.

An engine writes them while a request decodes; any engine of the same host that resumes the request
reads them. What is hard: the engine that wrote a file may be dead. So each file states what it
contains, appears atomically and is verified by checksum. Requests of several engines may begin
alike: each engine that uses a file has a hard link of its own, and the one that drops the last link
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

from cleave_worker.transfer.handoff import Reason, RefusedError

_log = logging.getLogger(__name__)
_HEAD = struct.Struct("<8s32s32sQI")
"""Magic, key, layout hash, body bytes, CRC-32 of the body."""
_MARK = b"cleaveK1"
_LEFT_FREE = 8
"""One part in 8 of the file system stays free: other engines have KV there and die when it fills
up."""
_UNFINISHED, _USE = "part", "use"
_NAME = re.compile(rf"[0-9a-f]{{64}}-\d+(\.[0-9a-f]+\.({_UNFINISHED}|{_USE}))?")
"""Other files in the folder are left alone."""


class Checkpoints:
    """The checkpoints of one rank in a folder that the engines of a host share."""

    def __init__(self, folder: Path, rank: int, layout: bytes, max_bytes: int) -> None:
        """`layout`: 32 bytes, equal where KV is compatible; `max_bytes`: limit of this rank's
        files.

        Raises ValueError when the folder cannot be created or other users can write to it.
        """
        self._folder = folder
        self._rank = rank
        self._layout = layout
        self._most_bytes = max_bytes
        # Not the process id: engines in different pods may have the same one.
        self._user = secrets.token_hex(8)
        self._used: dict[str, int] = {}
        """Sizes of the files that this rank uses, by key."""
        self._lock = threading.Lock()
        self._told_full = False
        open_folder(folder)

    @property
    def num_bytes(self) -> int:
        """Bytes of the files that this rank uses; other engines may use them, too."""
        with self._lock:
            return sum(self._used.values())

    def has(self, key: str) -> bool:
        """Return whether a block exists; another engine may remove it at any time."""
        return self._path(key).exists()

    def save(self, key: str, body: bytes) -> bool:
        """Write a block unless it exists; return whether it exists now. A full disk is no error."""
        if self._take_up(key):
            return True
        size = _HEAD.size + len(body)
        if not self._has_room(size):
            return False
        head = _HEAD.pack(_MARK, bytes.fromhex(key), self._layout, len(body), zlib.crc32(body))
        temporary, link = self._path(key, _UNFINISHED), self._path(key, _USE)
        try:
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(file, "wb", buffering=0) as output:
                output.write(head)
                output.write(body)
            if temporary.stat().st_size != size:
                raise OSError("short write")
            temporary.rename(link)
            os.link(link, self._path(key))
        except FileExistsError:
            # Another engine was faster.
            link.unlink(missing_ok=True)
            return self._take_up(key)
        except OSError as error:
            _log.warning("a KV checkpoint was not written: %s", error)
            for path in (temporary, link):
                path.unlink(missing_ok=True)
            return False
        with self._lock:
            self._used[key] = size
        return True

    def load(self, key: str, num_bytes: int) -> memoryview:
        """Return the bytes of a block. Raises RefusedError."""
        try:
            content = memoryview(self._path(key).read_bytes())
        except OSError as error:
            raise RefusedError(Reason.NOT_HELD, f"no checkpoint: {error}") from error
        if len(content) < _HEAD.size:
            raise RefusedError(Reason.CHECKSUM, "a checkpoint without a header")
        magic, file_key, layout, size, checksum = _HEAD.unpack_from(content)
        body = content[_HEAD.size :]
        if magic != _MARK or layout != self._layout:
            raise RefusedError(
                Reason.LAYOUT, "a checkpoint of another model, data type or block size"
            )
        if file_key != bytes.fromhex(key):
            raise RefusedError(Reason.PROMPT, "a checkpoint of other tokens")
        if size != len(body) or size != num_bytes or zlib.crc32(body) != checksum:
            raise RefusedError(Reason.CHECKSUM, "a checkpoint whose checksum does not match")
        return body

    def drop(self, keys: Iterable[str]) -> None:
        """Stop using these blocks; files that other engines use stay."""
        for key in keys:
            with self._lock:
                used = self._used.pop(key, None)
            if used is None:
                continue
            self._path(key, _USE).unlink(missing_ok=True)
            # An engine that links the file at this very moment recomputes the block later.
            with suppress(FileNotFoundError):
                if self._path(key).stat().st_nlink == 1:
                    self._path(key).unlink()

    def sweep(self, max_age_s: float) -> None:
        """Mark the files in use, and remove those that no engine has marked for `max_age_s`
        seconds.

        Must be called several times per `max_age_s`. Also removes the files and links of dead
        engines.
        """
        with self._lock:
            used = list(self._used)
        for key in used:
            with suppress(FileNotFoundError):
                os.utime(self._path(key))
        before = time.time() - max_age_s
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):
                if _NAME.fullmatch(path.name) and path.stat().st_mtime < before:
                    path.unlink()

    def _take_up(self, key: str) -> bool:
        """Use a block if it exists; return whether it does."""
        with self._lock:
            is_used, remaining = key in self._used, self._most_bytes - sum(self._used.values())
        try:
            size = self._path(key).stat().st_size
            if not is_used and size <= remaining:
                os.link(self._path(key), self._path(key, _USE))
                os.utime(self._path(key, _USE))
                with self._lock:
                    self._used[key] = size
        except FileNotFoundError:
            return False
        return True

    def _path(self, key: str, suffix: str = "") -> Path:
        """Return the path of a block's file, or with `suffix` of this engine's link to it."""
        name = f"{key}-{self._rank}"
        return self._folder / (f"{name}.{self._user}.{suffix}" if suffix else name)

    def _has_room(self, size: int) -> bool:
        filesystem = os.statvfs(self._folder)
        free_bytes = filesystem.f_bavail * filesystem.f_frsize - size
        fits = self.num_bytes + size <= self._most_bytes
        if fits and free_bytes >= filesystem.f_blocks * filesystem.f_frsize // _LEFT_FREE:
            return True
        if not self._told_full:
            self._told_full = True
            _log.warning(
                "no space for KV checkpoints in %s; none are written until some is freed",
                self._folder,
            )
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
