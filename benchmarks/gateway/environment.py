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
import sysconfig
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from other_routers import build_sglang_command, install_sglang_router
from processes import (
    BUILD,
    HERE,
    ROOT,
    Subject,
    build_gateway,
    log_name,
    started,
    wait_healthy,
)

HOST = f"127.77.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
ENGINES = {"mixed": f"{HOST}:7001", "prefill": f"{HOST}:7002", "decode": f"{HOST}:7003"}
AGENTS = {"mixed": f"{HOST}:7011", "prefill": f"{HOST}:7012", "decode": f"{HOST}:7013"}
MORE_AGENTS = 7040
"""Their ports, where the mixed engine is known as several instances."""
PROXIES = {
    "relay": f"{HOST}:7021",
    "relay P/D": f"{HOST}:7022",
    "haproxy": f"{HOST}:7023",
    "cleave": f"{HOST}:7024",
    "cleave P/D": f"{HOST}:7025",
    "cleave bare": f"{HOST}:7026",
    "cleave bare P/D": f"{HOST}:7027",
    "sglang-router": f"{HOST}:7028",
    "sglang-router P/D": f"{HOST}:7029",
    "cleave interpreted": f"{HOST}:7033",
    "cleave interpreted P/D": f"{HOST}:7034",
}
SGLANG_METRICS = {"sglang-router": 7031, "sglang-router P/D": 7032}
QUICK_ACK = ", quick-ack"
SGLANG_NAMES = [f"{name}{way}" for name in SGLANG_METRICS for way in ("", QUICK_ACK)]
KEY = "a-key-of-the-benchmark"
TENANTS = f"""tenants:
- name: bench
  keys: [{KEY}]
  requestsPerMinute: 1000000000
  tokensPerMinute: 1000000000
  maxConcurrent: 1000000
"""
EVERYTHING = ("--ttft-ms", "200", "--tpot-ms", "50")
"""Beside what is always on: metrics, recovery, hand-off checks."""
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

    @property
    def are_enough(self) -> bool:
        """Whether each has one for itself."""
        return len({self.proxy, self.engine, self.load, self.rest}) == 4


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
def stage(
    cores: Cores,
    step_us: int,
    processes: int = 1,
    only: Collection[str] | None = None,
    python: str = sys.executable,
    *,
    awake: bool = False,
) -> Iterator[list[Subject]]:
    """Start everything; yields what can be measured, floors before what is compared with them.

    `only`: the proxies to run beside the floors; None: all. `python`: what runs ours.
    `awake`: clients and engines look on while there is something to come, instead of sleeping.
    """
    with ExitStack() as stack:
        subjects = Stage(stack, cores, processes, only, python, awake=awake).build(step_us)
        yield [replace(subject, awake=awake) for subject in subjects]


class Stage:
    """Starts the processes of one benchmark."""

    def __init__(
        self,
        stack: ExitStack,
        cores: Cores,
        processes: int = 1,
        only: Collection[str] | None = None,
        python: str = sys.executable,
        *,
        awake: bool = False,
        instances: int = 1,
    ) -> None:
        """`processes`: of each gateway, on as many cores; `python`: another one of this version;
        `awake`: engines are; `instances`: as how many the mixed engine is known."""
        self._stack = stack
        self._cores = cores
        self._processes = processes
        self._only = only
        self._python = python
        self._awake = awake
        self._mixed = [
            AGENTS["mixed"],
            *(f"{HOST}:{MORE_AGENTS + at}" for at in range(1, instances)),
        ]

    def build(self, step_us: int) -> list[Subject]:
        engine = self.start_engines(step_us)
        subjects = [Subject("direct", ENGINES["mixed"], engine.pid)]
        subjects.append(self._start_relay("relay", "mixed"))
        subjects.append(self._start_relay("relay P/D", "decode", "--prefill", ENGINES["prefill"]))
        if self._wants("haproxy") and (haproxy := find_haproxy()):
            subjects.append(self._start_haproxy(haproxy))
        if any(map(self._wants, SGLANG_NAMES)) and (python := install_sglang_router()):
            subjects += self._start_sglang_routers(python)
        ours = [name for name in PROXIES if name.startswith("cleave") and self._wants(name)]
        return subjects + [self.start_gateway(name) for name in ours]

    def _wants(self, name: str) -> bool:
        return self._only is None or name in self._only

    def start_engines(self, step_us: int) -> subprocess.Popen[bytes]:
        """All three and their agents; the mixed one."""
        for role, address in ENGINES.items():
            command = [str(BUILD / "engine"), "--listen", address, "--role", role]
            command += ["--boot-id", f"boot-{role}", "--peer", "boot-prefill"]
            command += ["--awake", str(int(self._awake))]
            core = self._cores.rest if role == "prefill" else self._cores.engine
            process = self._start(f"engine {role}", [*command, "--step-us", str(step_us)], core)
            if role == "mixed":
                mixed = process
        instances = [
            f"{role},boot-{role}{at or ''},{ENGINES[role]},{agent}"
            for role in ENGINES
            for at, agent in enumerate(self._mixed if role == "mixed" else [AGENTS[role]])
        ]
        agents = [sys.executable, str(HERE / "mock_agents.py"), *instances]
        self._start("agents", agents, self._cores.rest)
        return mixed

    def start_gateway(self, name: str) -> Subject:
        """One of cleave's; what is not bare has everything on, and is compiled unless it says."""
        host, port = PROXIES[name].split(":")
        split, bare = name.endswith("P/D"), "bare" in name
        agents = f"{AGENTS['prefill']},{AGENTS['decode']}" if split else ",".join(self._mixed)
        command = [self._python, "-m", "cleave.gateway.main", "--host", host, "--port", port]
        command += ["--agents", agents, "--max-clients", "20000"]
        if not bare:
            command += [*EVERYTHING, "--api-keys", str(self._write_keys())]
        if self._processes > 1:
            command += ["--processes", str(self._processes)]
        cores = range(self._cores.proxy, self._cores.proxy + self._processes)
        ours = ROOT / "operator" if "interpreted" in name else build_gateway()
        others = Path(sysconfig.get_path("platlib"))
        process = self._start(name, command, *cores, sources=(ours, others))
        wait_healthy(log_name(name), process, f"http://{PROXIES[name]}/health")
        floor, key = "relay P/D" if split else "relay", "" if bare else KEY
        return Subject(
            name, PROXIES[name], process.pid, floor, strips_hand_off=True, key=key, follows=True
        )

    def _start(
        self, name: str, command: Sequence[str], *cores: int, sources: Sequence[Path] = ()
    ) -> subprocess.Popen[bytes]:
        """`sources`: where packages are taken from; none: as they are installed."""
        return self._stack.enter_context(started(log_name(name), command, cores, sources))

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

    def _start_sglang_routers(self, python: Path) -> Iterator[Subject]:
        """Each with usual clients, and with those that acknowledge at once."""
        engines = {role: f"http://{address}" for role, address in ENGINES.items()}
        pair = ["--prefill", engines["prefill"], "9000", "--decode", engines["decode"]]
        ways = {
            "sglang-router": ["--worker-urls", engines["mixed"]],
            "sglang-router P/D": ["--pd-disaggregation", *pair],
        }
        for name, way in ways.items():
            if not self._wants(name) and not self._wants(name + QUICK_ACK):
                continue
            address = PROXIES[name]
            command = build_sglang_command(python, address, SGLANG_METRICS[name])
            process = self._start(name, [*command, *way], self._cores.proxy)
            wait_healthy(log_name(name), process, f"http://{address}/readiness")
            floor = "relay P/D" if name.endswith("P/D") else "relay"
            usual = Subject(name, address, process.pid, floor)
            for each in (usual, replace(usual, name=name + QUICK_ACK, quick_ack=True)):
                if self._wants(each.name):
                    yield each

    def _write_keys(self) -> Path:
        keys = BUILD / f"keys-{os.getpid()}.yaml"
        if not keys.exists():
            keys.write_text(TENANTS)
            self._stack.callback(keys.unlink)
        return keys


def find_haproxy() -> str | None:
    return shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
