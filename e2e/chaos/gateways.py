"""Several gateways in front of one fleet, each a process that may be killed and comes back."""

import os
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import psutil

from cleave.rpc.fleet_status import FleetStatus

from e2e.support.deployments import MARK, Deployment, free_port, until

START_S = 20
ASK_S = 5
REPLACED_S = 1.0
"""Until the connections of a dead process have all been noticed by their clients."""
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
    port: int = field(default_factory=free_port)
    internal_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    downs: list[list[float]] = field(default_factory=list)
    """When it was killed and when it served again, in seconds of the monotonic clock."""
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
        now = time.monotonic()
        self.downs.append([now, now + REPLACED_S])
        children = self._processes()[1:]
        if children:
            rng.choice(children).kill()

    def was_down(self, began_s: float, ended_s: float) -> bool:
        """At any time in between."""
        return any(began_s <= up and down <= ended_s for down, up in self.downs)

    def count(self) -> Counts:
        """What all its lives have counted."""
        if self.alive:
            text = httpx.get(f"http://127.0.0.1:{self.internal_port}/metrics", timeout=ASK_S).text
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
        raw = httpx.get(f"http://127.0.0.1:{self.internal_port}/fleet", timeout=ASK_S).content
        return msgspec.json.decode(raw, type=FleetStatus)

    def num_files(self) -> int:
        """Of the process that has most."""
        return max(process.num_fds() for process in self._processes())

    def resident_mb(self) -> float:
        """Of the process that has most."""
        return max(process.memory_info().rss for process in self._processes()) / 2**20

    def read_complaints(self) -> str:
        """The end of its log, without what is not worth a look."""
        lines = (self.folder / f"{self.name}.log").read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if " INFO " not in line][-40:])

    def _processes(self) -> list[psutil.Process]:
        """The one that was started, and its children."""
        assert self.process is not None
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children()]

    def _serves(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"gateway {self.name} ended"
        try:
            return httpx.get(f"{self.url}/health", timeout=ASK_S).status_code == 200
        except httpx.TransportError:
            return False

    def _write_keys(self) -> Path:
        file = self.folder / f"{self.name}-keys.yaml"
        lines = ["tenants:"]
        for number, key in enumerate(self.keys):
            lines += [f"- name: tenant-{number}", f"  keys: [{key}]", f"  weight: {number + 1}"]
        file.write_text("\n".join(lines))
        return file


def add(one: Counts, other: Counts) -> Counts:
    return {key: one.get(key, 0) + other.get(key, 0) for key in one.keys() | other.keys()}
