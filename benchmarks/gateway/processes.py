"""Processes of the benchmark: compiled, pinned to a core, watched, measured, stopped.

Called by stage.py and run.py. What is hard: CPU time has to be exact over windows of a second,
where /proc counts in ticks of 10 ms. The total therefore comes from the process's own CPU clock,
which any process may read; /proc only says how it splits into user and system.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from figures import Run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "bench"
COMPILE_S = 300.0
STARTUP_S = 30.0
CATCH_UP_S = 1.0
"""To hear what agents have said meanwhile, or to find those again that it has lost."""
STOP_S = 10.0
RUN_SLACK_S = 30.0


class BenchError(Exception):
    """The benchmark cannot go on: a tool is missing, a process failed, an answer was wrong."""


@dataclass(frozen=True, slots=True)
class Load:
    """What load.c is to do. `tokens` is the mean length of an answer."""

    tokens: int
    connections: int
    seconds: float
    stream: bool = True


@dataclass(frozen=True, slots=True)
class Subject:
    """One thing that load.c can talk to."""

    name: str
    target: str
    pid: int
    """Its children count as well."""
    floor: str | None = None
    """The C relay in the same mode, that its costs are compared with."""
    strips_hand_off: bool = False
    key: str = ""
    """What clients have to send; empty: none."""
    quick_ack: bool = False
    """Whether clients acknowledge each segment at once: without it, what does not set TCP_NODELAY
    waits for acknowledgements that come 40 ms late."""
    follows: bool = False
    """Whether it follows agents, which takes a hundredth of a core even when idle."""
    awake: bool = False
    """Whether clients look for answers all the time; asleep, the proxy is charged for waking them,
    which no other machine would be."""


@dataclass(frozen=True, slots=True)
class CpuTime:
    """What a process has spent since it started, all its threads together."""

    spent_us: float
    user_ticks: int
    system_ticks: int


def build_tools() -> None:
    """Compile the C tools that are older than their sources."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise BenchError("no C compiler (cc) on PATH")
    BUILD.mkdir(parents=True, exist_ok=True)
    for source in sorted(HERE.glob("*.c")):
        target = BUILD / source.stem
        newest = max(source.stat().st_mtime, (HERE / "net.h").stat().st_mtime)
        if not target.exists() or target.stat().st_mtime < newest:
            new = target.with_suffix(f".{os.getpid()}")  # others may run or build it meanwhile
            command = [compiler, "-O2", "-std=gnu17", "-o", str(new), str(source), "-lm"]
            subprocess.run(command, check=True, timeout=120)
            new.replace(target)


def build_gateway() -> Path:
    """A folder with the gateway as images carry it, compiled anew when its sources changed."""
    folder, packages = BUILD / "compiled", ROOT / "operator"
    newest = max(path.stat().st_mtime for path in (packages / "cleave").rglob("*.py"))
    if folder.exists() and folder.stat().st_mtime >= newest:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(packages, folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, str(ROOT / "scripts" / "compile.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S)
    if done.returncode:
        shutil.rmtree(folder)
        raise BenchError(f"the gateway cannot be compiled:\n{done.stderr[-2000:]}")
    os.utime(folder)
    return folder


@contextmanager
def started(
    name: str, command: Sequence[str], cores: Collection[int], sources: Sequence[Path] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """A process on its cores, its output in build/bench/NAME.log; terminated at the end.

    `sources`: folders where Python looks for packages first.
    """
    with (BUILD / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"PYTHONPATH": ":".join(map(str, sources))},
            preexec_fn=partial(settle, cores),
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def log_name(name: str) -> str:
    return name.replace("/", "").replace(" ", "-")


def settle(cores: Collection[int]) -> None:
    """Keep to these cores, and open as many files as the system allows."""
    os.sched_setaffinity(0, cores)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def wait_healthy(name: str, process: subprocess.Popen[bytes] | None, url: str) -> None:
    """Until `url` answers 200; BenchError with the end of the log when it does not in time.

    `process`: whose end is no use waiting for.
    """
    deadline = time.monotonic() + STARTUP_S
    answer = "no answer"
    while time.monotonic() < deadline and (process is None or process.poll() is None):
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except urllib.error.HTTPError as error:
            answer = error.read(400).decode(errors="replace")
        except OSError as error:
            answer = str(error)
        time.sleep(0.05)
    log = (BUILD / f"{name}.log").read_text(errors="replace")[-2000:]
    raise BenchError(f"{name} is not healthy: {answer}\n{log}")


@contextmanager
def undisturbed(subject: Subject, subjects: Collection[Subject]) -> Iterator[None]:
    """All others that would work meanwhile stand still; itself it has stood still before.

    Raises BenchError when it does not hear of its agents again in time.
    """
    others = [each.pid for each in subjects if each.follows and each.pid != subject.pid]
    resting = [pid for other in others for pid in list_family(other)]
    for pid in resting:
        os.kill(pid, signal.SIGSTOP)
    try:
        if subject.follows:
            time.sleep(CATCH_UP_S)
            wait_healthy(log_name(subject.name), None, f"http://{subject.target}/health")
        yield
    finally:
        for pid in resting:
            os.kill(pid, signal.SIGCONT)


def read_cpu(pid: int) -> CpuTime:
    """Of a process and its children."""
    spent_us, user_ticks, system_ticks = 0.0, 0, 0
    for each in list_family(pid):
        clock = (~each << 3) | 2  # CPUCLOCK_SCHED of a process, as clock_getcpuclockid(3) forms it
        spent_us += time.clock_gettime(clock) * 1e6
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        user_ticks += int(fields[11])
        system_ticks += int(fields[12])
    return CpuTime(spent_us, user_ticks, system_ticks)


def read_resident_kib(pid: int) -> float:
    """Memory of a process and its children, what they share divided among them."""
    text = "".join(Path(f"/proc/{each}/smaps_rollup").read_text() for each in list_family(pid))
    return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))


def list_family(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = " ".join((task / "children").read_text() for task in tasks)
    return [pid, *map(int, children.split())]


def run_load(subject: Subject, load: Load, core: int) -> Run:
    """Load a subject and measure its processes meanwhile; BenchError on any wrong answer."""
    options = {
        "--target": subject.target,
        "--connections": load.connections,
        "--seconds": load.seconds,
        "--tokens": load.tokens,
        "--stream": int(load.stream),
        "--allow-hand-off": int(not subject.strips_hand_off),
        "--key": subject.key,
        "--quick-ack": int(subject.quick_ack),
        "--awake": int(subject.awake),
    }
    command = [str(BUILD / "load"), *(str(part) for pair in options.items() for part in pair)]
    before = read_cpu(subject.pid)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=load.seconds + RUN_SLACK_S,
            preexec_fn=partial(settle, (core,)),
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"the load on {subject.name} did not end in time") from error
    if done.returncode:
        raise BenchError(f"the load on {subject.name} failed: {done.stderr.strip()}")
    after = read_cpu(subject.pid)
    result = json.loads(done.stdout)
    return Run(
        requests=result["requests"],
        tokens=result["tokens"],
        seconds=result["seconds"],
        ttft_p50_us=result["ttft_p50_us"],
        ttft_p99_us=result["ttft_p99_us"],
        cpu_us=after.spent_us - before.spent_us,
        user_ticks=after.user_ticks - before.user_ticks,
        system_ticks=after.system_ticks - before.system_ticks,
    )


def measure_idle(pid: int, seconds: float) -> float:
    """Share of a core that a process uses without any request, 0..1."""
    before = read_cpu(pid)
    time.sleep(seconds)
    return (read_cpu(pid).spent_us - before.spent_us) / (seconds * 1e6)
