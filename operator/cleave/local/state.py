"""The state folder of a deployment on this machine.

The supervisor writes `state.json` there; `up`, `status` and `top` read it. A supervisor that was
killed leaves its file behind, and files may be damaged. Whether one runs, and which process it is,
is therefore determined by a file lock, which the kernel releases with the process, and not by
`state.json`; a running supervisor writes a damaged file again.
"""

import asyncio
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

from cleave.local import files, processes
from cleave.local.errors import StateError

_LOCK_ATTEMPTS = 5
_LOCK_RETRY_DELAY_S = 0.02
_RESTORE_TIMEOUT_S = 5.0
_RESTORE_POLL_S = 0.1


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

    @property
    def state_file(self) -> Path:
        """The file with the snapshot."""
        return self.path / "state.json"

    @property
    def has_state(self) -> bool:
        """Whether anything is in the place of that file."""
        return os.path.lexists(self.state_file)

    def read(self) -> DeploymentSnapshot | None:
        """The last snapshot, None if there is none. Raises StateError when it is not readable."""
        try:
            text = files.read_regular(self.state_file)
            snapshot = msgspec.json.decode(text, type=DeploymentSnapshot)
        except FileNotFoundError as error:
            if self.has_state:
                raise self._build_damage_error("it is a link to nothing") from error
            return None
        except (msgspec.MsgspecError, OSError, UnicodeDecodeError, RecursionError) as error:
            raise self._build_damage_error(str(error)) from error
        if snapshot.deployment != self.name:
            raise self._build_damage_error(f"it is of the deployment {snapshot.deployment}")
        return snapshot

    async def read_restored(self) -> DeploymentSnapshot | None:
        """As `read`. While a supervisor runs, which writes a lost or damaged file again within
        seconds, it waits for that. Raises StateError."""
        deadline = time.monotonic() + _RESTORE_TIMEOUT_S
        while True:
            is_late = time.monotonic() > deadline or not self.is_running()
            try:
                if (snapshot := self.read()) is not None or is_late:
                    return snapshot
            except StateError:
                if is_late:
                    raise
            await asyncio.sleep(_RESTORE_POLL_S)

    def write(self, snapshot: DeploymentSnapshot, owned: files.OwnedFiles | None = None) -> None:
        """Publish `snapshot`; in `owned`, so that it is restored. Raises OSError."""
        text = msgspec.json.encode(snapshot).decode()
        (owned.write if owned else files.write_atomically)(self.state_file, text)

    def remove_logs(self) -> None:
        """Remove the logs of earlier runs, which may have had other pods."""
        for log in (self.path / "logs").glob("*.log*"):
            files.remove(log)

    def clear(self) -> None:
        """Remove state and job, with the environment variables of engines; logs stay."""
        for file in self._files:
            files.remove(file)

    @contextmanager
    def lock(self) -> Iterator[int]:
        """Lock the deployment; yields a file descriptor, which keeps the lock in a child process.
        Raises StateError when another supervisor has the lock or the folder is not writable."""
        logs = self.path / "logs"
        if logs.exists() and not logs.is_dir():
            files.set_aside(logs)
        create_folder(logs)
        if not self._lock_file.is_file():
            if self.find_supervisors():
                raise self._build_running_error()
            if self._lock_file.exists():
                files.set_aside(self._lock_file)
        fd = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # A supervisor may hold the lock of a file that was removed.
            if not _try_lock(fd) or self.find_supervisors():
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

    def _build_damage_error(self, reason: str) -> StateError:
        remedy = f"`cleave down {self.name}` stops what runs, and removes it"
        return StateError(f"{self.state_file} cannot be read: {reason}; {remedy}")

    @property
    def _lock_file(self) -> Path:
        return self.path / "lock"

    @property
    def _files(self) -> tuple[Path, ...]:
        """The files of one run."""
        names = ("job.json", "agents", files.TOKEN_FILE)
        return (self.state_file, *(self.path / name for name in names))

    def find_supervisors(self) -> list[int]:
        """Other processes that hold the lock: the supervisor, for a moment also `cleave up`."""
        return processes.find_lock_holders(self._lock_file)

    def find_pod_processes(self) -> list[int]:
        """Processes of the deployment's pods."""
        return processes.find_pod_processes(self.path / "agents")

    def is_running(self) -> bool:
        """Whether a supervisor runs, also one whose lock file was removed or replaced."""
        if self._is_locked():
            return True
        # One that has stopped leaves its lock file and its logs only.
        is_whole = self._lock_file.is_file() and not any(map(os.path.lexists, self._files))
        return not is_whole and bool(self.find_supervisors())

    def _is_locked(self) -> bool:
        try:
            fd = os.open(self._lock_file, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
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
    return [each for each in _list_folders() if each.is_running()]


def list_orphaned() -> list[StateFolder]:
    """Folders of deployments whose supervisor was killed and that were not restarted, by name."""
    return [each for each in _list_folders() if each.has_state and not each.is_running()]


def _list_folders() -> list[StateFolder]:
    return [StateFolder(path) for path in sorted(get_root().glob("*")) if path.is_dir()]


def find_stoppable(name: str) -> StateFolder:
    """The deployment `name`, if it runs or its supervisor was killed. Raises StateError."""
    folder = get_folder(name)
    if folder.has_state or folder.find_pod_processes():
        return folder
    return find_running(name)


def find_running(name: str | None) -> StateFolder:
    """The running deployment `name`, or the only one. Raises StateError."""
    if name is None:
        up = list_running()
        if len(up) == 1:
            return up[0]
        names = ", ".join(each.name for each in up)
        nothing = "no deployments running on this machine"
        raise StateError(f"give one of: {names}" if up else nothing)
    folder = get_folder(name)
    if not folder.is_running():
        if folder.has_state:
            why, remedy = "its supervisor was killed", f"clean up with `cleave down {name}`"
            raise StateError(f"{name} is not running: {why}; {remedy}")
        raise StateError(f"{name} is not running on this machine")
    return folder
