"""A small process between agent and engine that ends the engine when the agent ends.

The agent starts it as a script with `python -I -S` (standard library only: it costs 10 ms and a few
MB) and imports `kill_descendants` from it. vLLM forks an engine core and workers that a SIGKILL of
the agent would leave behind. This process is their subreaper, so every orphan becomes its child,
and the kernel signals it when the agent has ended.

Signals: SIGTERM ends the engine gently (SIGTERM, --grace seconds, SIGKILL of the whole tree);
SIGHUP, which the kernel also sends when the agent dies, kills the tree at once. Exit status: the
engine's, or 128 + signal number when a signal ended it.
"""

import argparse
import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_REAP_SECONDS = 10.0
_NICENESS = 5


def main(argv: Sequence[str]) -> int:
    """Run a command until it ends or the agent does, then end all of its descendants."""
    options, command = _parse(argv)
    become_subreaper()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _call_prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    try:
        if os.getppid() != options.agent:
            return 128 + signal.SIGHUP
        if options.cores:
            os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
            _lower_priority()
        return _supervise(_start(command), options.grace)
    finally:
        kill_descendants(_REAP_SECONDS)
        _remove(options.scratch)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process."""
    _call_prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants(seconds: float) -> bool:
    """Kill and reap every descendant of this process; return False when some remain in time. A
    subreaper inherits the children of a killed process, so killing level by level reaches all."""
    deadline = time.monotonic() + seconds
    while _reap()[1]:
        for child in _list_children():
            _kill(child, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def _lower_priority() -> None:
    """Let the agent, which shares these cores, run before the engine.

    Engines on CPU keep several threads busy; without this an agent waited three seconds for its
    core, after which a router considers it dead. Where the kernel groups processes by session,
    niceness counts within a group only, and each group has its own niceness.
    """
    os.nice(_NICENESS)
    try:
        with open("/proc/self/autogroup", "w") as file:
            file.write(str(_NICENESS))
    except OSError:
        return


def _supervise(engine: int, grace: float) -> int:
    deadline = None
    while True:
        number = _wait_signal(None if deadline is None else deadline - time.monotonic())
        status = _reap_engine(engine)
        if status is not None:
            return status
        if number in (signal.SIGTERM, signal.SIGINT) and deadline is None:
            _kill(engine, signal.SIGTERM)
            deadline = time.monotonic() + grace
        elif number == signal.SIGHUP or number is None:
            return 128 + signal.SIGKILL


def _wait_signal(seconds: float | None) -> int | None:
    if seconds is None:
        return signal.sigwaitinfo(_SIGNALS).si_signo
    info = signal.sigtimedwait(_SIGNALS, max(0.0, seconds))
    return info.si_signo if info else None


def _reap_engine(engine: int) -> int | None:
    """Reap ended processes; return the engine's exit status once it has ended."""
    status = _reap()[0].get(engine)
    if status is None:
        return None
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _start(command: Sequence[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        # If this process itself is killed, the engine's first process is killed, too.
        _call_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvp(command[0], list(command))  # noqa: S606
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _reap() -> tuple[dict[int, int], bool]:
    """Reap ended children; return their statuses by pid, and whether others still run."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if not pid:
            return ended, True
        ended[pid] = status


def _list_children() -> list[int]:
    own = os.getpid()
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [pid for pid in pids if _get_parent(pid) == own]


def _get_parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name may contain blanks and brackets, so count from the last bracket.
            return int(file.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _remove(folder: str) -> None:
    if not folder:
        return
    try:
        for entry in os.scandir(folder):
            os.unlink(entry.path)
        os.rmdir(folder)
    except FileNotFoundError:
        return


def _call_prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="cleave-subreaper")
    parser.add_argument("--agent", type=int, required=True, help="pid of the parent")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds")
    parser.add_argument("--cores", default="", help="of the engine: 0,2")
    parser.add_argument("--scratch", default="", help="folder of files to remove at the end")
    separator = list(argv).index("--")
    return parser.parse_args(argv[:separator]), list(argv[separator + 1 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
