"""Several gateways in front of one fleet, each a process that may be killed and comes back."""

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import psutil

from cleave.rpc.fleet_status import FleetStatus

from e2e.support.deployments import MARK, Deployment, until
from tests.support.ports import find_free_port

START_S = 60
ASK_S = 5
PAGE_S = 30
"""For pages of gateways: a busy machine may let any process wait for seconds."""
CLIENT = httpx.Client(
    verify=False,
    timeout=ASK_S,
    limits=httpx.Limits(max_keepalive_connections=0),
    trust_env=False,
)
"""For all that a run asks of gateways and engines, from any thread."""
MAX_BODY = 1 << 20
MAX_BUFFERED = 4 << 20
"""Small, so that few clients fill it."""
REPLACED_S = 3.0
"""Until the connections of a dead process have all been noticed by their clients."""
RELEASED_S = 1.0
"""Until a gateway has noticed that connections are closed."""
_SAMPLE = re.compile(r"^cleave_gateway_(\w+?)(?:_total)?(?:\{(.*)\})? ([0-9.e+-]+)$", re.M)
_COUNTED = ("requests", "retries", "recoveries", "handoffs", "dispatches")

Counts = dict[str, float]
"""Series of the gateways' own counters -> value."""


@dataclass
class Gateway:
    """One gateway over all of its lives."""

    name: str
    deployment: Deployment
    folder: Path
    keys: tuple[str, ...] = ()
    """Its clients', where it asks for keys."""
    processes: int = 1
    env: dict[str, str] = field(default_factory=dict)
    """Variables of its processes, besides those of the deployment."""
    options: tuple[str, ...] = ()
    """More of its command line."""
    port: int = field(default_factory=find_free_port)
    internal_port: int = field(default_factory=find_free_port)
    process: subprocess.Popen[bytes] | None = None
    downs: list[list[float]] = field(default_factory=list)
    """When it was killed and when it served again, in seconds of the monotonic clock."""
    fills: list[list[float]] = field(default_factory=list)
    """When clients began and ceased to take its memory for bodies."""
    holds: int = 0
    """Faults that keep it from answering in time."""
    counted: Counts = field(default_factory=dict)
    """By its earlier lives."""
    counting: Counts = field(default_factory=dict)
    """By this one, at the last scrape."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether it serves, as a balancer before it would see."""
        return self.process is not None and (not self.downs or self.downs[-1][1] < float("inf"))

    def start(self) -> None:
        """Start it and wait until it serves."""
        (agents,) = self.deployment.state_dir.rglob("agents")
        command = [sys.executable, "-m", "cleave.gateway.main", "--agents", f"file:{agents}"]
        command += ["--port", str(self.port), "--internal-port", str(self.internal_port)]
        command += ["--processes", str(self.processes)]
        command += ["--max-body", str(MAX_BODY), *self.options]
        if not self.env:  # with sources of the version before, which has no such flag
            command += ["--max-buffered", str(MAX_BUFFERED)]
        if self.keys:
            command += ["--api-keys", str(self._write_keys())]
        env = self.deployment.agent_env | {MARK: str(self.deployment.state_dir)} | self.env
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env=os.environ | env,
                stdout=log,
                stderr=log,
            )
        until(self._serves, START_S, f"gateway {self.name} serves")
        if self.downs:
            self.downs[-1][1] = time.monotonic()

    def kill(self) -> None:
        """As the machine's memory killer would."""
        assert self.process is not None
        self.counted, self.counting = add(self.counted, self.counting), {}
        self.downs.append([time.monotonic(), float("inf")])
        self.process.kill()
        self.process.wait()

    def kill_process(self, rng: random.Random) -> None:
        """One of several; the others go on, and its parent replaces it."""
        span = [time.monotonic(), float("inf")]
        self.downs.append(span)
        try:
            children = self.list_processes()[1:]
            if children:
                rng.choice(children).kill()
        finally:
            # On a busy machine the kill comes seconds after the beginning.
            span[1] = time.monotonic() + REPLACED_S

    def was_down(self, began_s: float, ended_s: float) -> bool:
        """At any time in between."""
        return _overlap(self.downs, began_s, ended_s)

    def was_full(self, began_s: float, ended_s: float) -> bool:
        """Whether others took its memory for bodies at any time in between."""
        return _overlap(self.fills, began_s, ended_s)

    @property
    def reachable(self) -> bool:
        """Whether the run itself may ask it something."""
        return self.alive and not self.holds

    @contextmanager
    def held(self) -> Iterator[None]:
        """It does not answer in time while this is open."""
        self.holds += 1
        try:
            yield
        finally:
            self.holds -= 1

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Clients take its memory for bodies while this is open."""
        span = [time.monotonic(), float("inf")]
        self.fills.append(span)
        try:
            yield
        finally:
            span[1] = time.monotonic() + RELEASED_S

    def count(self) -> Counts:
        """What all its lives have counted."""
        if self.alive:
            url = f"http://127.0.0.1:{self.internal_port}/metrics"
            text = CLIENT.get(url, timeout=PAGE_S).text
            self.counting = {
                f"{name}{{{labels}}}" if labels else name: float(value)
                for name, labels, value in _SAMPLE.findall(text)
                if name in _COUNTED or name == "requests_in_flight"
            }
        return add(self.counted, self.counting)

    @property
    def in_flight(self) -> float:
        """Requests, at the last scrape."""
        return self.counting.get("requests_in_flight", 0)

    def fleet(self) -> FleetStatus:
        url = f"http://127.0.0.1:{self.internal_port}/fleet"
        raw = CLIENT.get(url, timeout=PAGE_S).content
        return msgspec.json.decode(raw, type=FleetStatus)

    def num_files(self) -> int:
        """Of the process that has most."""
        return max(process.num_fds() for process in self.list_processes())

    def resident_mb(self) -> float:
        """Of the process that has most."""
        return max(process.memory_info().rss for process in self.list_processes()) / 2**20

    def read_complaints(self) -> str:
        """The end of its log, without what is not worth a look."""
        lines = (self.folder / f"{self.name}.log").read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if " INFO " not in line][-40:])

    def list_processes(self) -> list[psutil.Process]:
        """The one that was started, and its children."""
        assert self.process is not None
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children()]

    def _serves(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"gateway {self.name} ended"
        try:
            return CLIENT.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def _write_keys(self) -> Path:
        file = self.folder / f"{self.name}-keys.yaml"
        if file.exists():
            return file
        lines = ["tenants:"]
        for number, key in enumerate(self.keys):
            lines += [f"- name: tenant-{number}", f"  keys: [{key}]", f"  weight: {number + 1}"]
        file.write_text("\n".join(lines))
        return file


def _overlap(spans: list[list[float]], began_s: float, ended_s: float) -> bool:
    return any(began_s <= end and begin <= ended_s for begin, end in spans)


def add(one: Counts, other: Counts) -> Counts:
    return {key: one.get(key, 0) + other.get(key, 0) for key in one.keys() | other.keys()}
