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

import psutil

from tests.support.ports import find_free_port

NAMESPACE = "cleave-system"
ACCOUNT_NAME = "cleave-operator"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT_NAME}"
START_S = 300
PAGE_TIMEOUT_S = 30
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

    def __init__(self, kubeconfig: Path, log: Path, *, leads: bool = True) -> None:
        """`leads`: whether it leads from the start, or is a standby."""
        self._kubeconfig = kubeconfig
        self._log = log
        self._waits_to_lead = leads
        self._port = find_free_port()
        self.started_s = 0.0
        """From its start until it led, or was ready as a standby."""

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "cleave.controller.main"),
                    *("--host", "127.0.0.1", "--port", str(self._port)),
                    *("--own-namespace", NAMESPACE, "--account", ACCOUNT, "--isolate-workers"),
                ],
                env=os.environ | {"KUBECONFIG": str(self._kubeconfig)},
                stdout=log,
                stderr=log,
            )
        began = time.monotonic()
        while not (self.leads() if self._waits_to_lead else self._is_ready()):
            if self._process.poll() is not None or time.monotonic() > began + START_S:
                tail = self._log.read_text(errors="replace")[-2_000:]
                raise RuntimeError(f"the operator does not start:\n{tail}")
            time.sleep(0.1)
        self.started_s = time.monotonic() - began
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

    def kill(self) -> None:
        """SIGKILL it: its Lease stays as it is."""
        self._peak_mib = self.peak_mib
        self._process.kill()
        self._process.wait()

    def read(self) -> Reading:
        """What it has done so far."""
        return parse(self._page(), self._cpu_s(), time.monotonic())

    @property
    def process(self) -> psutil.Process:
        """For its CPU time and memory."""
        return psutil.Process(self._process.pid)

    @property
    def peak_mib(self) -> float:
        """The most memory it has had."""
        if self._process.returncode is not None:
            return self._peak_mib
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) / 1024

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def leads(self) -> bool:
        """Whether it leads now."""
        try:
            return "cleave_operator_leading 1.0" in self._page()
        except (urllib.error.URLError, OSError):
            return False

    def _is_ready(self) -> bool:
        try:
            return self._page("readyz") == "ok"
        except (urllib.error.URLError, OSError):
            return False

    def _page(self, name: str = "metrics") -> str:
        url = f"http://127.0.0.1:{self._port}/{name}"
        with urllib.request.urlopen(url, timeout=PAGE_TIMEOUT_S) as page:
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
