"""The operator as a process: started as its pod starts it, with its metrics and resource use."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from e2e.support.deployments import free_port

START_S = 60
STOP_S = 20
_SAMPLE = re.compile(r"^cleave_operator_(\w+?)_total\{(.*)\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Reading:
    """What the operator has done and used since its start."""

    at_s: float
    cpu_s: float
    events: int
    """Of its watches."""
    reconciles: int
    idle_reconciles: int
    """Of these, those that found nothing to do."""
    writes: int
    queued: int

    def __sub__(self, before: "Reading") -> "Reading":
        return Reading(
            at_s=self.at_s - before.at_s,
            cpu_s=self.cpu_s - before.cpu_s,
            events=self.events - before.events,
            reconciles=self.reconciles - before.reconciles,
            idle_reconciles=self.idle_reconciles - before.idle_reconciles,
            writes=self.writes - before.writes,
            queued=self.queued,
        )


class Operator:
    """One operator process; a context manager."""

    def __init__(self, kubeconfig: Path, log: Path) -> None:
        self._kubeconfig = kubeconfig
        self._log = log
        self._port = free_port()

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "cleave.controller.main"),
                    *("--host", "127.0.0.1", "--port", str(self._port)),
                ],
                env=os.environ | {"KUBECONFIG": str(self._kubeconfig)},
                stdout=log,
                stderr=log,
            )
        end = time.monotonic() + START_S
        while not self._leads():
            if self._process.poll() is not None or time.monotonic() > end:
                tail = self._log.read_text(errors="replace")[-2_000:]
                raise RuntimeError(f"the operator does not start:\n{tail}")
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def read(self) -> Reading:
        """What it has done so far."""
        return parse(self._page(), self._cpu_s(), time.monotonic())

    @property
    def peak_mib(self) -> float:
        """The most memory it has had."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) / 1024

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _leads(self) -> bool:
        try:
            return "cleave_operator_leading 1.0" in self._page()
        except (urllib.error.URLError, OSError):
            return False

    def _page(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=10) as page:
            text: str = page.read().decode()
            return text


def parse(metrics: str, cpu_s: float, at_s: float) -> Reading:
    """A reading of the text of /metrics."""
    totals: Counter[str] = Counter()
    idle = 0
    for name, labels, value in _SAMPLE.findall(metrics):
        totals[name] += int(float(value))
        if name == "reconciles" and 'outcome="idle"' in labels:
            idle += int(float(value))
    queued = re.search(r"^cleave_operator_queue_depth (\S+)$", metrics, re.MULTILINE)
    return Reading(
        at_s=at_s,
        cpu_s=cpu_s,
        events=totals["events"],
        reconciles=totals["reconciles"],
        idle_reconciles=idle,
        writes=totals["actions"],
        queued=int(float(queued[1])) if queued else 0,
    )
