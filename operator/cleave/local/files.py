"""Files of the state folder: written atomically, readable only by their owner.

Used by the kubelet, the supervisor and the tiny model. Other processes read concurrently, so a
file is written under a temporary name and renamed.
"""

import os
from pathlib import Path

TOKEN_FILE = "token"  # noqa: S105 - the name of a file
"""File in a deployment's folder with the token of its processes, new at each start."""


def create_private_folder(path: Path) -> Path:
    """Create `path` and its parents if absent, inaccessible to other users; returns `path`."""
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    return path


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of `path` with `text` atomically."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    new.rename(path)
