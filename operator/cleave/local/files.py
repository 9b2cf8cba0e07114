"""Files of the state folder: replaced whole, readable by their owner alone.

Used by the kubelet, the supervisor and the tiny model. Readers run beside the writer, so a file is
written under another name and renamed.
"""

import os
from pathlib import Path


def private_folder(path: Path) -> Path:
    """`path`; it and its parents are made if need be, closed to other users."""
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    return path


def replace(path: Path, text: str) -> None:
    """Give `path` the content `text` in one step."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    new.rename(path)
