"""The state folder of a deployment on this machine, and what it says.

The supervisor writes `state.json` there; `up`, `status`, `down` and `logs` read it. What is hard:
a supervisor that was killed leaves its file behind, so whether one runs is told by a lock that
the kernel releases with the process, never by the file.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from cleave.local import files
from cleave.local.errors import StateError

_LOCK_ATTEMPTS = 5
_LOCK_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class PodView:
    """What is shown of one pod."""

    name: str
    role: str
    """A worker's role, or `gateway`."""
    address: str
    """host:port of the agent, or of the gateway."""
    pid: int | None
    ready: bool
    restarts: int
    waiting: str
    """Why its process does not run, in Kubernetes' words; empty when it runs."""
    last_exit_code: int | None
    admitted_at: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A deployment on this machine at one moment."""

    deployment: str
    supervisor_pid: int
    url: str
    """Of the gateway, for clients."""
    pods: tuple[PodView, ...] = ()
    fault: str = ""
    """Why the supervisor gives up; empty while all is well."""
    stopping: bool = False
    internal_url: str = ""
    """Of the gateway, for `cleave top`; empty before the supervisor runs."""
    plan: dict[str, Any] = field(default_factory=dict)
    """The placement in force, as in `status.plan`; empty before the supervisor runs."""


def root() -> Path:
    """Folder of all deployments: $CLEAVE_STATE_DIR, else cleave under the user's state folder."""
    if own := os.environ.get("CLEAVE_STATE_DIR"):
        return Path(own).absolute()
    state_home = os.environ.get("XDG_STATE_HOME")
    return (Path(state_home) if state_home else Path.home() / ".local" / "state") / "cleave"


class StateFolder:
    """The folder of one deployment."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The deployment's name."""
        return self.path.name

    def log(self, pod: str) -> Path:
        """Log file of a pod; `supervisor` names the supervisor's own."""
        return self.path / "logs" / f"{pod}.log"

    def read(self) -> Snapshot | None:
        """The last snapshot; None when nothing has run here."""
        try:
            return msgspec.json.decode((self.path / "state.json").read_bytes(), type=Snapshot)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise StateError(f"{self.path / 'state.json'} cannot be read: {error}") from error

    def write(self, snapshot: Snapshot) -> None:
        """Publish `snapshot`."""
        files.replace(self.path / "state.json", msgspec.json.encode(snapshot).decode())

    def forget_logs(self) -> None:
        """Remove the logs of earlier runs, whose pods may not come back."""
        for log in (self.path / "logs").glob("*.log*"):
            log.unlink()

    def clear(self) -> None:
        """Forget what ran, the variables of its engines with it; logs stay."""
        for name in ("state.json", "job.json", "agents"):
            (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def lock(self) -> Iterator[int]:
        """Hold the deployment; yields a descriptor that keeps it held where it is inherited.

        Raises StateError when another supervisor holds it or the folder cannot be written.
        """
        make_folder(self.path / "logs")
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _locked(fd):
                raise self._up_already()
            yield fd
        finally:
            os.close(fd)

    def must_be_free(self) -> None:
        """Raises StateError when a supervisor runs."""
        if self.is_held():
            raise self._up_already()

    def _up_already(self) -> StateError:
        return StateError(
            f"{self.name} is up already; see `cleave status {self.name}`, "
            f"end it with `cleave down {self.name}`"
        )

    def is_held(self) -> bool:
        """Whether a supervisor runs."""
        try:
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False


def _locked(fd: int) -> bool:
    """Take the lock. Tried more than once: `is_held` takes it too, for an instant."""
    for _ in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_S)
        else:
            return True
    return False


def folder(name: str) -> StateFolder:
    """The state folder of deployment `name`."""
    return StateFolder(root() / name)


def make_folder(path: Path) -> None:
    """Make a folder below `root`. Raises StateError when that is not possible."""
    try:
        files.private_folder(path)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise StateError(
            f"{path} cannot be written: {error.strerror}; name another folder with CLEAVE_STATE_DIR"
        ) from error


def running() -> list[StateFolder]:
    """Folders of the deployments that are up, by name."""
    locks = sorted(root().glob("*/lock"))
    return [found for lock in locks if (found := StateFolder(lock.parent)).is_held()]


def lost() -> list[StateFolder]:
    """Folders of the deployments whose supervisor was killed, by name, until they are up again."""
    left = sorted(root().glob("*/state.json"))
    return [found for file in left if not (found := StateFolder(file.parent)).is_held()]


def find(name: str | None) -> StateFolder:
    """The running deployment `name`, or the only one. Raises StateError."""
    up = running()
    if name is None:
        if len(up) == 1:
            return up[0]
        names = ", ".join(each.name for each in up)
        raise StateError(f"name one of: {names}" if up else "nothing is up on this machine")
    if name not in {each.name for each in up}:
        if name in {each.name for each in lost()}:
            raise StateError(
                f"{name} is not up: its supervisor was killed; see `cleave logs {name}`"
            )
        raise StateError(f"{name} is not up on this machine")
    return folder(name)
