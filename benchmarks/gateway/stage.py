"""What stands on the stage: mock engines, fake agents, and the proxies that are compared.

Called by run.py. The proxies share one core and are loaded one at a time; engines, load generator
and agents get the other cores. Every benchmark has its own loopback address, so ports are fixed
and two benchmarks side by side disturb only each other's figures.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from processes import BUILD, HERE, started, wait_healthy

HOST = f"127.77.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
ENGINES = {"mixed": f"{HOST}:7001", "prefill": f"{HOST}:7002", "decode": f"{HOST}:7003"}
AGENTS = {"mixed": f"{HOST}:7011", "prefill": f"{HOST}:7012", "decode": f"{HOST}:7013"}
PROXIES = {
    "relay": f"{HOST}:7021",
    "relay P/D": f"{HOST}:7022",
    "haproxy": f"{HOST}:7023",
    "cleave": f"{HOST}:7024",
    "cleave P/D": f"{HOST}:7025",
}
LOOK_S = 1.0
HAPROXY = """
global
  nbthread 1
  maxconn 2048
defaults
  mode http
  maxconn 1024
  option http-no-delay
  http-reuse always
  timeout connect 5s
  timeout client 30s
  timeout server 30s
listen bench
  bind {address}
  server engine {engine} maxconn 1024
"""


@dataclass(frozen=True, slots=True)
class Cores:
    """Which core runs what; equal numbers mean that they share it."""

    proxy: int
    engine: int
    load: int
    rest: int
    """The prefill engine and the agents."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One thing that load.c can talk to."""

    name: str
    target: str
    pid: int
    floor: str | None = None
    """The C relay in the same mode, that its costs are compared with."""
    strips_hand_off: bool = False


def choose_cores(available: Sequence[int]) -> Cores:
    """One core each for as many as there are; the proxy's own comes first."""
    first, second, third, fourth = (available[min(i, len(available) - 1)] for i in range(4))
    return Cores(proxy=first, engine=second, load=third, rest=fourth)


def list_cores() -> list[int]:
    """The cores this process may use, the least busy ones first."""
    before = read_idle_ticks()
    time.sleep(LOOK_S)
    after = read_idle_ticks()
    return sorted(os.sched_getaffinity(0), key=lambda core: before[core] - after[core])


def read_idle_ticks() -> dict[int, int]:
    lines = Path("/proc/stat").read_text().splitlines()
    rows = [line.split() for line in lines if re.match(r"cpu\d", line)]
    return {int(row[0].removeprefix("cpu")): int(row[4]) for row in rows}


def describe_cores(cores: Cores) -> str:
    """One sentence, with what is shared."""
    text = (
        f"proxy on core {cores.proxy}, engine {cores.engine}, load {cores.load}, rest {cores.rest}"
    )
    if cores.proxy == cores.engine:
        return f"{text}: all share one core, rates and latencies mean nothing"
    if cores.engine == cores.load:
        return f"{text}: engine and load share a core, rates are theirs where they are slower"
    return text


@contextmanager
def stage(cores: Cores, step_us: int) -> Iterator[list[Subject]]:
    """Start everything; yields what can be measured, floors before what is compared with them."""
    with ExitStack() as stack:
        yield Stage(stack, cores).build(step_us)


class Stage:
    """Starts the processes of one benchmark."""

    def __init__(self, stack: ExitStack, cores: Cores) -> None:
        self._stack = stack
        self._cores = cores

    def build(self, step_us: int) -> list[Subject]:
        engine = self._start_engines(step_us)
        subjects = [Subject("direct", ENGINES["mixed"], engine.pid)]
        subjects.append(self._start_relay("relay", "mixed"))
        subjects.append(self._start_relay("relay P/D", "decode", "--prefill", ENGINES["prefill"]))
        if haproxy := find_haproxy():
            subjects.append(self._start_haproxy(haproxy))
        subjects.append(self._start_gateway("cleave", "relay", AGENTS["mixed"]))
        both = f"{AGENTS['prefill']},{AGENTS['decode']}"
        subjects.append(self._start_gateway("cleave P/D", "relay P/D", both))
        return subjects

    def _start(self, name: str, command: Sequence[str], core: int) -> subprocess.Popen[bytes]:
        return self._stack.enter_context(started(log_name(name), command, core))

    def _start_engines(self, step_us: int) -> subprocess.Popen[bytes]:
        for role, address in ENGINES.items():
            command = [str(BUILD / "engine"), "--listen", address, "--role", role]
            command += ["--boot-id", f"boot-{role}", "--peer", "boot-prefill"]
            core = self._cores.rest if role == "prefill" else self._cores.engine
            process = self._start(f"engine {role}", [*command, "--step-us", str(step_us)], core)
            if role == "mixed":
                mixed = process
        instances = [f"{role},boot-{role},{ENGINES[role]},{AGENTS[role]}" for role in ENGINES]
        agents = [sys.executable, str(HERE / "agents.py"), *instances]
        self._start("agents", agents, self._cores.rest)
        return mixed

    def _start_relay(self, name: str, role: str, *options: str) -> Subject:
        command = [str(BUILD / "relay"), "--listen", PROXIES[name], "--engine", ENGINES[role]]
        process = self._start(name, [*command, *options], self._cores.proxy)
        return Subject(name, PROXIES[name], process.pid)

    def _start_haproxy(self, haproxy: str) -> Subject:
        address = PROXIES["haproxy"]
        config = BUILD / f"haproxy-{os.getpid()}.cfg"
        config.write_text(HAPROXY.format(address=address, engine=ENGINES["mixed"]))
        self._stack.callback(config.unlink)
        process = self._start("haproxy", [haproxy, "-db", "-f", str(config)], self._cores.proxy)
        return Subject("haproxy", address, process.pid, floor="relay")

    def _start_gateway(self, name: str, floor: str, agents: str) -> Subject:
        host, port = PROXIES[name].split(":")
        command = [sys.executable, "-m", "cleave.gateway.main", "--host", host, "--port", port]
        process = self._start(name, [*command, "--agents", agents], self._cores.proxy)
        wait_healthy(log_name(name), process, f"http://{PROXIES[name]}/health")
        return Subject(name, PROXIES[name], process.pid, floor, strips_hand_off=True)


def log_name(name: str) -> str:
    return name.replace("/", "").replace(" ", "-")


def find_haproxy() -> str | None:
    return shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
