"""Lock files for the CPU cores of engines: one file per core, common to all agents of a machine.

Agents take the locks; `cleave up` reads them when it plans workers for a machine.
"""

import tempfile
from pathlib import Path


def get_lock_folder() -> Path:
    """The folder of the lock files."""
    return Path(tempfile.gettempdir()) / "cleave-cores"


def get_lock_file(locks: Path, core: int) -> Path:
    """The file whose lock reserves `core`."""
    return locks / f"core-{core}.lock"


def parse_core(file: Path) -> int | None:
    """The core of a lock file; None when the file is not a lock file."""
    core = file.name.removeprefix("core-").removesuffix(".lock")
    return int(core) if core.isdigit() and file.name == f"core-{core}.lock" else None


def describe_holder(locks: Path, core: int) -> str:
    """The process that holds a locked core, as its agent has written it: `process 4711 (name)`."""
    try:
        pid, _, name = get_lock_file(locks, core).read_text().strip().partition(" ")
    except OSError:
        pid, name = "", ""
    return f"process {pid} ({name})" if pid else "a process of another user"
