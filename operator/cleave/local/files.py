"""Files of the state folder: written atomically, readable only by their owner.

Used by the kubelet, the supervisor and the tiny model. Other processes read concurrently, so a
file is written under a temporary name and renamed. What lies in a file's place and is none is moved
aside, not deleted.
"""

import errno
import logging
import os
import stat
from pathlib import Path

log = logging.getLogger(__name__)

_MAX_BYTES = 16 << 20

TOKEN_FILE = "token"  # noqa: S105 - the name of a file
"""File in a deployment's folder with the token of its processes, new at each start."""


def create_private_folder(path: Path) -> Path:
    """Create `path` and its parents if absent, inaccessible to other users; returns `path`."""
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    return path


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of `path` with `text` atomically. Raises OSError."""
    create_private_folder(path.parent)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    try:
        new.rename(path)
    except IsADirectoryError:
        set_aside(path)
        new.rename(path)


def remove(path: Path) -> None:
    """Remove a file, if there is one; a folder in its place is moved aside. Raises OSError."""
    try:
        path.unlink(missing_ok=True)
    except (IsADirectoryError, PermissionError):
        if not path.is_dir():
            raise
        set_aside(path)


def set_aside(path: Path) -> None:
    """Rename what lies at `path`, which is not Cleave's. Raises OSError."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(aside)
    log.warning("%s was no file; what was there is now %s", path, aside.name)


class OwnedFiles:
    """Files that this process alone writes: what happens to them otherwise is undone."""

    def __init__(self) -> None:
        self._texts: dict[Path, str] = {}
        self._faults: dict[Path, str] = {}

    def write(self, path: Path, text: str) -> None:
        """Write a file, and keep its text. Raises OSError; `restore` then tries again."""
        self._texts[path] = text
        write_atomically(path, text)

    def restore(self) -> None:
        """Write the files again that are gone or have another text. Faults are logged once."""
        for path, text in self._texts.items():
            if _read(path) == text.encode():
                self._faults.pop(path, None)
                continue
            try:
                write_atomically(path, text)
            except OSError as error:
                if self._faults.get(path) != str(error):
                    log.warning("%s is damaged and cannot be written: %s", path, error.strerror)
                self._faults[path] = str(error)
            else:
                log.warning("%s was changed or removed by another program: written again", path)


def read_regular(path: Path) -> bytes:
    """The content of a file. Raises OSError, also for what is no file or is far too large: a pipe
    would be waited for."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if status.st_size > _MAX_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.read()


def _read(path: Path) -> bytes | None:
    """The content of a file; None: it is none, or cannot be read."""
    try:
        return read_regular(path)
    except OSError:
        return None
