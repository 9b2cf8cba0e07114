"""Blocks of KV as files in memory that outlives the engine, found by the tokens they are of.

One engine writes them while a stream decodes; whichever engine of this host goes on with the stream
reads them. What is hard: nobody vouches for a file, as the engine that wrote it may be dead. So a
file says itself what it is of, appears only when it is whole, and is checked byte by byte. And
streams of several engines begin alike: each engine that uses a file has a link of its own to it,
and who drops the last one removes the file.
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

from cleave_worker.transfer.identity import Reason, RefusedError

_log = logging.getLogger(__name__)
_HEAD = struct.Struct("<8s32s32sQI")
"""Mark, key, layout, bytes, their CRC-32."""
_MARK = b"cleaveK1"
_LEFT_FREE = 8
"""One part in so many of the file system: others keep KV there, and die when it is full."""
_UNFINISHED, _USE = "part", "use"
_NAME = re.compile(rf"[0-9a-f]{{64}}-\d+(\.[0-9a-f]+\.({_UNFINISHED}|{_USE}))?")
"""Whatever else somebody keeps in the folder is not touched."""


class Checkpoints:
    """One rank's view of a folder that the engines of a host share."""

    def __init__(self, folder: Path, rank: int, layout: bytes, most_bytes: int) -> None:
        """`layout`: 32 bytes, equal where KV may be exchanged; `most_bytes`: that this one keeps.

        Raises ValueError when the folder cannot be made or is not ours alone.
        """
        self._folder = folder
        self._rank = rank
        self._layout = layout
        self._most_bytes = most_bytes
        # A process id would not do: engines in different pods may have the same.
        self._user = secrets.token_hex(8)
        self._used: dict[str, int] = {}
        """Sizes of files that this one has saved or found there, by key."""
        self._lock = threading.Lock()
        self._told_full = False
        open_folder(folder)

    @property
    def num_bytes(self) -> int:
        """In files that this one has saved and not dropped; others may use them as well."""
        with self._lock:
            return sum(self._used.values())

    def has(self, key: str) -> bool:
        """Whether somebody has written such a block; it may be gone the next moment."""
        return self._path(key).exists()

    def save(self, key: str, body: bytes) -> bool:
        """Write a block unless it is there; whether it is. No room is no fault."""
        if self._take_up(key):
            return True
        size = _HEAD.size + len(body)
        if not self._has_room(size):
            return False
        head = _HEAD.pack(_MARK, bytes.fromhex(key), self._layout, len(body), zlib.crc32(body))
        part, own = self._path(key, _UNFINISHED), self._path(key, _USE)
        try:
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(file, "wb", buffering=0) as written:
                written.write(head)
                written.write(body)
            if part.stat().st_size != size:
                raise OSError("short write")
            part.rename(own)
            os.link(own, self._path(key))
        except FileExistsError:
            # Another engine was faster.
            own.unlink(missing_ok=True)
            return self._take_up(key)
        except OSError as error:
            _log.warning("a checkpoint of KV was not written: %s", error)
            for path in (part, own):
                path.unlink(missing_ok=True)
            return False
        with self._lock:
            self._used[key] = size
        return True

    def load(self, key: str, num_bytes: int) -> memoryview:
        """The bytes of a block. Raises RefusedError."""
        try:
            whole = memoryview(self._path(key).read_bytes())
        except OSError as error:
            raise RefusedError(Reason.NOT_HELD, f"no checkpoint: {error}") from error
        if len(whole) < _HEAD.size:
            raise RefusedError(Reason.CHECKSUM, "a checkpoint without its head")
        mark, its_key, layout, size, checksum = _HEAD.unpack_from(whole)
        body = whole[_HEAD.size :]
        if mark != _MARK or layout != self._layout:
            raise RefusedError(Reason.LAYOUT, "a checkpoint of another model, type or block size")
        if its_key != bytes.fromhex(key):
            raise RefusedError(Reason.PROMPT, "a checkpoint of other tokens")
        if size != len(body) or size != num_bytes or zlib.crc32(body) != checksum:
            raise RefusedError(Reason.CHECKSUM, "a checkpoint with other bytes than were written")
        return body

    def drop(self, keys: Iterable[str]) -> None:
        """Use these blocks no more; what others use stays."""
        for key in keys:
            with self._lock:
                used = self._used.pop(key, None)
            if used is None:
                continue
            self._path(key, _USE).unlink(missing_ok=True)
            # Who begins to use it at this very moment computes it again when it wants it.
            with suppress(FileNotFoundError):
                if self._path(key).stat().st_nlink == 1:
                    self._path(key).unlink()

    def sweep(self, keep_s: float) -> None:
        """Say which files are in use, and remove those of which nobody has said so for long.

        To be called several times in `keep_s`. What dead engines have left goes, links included.
        """
        with self._lock:
            used = list(self._used)
        for key in used:
            with suppress(FileNotFoundError):
                os.utime(self._path(key))
        before = time.time() - keep_s
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):
                if _NAME.fullmatch(path.name) and path.stat().st_mtime < before:
                    path.unlink()

    def _take_up(self, key: str) -> bool:
        """Use a block if it is there; whether it is."""
        with self._lock:
            known, left = key in self._used, self._most_bytes - sum(self._used.values())
        try:
            size = self._path(key).stat().st_size
            if not known and size <= left:
                os.link(self._path(key), self._path(key, _USE))
                os.utime(self._path(key, _USE))
                with self._lock:
                    self._used[key] = size
        except FileNotFoundError:
            return False
        return True

    def _path(self, key: str, own: str = "") -> Path:
        """The name of a block's file, or one that only this engine gives it."""
        name = f"{key}-{self._rank}"
        return self._folder / (f"{name}.{self._user}.{own}" if own else name)

    def _has_room(self, size: int) -> bool:
        room = os.statvfs(self._folder)
        left = room.f_bavail * room.f_frsize - size
        fits = self.num_bytes + size <= self._most_bytes
        if fits and left >= room.f_blocks * room.f_frsize // _LEFT_FREE:
            return True
        if not self._told_full:
            self._told_full = True
            _log.warning("no room for checkpoints of KV in %s; further ones wait", self._folder)
        return False


def open_folder(folder: Path) -> None:
    """Make a folder that only this user can read. Raises ValueError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        told = folder.lstat()
    except OSError as error:
        raise ValueError(f"checkpoints.folder {folder}: {error.strerror}; name another") from error
    if told.st_uid != os.getuid() or told.st_mode & 0o077 or folder.is_symlink():
        raise ValueError(
            f"checkpoints.folder {folder}: others may write there; name one that is this user's"
        )
