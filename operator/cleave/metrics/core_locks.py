"""Where agents lock the cores of their engines: one file a core, the same for a whole machine.

Agents take the locks; whoever plans workers on a machine looks which ones are held.
"""

import tempfile
from pathlib import Path


def folder() -> Path:
    """The folder of the lock files."""
    return Path(tempfile.gettempdir()) / "cleave-cores"


def lock_file(locks: Path, core: int) -> Path:
    """The file whose lock is the right to `core`."""
    return locks / f"core-{core}.lock"


def core_of(file: Path) -> int | None:
    """The core that a lock file stands for; None when it is no lock file."""
    core = file.name.removeprefix("core-").removesuffix(".lock")
    return int(core) if core.isdigit() and file.name == f"core-{core}.lock" else None
