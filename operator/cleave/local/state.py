"""The state folder of a deployment on this machine.

The supervisor writes `state.json` there; `up`, `status`, `down` and `logs` read it. A supervisor
that was killed leaves its file behind. Whether one runs is therefore determined by a file lock,
which the kernel releases with the process, and not by `state.json`.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

import msgspec

from cleave.local import files
from cleave.local.errors import StateError

_LOCK_ATTEMPTS = 5
_LOCK_RETRY_DELAY_S = 0.02


@dataclass(frozen=True, slots=True)
class PodView:
    """The state of one pod for display."""

    name: str
    role: str
    """A worker's role, or `gateway`."""
    address: str
    """host:port of the agent, or of the gateway."""
    pid: int | None
    ready: bool
    restarts: int
    waiting: str
    """Kubernetes' reason why its process does not run; empty when it runs."""
    last_exit_code: int | None
    admitted_at: float
    """Seconds since the epoch."""
    further_addresses: tuple[str, ...] = ()
    """host:port of the other agents, of a pod with several engines."""

    @property
    def last_end(self) -> str:
        """The last exit code for display, with the signal that it stands for; empty: none yet."""
        if self.last_exit_code is None:
            return ""
        code, signals = self.last_exit_code, {128 + each: f" ({each.name})" for each in Signals}
        return f"exit code {code}{signals.get(code, '')}"


@dataclass(frozen=True, slots=True)
class DeploymentSnapshot:
    """A deployment on this machine at one moment."""

    deployment: str
    supervisor_pid: int
    url: str
    """URL of the gateway for clients."""
    pods: tuple[PodView, ...] = ()
    fault: str = ""
    """Why the supervisor cannot start the pods; empty: no failure."""
    stopping: bool = False
    internal_url: str = ""
    """Internal URL of the gateway, for `cleave top`; empty before the supervisor runs."""
    plan: dict[str, Any] = field(default_factory=dict)
    """The current placement, as in `status.plan`; empty before the supervisor runs."""


def get_root() -> Path:
    """Folder of all deployments: $CLEAVE_STATE_DIR, else `cleave` in the user's state folder."""
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

    def get_log_path(self, pod: str) -> Path:
        """Log file of a pod; `supervisor` names the supervisor's own."""
        return self.path / "logs" / f"{pod}.log"

    def read(self) -> DeploymentSnapshot | None:
        """The last snapshot, None if there is none. Raises StateError when it is not readable."""
        try:
            text = (self.path / "state.json").read_bytes()
            return msgspec.json.decode(text, type=DeploymentSnapshot)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise StateError(f"{self.path / 'state.json'} cannot be read: {error}") from error

    def write(self, snapshot: DeploymentSnapshot) -> None:
        """Publish `snapshot`."""
        files.write_atomically(self.path / "state.json", msgspec.json.encode(snapshot).decode())

    def remove_logs(self) -> None:
        """Remove the logs of earlier runs, which may have had other pods."""
        for log in (self.path / "logs").glob("*.log*"):
            log.unlink()

    def clear(self) -> None:
        """Remove state and job, with the environment variables of engines; logs stay."""
        for name in ("state.json", "job.json", "agents", files.TOKEN_FILE):
            (self.path / name).unlink(missing_ok=True)

    @contextmanager
    def lock(self) -> Iterator[int]:
        """Lock the deployment; yields a file descriptor, which keeps the lock in a child process.
        Raises StateError when another supervisor has the lock or the folder is not writable."""
        create_folder(self.path / "logs")
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _try_lock(fd):
                raise self._build_running_error()
            yield fd
        finally:
            os.close(fd)

    def require_stopped(self) -> None:
        """Raise StateError when a supervisor runs."""
        if self.is_running():
            raise self._build_running_error()

    def _build_running_error(self) -> StateError:
        return StateError(
            f"{self.name} is already running; see `cleave status {self.name}`, "
            f"stop it with `cleave down {self.name}`"
        )

    def is_running(self) -> bool:
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


def _try_lock(fd: int) -> bool:
    """Take the lock, with retries, because `is_running` takes it briefly, too."""
    for _ in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_RETRY_DELAY_S)
        else:
            return True
    return False


def get_folder(name: str) -> StateFolder:
    """The state folder of deployment `name`."""
    return StateFolder(get_root() / name)


def create_folder(path: Path) -> None:
    """Create a folder below `get_root()`. Raises StateError when that is not possible."""
    try:
        files.create_private_folder(path)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise StateError(
            f"{path} is not writable: {error.strerror}; set CLEAVE_STATE_DIR to another folder"
        ) from error


def list_running() -> list[StateFolder]:
    """Folders of the running deployments, by name."""
    locks = sorted(get_root().glob("*/lock"))
    return [each for lock in locks if (each := StateFolder(lock.parent)).is_running()]


def list_orphaned() -> list[StateFolder]:
    """Folders of deployments whose supervisor was killed and that were not restarted, by name."""
    files = sorted(get_root().glob("*/state.json"))
    return [each for file in files if not (each := StateFolder(file.parent)).is_running()]


def find_running(name: str | None) -> StateFolder:
    """The running deployment `name`, or the only one. Raises StateError."""
    up = list_running()
    if name is None:
        if len(up) == 1:
            return up[0]
        names = ", ".join(each.name for each in up)
        nothing = "no deployments running on this machine"
        raise StateError(f"give one of: {names}" if up else nothing)
    if name not in {each.name for each in up}:
        if name in {each.name for each in list_orphaned()}:
            why = "its supervisor was killed"
            raise StateError(f"{name} is not running: {why}; see `cleave logs {name}`")
        raise StateError(f"{name} is not running on this machine")
    return get_folder(name)
