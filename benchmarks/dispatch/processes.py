"""Queueing delay behind a gateway of several processes that keep their books together.

Called by run.py. This one drives the router itself, one for each process on one
shared table, under a clock of its own; what they choose is what a gateway would. What is hard: a
process reads the scores some microseconds before it has entered its choice, and does not see what a
sibling chooses meanwhile; so of picks that come within BLIND_MS of each other all have read the
scores before the first is entered, and it is up to the router to notice.
"""

import heapq
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
from queueing import WARM_UP, Delay, Load
from registrations import state

from cleave.policy.queue_model import INTERVAL_MS, MAX_INTERVAL_MS, choose_report_interval_ms
from cleave.router.registry import InstanceRegistry
from cleave.router.router import Pick, RequestPhase, SharedRouter
from cleave.router.score_table import ScoreTable
from cleave.router.shared_load import SharedLoad, build_table
from cleave.rpc.v1 import agent_pb2
from cleave.shm.table import SharedTable

BLIND_MS = 0.02
"""More than twice what a pick takes."""


def measure(load: Load, *, instances: int, processes: int, seed: int) -> Delay:
    """Delay of `load` when each request comes to one of the processes at random."""
    table = build_table(processes)
    fleet = _Fleet(table, instances, processes)
    whose = np.random.default_rng(seed + 1).integers(0, processes, len(load.tokens))
    waits = np.zeros(len(load.tokens))
    blind: set[int] = set()
    for number, now in enumerate(load.arrival_ms):
        fleet.advance(now)
        process = int(whose[number])
        later = number + 1
        while later < len(waits) and load.arrival_ms[later] < now + BLIND_MS:
            if whose[later] != process and later not in blind:
                fleet.gather(int(whose[later]))
                blind.add(later)
            later += 1
        is_blind = number in blind
        blind.discard(number)
        tokens, service_ms = int(load.tokens[number]), float(load.service_ms[number])
        waits[number] = fleet.send(process, tokens, service_ms, is_blind)
    table.close()
    counted = waits[int(WARM_UP * len(waits)) :]
    return Delay(float(counted.mean()), float(np.percentile(counted, 99)))


@contextmanager
def _gathering_before(board: ScoreTable) -> Iterator[None]:
    """The first gathering of a pick has already been done, by `gather`."""
    kind = type(board)
    gather = kind.refresh

    def skip(_board: ScoreTable) -> None:
        kind.refresh = gather

    kind.refresh = skip
    try:
        yield
    finally:
        kind.refresh = gather


class _Fleet:
    """Prefill instances that compute one prompt after another, and the routers before them."""

    def __init__(self, table: SharedTable, instances: int, processes: int) -> None:
        self._now_ms = 0.0
        self._names = [f"p-{number:04d}" for number in range(instances)]
        self._routers = [
            self._start(SharedLoad(table.for_process(process))) for process in range(processes)
        ]
        self._free_at = dict.fromkeys(self._names, 0.0)
        self._todo = dict.fromkeys(self._names, 0)
        self._ends: list[tuple[float, int, int, Pick]] = []
        interval_ms = choose_report_interval_ms(min(processes * INTERVAL_MS, MAX_INTERVAL_MS), 1)
        phases = np.random.default_rng(1).uniform(0.0, interval_ms, instances * processes)
        self._reports = [
            (float(at), number % processes, self._names[number // processes])
            for number, at in enumerate(phases)
        ]
        heapq.heapify(self._reports)
        self._interval_ms = interval_ms
        self._sent = 0

    def advance(self, now_ms: float) -> None:
        """Everything that ends or is reported until now."""
        while True:
            end = self._ends[0][0] if self._ends else np.inf
            report = self._reports[0][0]
            if min(end, report) > now_ms:
                break
            self._now_ms = min(end, report)
            if end <= report:
                _, _, process, pick = heapq.heappop(self._ends)
                assert pick.prefill is not None
                self._todo[pick.prefill.instance] -= pick.prompt_tokens
                self._routers[process].release(pick, RequestPhase.PREFILL)
                self._routers[process].release(pick, RequestPhase.DECODE)
            else:
                _, process, name = self._reports[0]
                again = report + self._interval_ms, process, name
                heapq.heapreplace(self._reports, again)
                self._report(process, name)
        self._now_ms = now_ms

    def gather(self, process: int) -> None:
        """Its pick begins."""
        self._find_board(process).refresh()

    def send(self, process: int, tokens: int, service_ms: float, is_blind: bool) -> float:
        """How long a request waits."""
        with _gathering_before(self._find_board(process)) if is_blind else nullcontext():
            pick = self._routers[process].pick("m", tokens, 1)
        assert pick.prefill is not None
        name = pick.prefill.instance
        start = max(self._free_at[name], self._now_ms)
        self._free_at[name] = start + service_ms
        self._todo[name] += tokens
        self._sent += 1
        heapq.heappush(self._ends, (self._free_at[name], self._sent, process, pick))
        return start - self._now_ms

    def _find_board(self, process: int) -> ScoreTable:
        (board,) = self._routers[process].registry.models["m"].score_tables
        return board

    def _start(self, shared_load: SharedLoad) -> SharedRouter:
        directory = InstanceRegistry(shared_load=shared_load)
        for name in [*self._names, "d"]:
            role = agent_pb2.ROLE_DECODE if name == "d" else agent_pb2.ROLE_PREFILL
            directory.on_event(name, state(name, role, 1 << 30), 0.0)
        return SharedRouter(directory, clock=lambda: self._now_ms / 1_000, seed=1)

    def _report(self, process: int, name: str) -> None:
        load = agent_pb2.LoadReport(boot_id=f"{name}-boot", pending_prompt_tokens=self._todo[name])
        directory = self._routers[process].registry
        directory.on_event(name, agent_pb2.WatchEvent(load=load), self._now_ms / 1_000)
