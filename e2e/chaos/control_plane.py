"""Faults of a cluster's control plane and of the operators, while deployments change under load.

What is hard: nothing that an API server without etcd is asked returns, so a change is made first,
and the fault comes while it is carried out. No fault here touches gateways or workers, so clients
may notice nothing at all; and an operator that was away may not do anything twice.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import psutil

from e2e.chaos.beat import Beat
from e2e.chaos.gateway_faults import starved
from e2e.chaos.worker_faults import stopped
from e2e.cluster.closed_loop_load import Load
from e2e.cluster.cluster import CommandError, wait_until
from e2e.cluster.control_plane import ControlPlane
from e2e.test_cluster_operator import SYSTEM, Chat, holder, placement, read_log

LONGEST_S = {
    "freeze etcd": 8.0,
    "freeze API server": 8.0,
    "slow API server": 8.0,
    "freeze controllers": 8.0,
    "kill API server": 6.0,
    "freeze leader": 25.0,
    "freeze standby": 8.0,
    "kill leader": 1.0,
}
"""By kind. A frozen leader loses its Lease, of 15 s, now and then."""
CHANGES = ("edit", "scale", "delete worker")
"""No gateway is deleted: while the controllers are away, no Service leaves out a pod that ends."""
PLACEMENTS = ((1, 2), (1, 3), (2, 2))
SURGE = 1
"""Instances of a pool above its replicas while it is rolled out."""
READY_S = 180.0
CHANGED_S = 60.0
"""Until the API server takes a change."""
LOOK_S = 1.0
AFTER_S = 30.0
"""Until clients get answers after all faults."""
ANSWERS = 10


@dataclass(frozen=True)
class ControlPlaneFault:
    """One that is to happen, and the change that it comes in the middle of."""

    kind: str
    seconds: float
    change: str
    after_s: float
    """From the change to the fault."""
    choice: int


def draw(rng: random.Random, count: int) -> list[ControlPlaneFault]:
    """So many faults, each kind as often as the others."""
    faults = []
    for _ in range(count):
        kind = rng.choice(list(LONGEST_S))
        seconds, after_s = rng.uniform(0.5, LONGEST_S[kind]), rng.uniform(0, 3)
        change = rng.choice(CHANGES)
        faults.append(ControlPlaneFault(kind, seconds, change, after_s, rng.randrange(1_000)))
    return faults


@dataclass
class ControlPlaneReport:
    """What a run has seen."""

    seed: int
    seconds: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    changes: dict[str, int] = field(default_factory=dict)
    leaders: int = 0
    """Operators that led, one after another."""
    answered: int = 0
    longest_settle_s: float = 0.0
    """Until the deployment was as its last change demands, after a burst."""
    processor_share: float = 1.0
    violation: str = ""


class WorkerCount:
    """The most instances of each role that were meant to stay, at any time."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.most: Counter[str] = Counter()

    def __enter__(self) -> "WorkerCount":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            # The API server may be away.
            with suppress(CommandError):
                for role in ("prefill", "decode"):
                    self.most[role] = max(self.most[role], len(self._chat.workers(role)))


@dataclass
class ControlPlaneStorm:
    """One run over a deployment that is ready."""

    chat: Chat
    control_plane: ControlPlane
    report: ControlPlaneReport
    report_fault: Callable[[str, int], None]
    replicas: tuple[int, int] = PLACEMENTS[0]
    """Prefill and decode instances, as last applied."""
    beat: Beat = field(default_factory=Beat)
    _edits: int = 0
    _leaders: list[str] = field(default_factory=list)

    def run(self, faults: Sequence[ControlPlaneFault], burst: int, lasting_s: float) -> None:
        """So many faults between two looks; the report says what was wrong, if anything."""
        began = time.monotonic()
        for start in range(0, len(faults), burst):
            if time.monotonic() - began > lasting_s:
                break
            allowed = dict(zip(("prefill", "decode"), self.replicas, strict=True))
            with Load(self.chat.address, "chat", users=2) as load, WorkerCount(self.chat) as seen:
                for number, fault in enumerate(faults[start : start + burst], start):
                    self._change(fault)
                    for role, replicas in zip(allowed, self.replicas, strict=True):
                        allowed[role] = max(allowed[role], replicas)
                    self.report_fault(f"{fault.kind} after {fault.change}", number)
                    time.sleep(fault.after_s)
                    with self._inflicted(fault):
                        time.sleep(fault.seconds)
                    count(self.report.faults, fault.kind)
                self.report.violation = self._settle(load)
            self.report.answered += load.answered
            if load.failures and not self.report.violation:
                self.report.violation = f"{len(load.failures)} failed, first: {load.failures[0]}"
            for role, replicas in allowed.items():
                if seen.most[role] > replicas + SURGE and not self.report.violation:
                    self.report.violation = f"{seen.most[role]} {role} instances, not {replicas}"
            if self.report.violation:
                break
        self.report.seconds = round(time.monotonic() - began, 1)
        self.report.leaders = len(self._leaders)
        self.report.processor_share = round(self.beat.least_share, 2)
        if self.report.violation:
            self.report.violation += "\n" + read_log(self.chat.cluster, self.chat.namespace)

    def _change(self, fault: ControlPlaneFault) -> None:
        """Something for the operator to do. A worker is deleted only while all others serve."""
        change = fault.change
        if change == "delete worker" and self._find_leftovers():
            change = "edit"
        # The webhook of an operator that was just killed may be away.
        wait_until(lambda: self._try_change(change, fault.choice), CHANGED_S, change)
        count(self.report.changes, change)

    def _try_change(self, change: str, choice: int) -> bool:
        """True; raises CommandError when the API server refuses it."""
        chat, namespace = self.chat, self.chat.namespace
        match change:
            case "edit":
                self._edits += 1
                chat.edit({"engine": {"env": [{"name": "EDITED", "value": str(self._edits)}]}})
            case "scale":
                self.replicas = PLACEMENTS[choice % len(PLACEMENTS)]
                prefill, decode = self.replicas
                chat.edit({"placement": {"manual": placement(prefill=prefill, decode=decode)}})
            case _:
                workers = chat.workers()
                victim = workers[choice % len(workers)]["metadata"]["name"]
                chat.cluster.kubectl("delete", "pod", victim, "-n", namespace, "--wait=false")
        return True

    @contextmanager
    def _inflicted(self, fault: ControlPlaneFault) -> Iterator[None]:
        """The fault lasts while this is open."""
        plane = self.control_plane
        match fault.kind:
            case "freeze etcd":
                with stopped([plane.process("etcd")]):
                    yield
            case "freeze API server":
                with stopped([plane.process("kube-apiserver")]):
                    yield
            case "slow API server":
                with starved([plane.process("kube-apiserver")]):
                    yield
            case "freeze controllers":
                parts = ("kube-controller-manager", "kube-scheduler")
                with stopped([plane.process(part) for part in parts]):
                    yield
            case "kill API server":
                plane.kill_api_server()
                try:
                    yield
                finally:
                    plane.start_api_server()
            case "freeze leader" | "freeze standby":
                with ExitStack() as stack:
                    for operator in self._find_operators(leads=fault.kind == "freeze leader"):
                        stack.enter_context(stopped(operator))
                    yield
            case _:
                for operator in self._find_operators(leads=True):
                    for process in operator:
                        with suppress(psutil.NoSuchProcess):
                            process.kill()
                yield

    def _find_operators(self, *, leads: bool) -> list[list[psutil.Process]]:
        """The processes of those that lead, or of all others."""
        leader = holder(self.chat.cluster).partition("_")[0]
        names = [pod["metadata"]["name"] for pod in self.chat.cluster.list("pods", SYSTEM)]
        return [find_pod(name) for name in names if (name == leader) is leads]

    def _settle(self, load: Load) -> str:
        """Wait until all is as the last change demands; what is not, after the longest time."""
        began, end_s = time.monotonic(), self.beat.look() + READY_S
        while left := self._find_leftovers():
            if self.beat.look() > end_s:
                return f"left when all was over: {left}"
            time.sleep(LOOK_S)
        settle_s = time.monotonic() - began
        self.report.longest_settle_s = round(max(self.report.longest_settle_s, settle_s), 1)
        leader = holder(self.chat.cluster)
        if not self._leaders or self._leaders[-1] != leader:
            self._leaders.append(leader)
        before, end_s = load.answered, self.beat.look() + AFTER_S
        while load.answered < before + ANSWERS and not load.failures:
            if self.beat.look() > end_s:
                return f"clients get no answers: {load.answered - before} in {AFTER_S:.0f} s"
            time.sleep(LOOK_S / 10)
        return ""

    def _find_leftovers(self) -> str:
        try:
            if not holder(self.chat.cluster):
                return "no operator leads"
            found = tuple(len(self.chat.workers(role)) for role in ("prefill", "decode"))
            if found != self.replicas:
                return f"{found} prefill and decode instances instead of {self.replicas}"
            return "" if self.chat.is_ready() else "the deployment is not ready"
        except CommandError as error:
            return f"the API server does not answer: {error}"


def count(counts: dict[str, int], what: str) -> None:
    """One more; `dataclasses.asdict` cannot copy a Counter."""
    counts[what] = counts.get(what, 0) + 1


def find_pod(name: str) -> list[psutil.Process]:
    """A pod's processes on nodes that run pods as processes."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("HOSTNAME") == name:
                found.append(process)
    return found
