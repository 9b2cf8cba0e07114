"""Nothing of an engine outlives its agent, however either ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cleave_worker.agent import subreaper

TREE = """
import os, signal, sys, time
folder = sys.argv[1]
def stay(name, deaf):
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    open(f"{folder}/{name}.tmp", "w").write(str(os.getpid()))
    os.rename(f"{folder}/{name}.tmp", f"{folder}/{name}.pid")
    time.sleep(300)
if not os.fork():
    os.setsid()
    if not os.fork():
        stay("orphan", True)
    os._exit(0)
if not os.fork():
    if not os.fork():
        stay("grandchild", True)
    stay("child", True)
stay("engine", len(sys.argv) > 2)
"""
"""An engine with a child, a grandchild and an orphan in a session of its own; all but perhaps the
engine itself ignore polite signals."""

AGENT = """
import os, subprocess, sys, time
cut = sys.argv.index("--scratch")
subprocess.Popen([*sys.argv[1:cut], "--agent", str(os.getpid()), *sys.argv[cut:]],
                 start_new_session=True)
time.sleep(300)
"""
"""Starts a subreaper as its own and waits to be killed."""

NAMES = ("engine", "child", "grandchild", "orphan")
SUBREAPER = (sys.executable, "-I", "-S", subreaper.__file__)


@pytest.fixture
def pids(tmp_path: Path) -> Callable[[], list[int]]:
    """The pids of a whole tree, once it stands."""

    def read() -> list[int]:
        deadline = time.monotonic() + 30
        files = [tmp_path / f"{name}.pid" for name in NAMES]
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return [int(file.read_text()) for file in files]

    return read


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start a subreaper over a tree, with this process as the agent."""
    started: list[subprocess.Popen] = []

    def run(*options: str, deaf: bool = False, command: tuple[str, ...] = ()) -> subprocess.Popen:
        tree = (sys.executable, "-c", TREE, str(tmp_path), *(["deaf"] if deaf else []))
        process = subprocess.Popen(
            [*SUBREAPER, "--agent", str(os.getpid()), *options, "--", *(command or tree)],
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.send_signal(signal.SIGHUP)
        process.wait(30)


def test_killing_the_agent_ends_the_whole_tree(
    tmp_path: Path, pids: Callable[[], list[int]], all_gone: Callable[..., None]
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "load").touch()
    tree_command = (sys.executable, "-c", TREE, str(tmp_path))
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, *SUBREAPER, "--scratch", str(scratch), "--", *tree_command]
    )
    tree = pids()
    agent.kill()
    agent.wait(10)
    all_gone(tree)
    deadline = time.monotonic() + 10
    while scratch.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not scratch.exists()


def test_a_polite_end_takes_the_descendants_along(
    start: Callable[..., subprocess.Popen],
    pids: Callable[[], list[int]],
    all_gone: Callable[..., None],
) -> None:
    process = start("--grace", "30")
    tree = pids()
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    all_gone(tree, seconds=0)


def test_an_engine_that_ignores_the_polite_end_is_killed_after_the_grace(
    start: Callable[..., subprocess.Popen],
    pids: Callable[[], list[int]],
    all_gone: Callable[..., None],
) -> None:
    process = start("--grace", "0.2", deaf=True)
    tree = pids()
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGKILL
    all_gone(tree, seconds=0)


def test_an_engine_that_ends_by_itself_leaves_no_process_behind(
    start: Callable[..., subprocess.Popen],
    pids: Callable[[], list[int]],
    all_gone: Callable[..., None],
) -> None:
    process = start()
    tree = pids()
    os.kill(tree[0], signal.SIGKILL)
    assert process.wait(30) == 128 + signal.SIGKILL
    all_gone(tree, seconds=0)


def test_the_engines_exit_status_is_passed_on(start: Callable[..., subprocess.Popen]) -> None:
    assert start(command=(sys.executable, "-c", "raise SystemExit(7)")).wait(30) == 7
    assert start(command=("/nowhere/engine",)).wait(30) == 127


def test_a_subreaper_whose_agent_is_gone_already_starts_nothing(tmp_path: Path) -> None:
    created = tmp_path / "made"
    process = subprocess.run(
        [*SUBREAPER, "--agent", "1", "--", "touch", str(created)], timeout=30, check=False
    )
    assert process.returncode == 128 + signal.SIGHUP
    assert not created.exists()


def test_the_engine_runs_on_its_cores_with_ordinary_signals(
    start: Callable[..., subprocess.Popen], tmp_path: Path
) -> None:
    core = min(os.sched_getaffinity(0))
    code = (
        "import os, signal, sys; open(sys.argv[1], 'w').write(repr(("
        "os.sched_getaffinity(0), signal.pthread_sigmask(signal.SIG_BLOCK, ()))))"
    )
    signalled = tmp_path / "told"
    command = (sys.executable, "-c", code, str(signalled))
    assert start("--cores", str(core), command=command).wait(30) == 0
    assert signalled.read_text() == repr(({core}, set()))
