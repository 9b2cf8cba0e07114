"""Data-parallel ranks: their common life as a decision, and with real agents."""

import concurrent.futures
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest

from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc
from cleave_worker.agent.gang.gang import Gang, GangOrder, Order, Report

PORTS = (9000, 9002)


def test_engines_start_when_none_of_all_ranks_runs() -> None:
    gang = Gang(3)
    assert gang.apply(0, Report.READY, 0) is None
    assert gang.apply(2, Report.READY, 0) is None
    assert gang.apply(0, Report.READY, 0) is None
    assert gang.apply(1, Report.READY, 0) == GangOrder(Order.START, 1)


def test_one_lost_engine_stops_all_once_and_they_start_together_again() -> None:
    gang = Gang(2)
    gang.apply(0, Report.READY, 0)
    gang.apply(1, Report.READY, 0)
    assert gang.apply(1, Report.LOST, 1) == GangOrder(Order.STOP, 1)
    # The other one reports the engine that it has stopped.
    assert gang.apply(0, Report.LOST, 1) is None
    assert gang.apply(0, Report.READY, 1) is None
    assert gang.apply(1, Report.READY, 1) == GangOrder(Order.START, 2)
    # Too late: it is about an engine before the present ones.
    assert gang.apply(0, Report.LOST, 1) is None
    assert gang.apply(0, Report.LOST, 2) == GangOrder(Order.STOP, 2)


def test_all_ranks_drain_and_none_ends_before_the_last_one_is_drained() -> None:
    gang = Gang(2)
    assert gang.apply(1, Report.DRAINS, 1) == GangOrder(Order.DRAIN, 0)
    assert gang.apply(0, Report.DRAINS, 1) is None
    assert gang.apply(1, Report.DRAINED, 1) is None
    assert gang.apply(1, Report.DRAINED, 1) is None
    assert gang.apply(0, Report.DRAINED, 1) == GangOrder(Order.END, 0)


@pytest.mark.parametrize("seed", range(50))
def test_an_engine_never_runs_beside_one_of_another_start(seed: int) -> None:
    """Random deaths, and orders that arrive late: each rank as its agent acts."""
    generator, size = random.Random(seed), 3
    gang, running, known = Gang(size), [0] * size, [0] * size
    orders: list[list[GangOrder]] = [[] for _ in range(size)]

    def report(rank: int, what: Report) -> None:
        if order := gang.apply(rank, what, known[rank]):
            for queue in orders:
                queue.append(order)

    for rank in range(size):
        report(rank, Report.READY)
    for _ in range(500):
        rank = generator.randrange(size)
        if orders[rank] and generator.random() < 0.7:
            order = orders[rank].pop(0)
            if order.kind is Order.START:
                running[rank] = known[rank] = order.start
            elif order.start == known[rank] and running[rank]:
                running[rank] = 0
                report(rank, Report.LOST)
                report(rank, Report.READY)
        elif running[rank] and generator.random() < 0.2:
            running[rank] = 0
            report(rank, Report.LOST)
            report(rank, Report.READY)
        assert len({start for start in running if start}) <= 1, f"seed {seed}"
    # None of them waits for ever.
    while any(orders):
        for rank, queue in enumerate(orders):
            while queue:
                order = queue.pop(0)
                if order.kind is Order.START:
                    running[rank] = known[rank] = order.start
                elif order.start == known[rank] and running[rank]:
                    running[rank] = 0
                    report(rank, Report.LOST)
                    report(rank, Report.READY)
    assert running[0]
    assert len(set(running)) == 1


@dataclass
class RunningRanks:
    """Two data-parallel ranks with emulated engines, and their launcher."""

    process: subprocess.Popen[bytes]
    host: str
    log: Path

    def healths(self) -> list[agent_pb2.HealthResponse]:
        found = []
        for port in PORTS:
            with grpc.insecure_channel(f"{self.host}:{port}") as channel:
                stub = agent_pb2_grpc.AgentStub(channel)
                found.append(stub.Health(agent_pb2.HealthRequest(), timeout=20))
        return found

    def registrations(self) -> list[agent_pb2.Registration]:
        return [each.registration for each in self.healths()]

    def drain(self, port: int) -> agent_pb2.DrainResponse:
        with grpc.insecure_channel(f"{self.host}:{port}") as channel:
            return agent_pb2_grpc.AgentStub(channel).Drain(agent_pb2.DrainRequest(), timeout=120)

    def are_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return all(each.state == agent_pb2.STATE_READY for each in self.registrations())
        except grpc.RpcError:
            return False

    def find_engine(self, port: int) -> int:
        """The process that serves this engine's API."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
            except (OSError, UnicodeDecodeError):
                continue
            if "cleave_worker.emulator.main" in words and {self.host, str(port + 1)} <= {*words}:
                return int(folder.name)
        raise AssertionError(f"no engine of {self.host}:{port}: {self.log.read_text()}")


@pytest.fixture
def wait() -> Callable[..., None]:
    def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    return until


@pytest.fixture
def ranks(tmp_path: Path, host: str, wait: Callable[..., None]) -> Iterator[RunningRanks]:
    agents = [
        json.dumps(
            [
                *("--name", f"i.rank-{rank}", "--deployment", "d", "--revision", "r1"),
                *("--role", "mixed", "--model", "facebook/opt-13b", "--served-model-name", "m"),
                *("--host", host, "--port", str(port), "--engine-port", str(port + 1)),
                *("--engine", "emulated", "--drain-timeout", "20", "--peer-wait", "0"),
                *("--data-parallel-size", "2", "--data-parallel-rank", str(rank)),
            ]
        )
        for rank, port in enumerate(PORTS)
    ]
    command = [sys.executable, "-m", "cleave_worker.agent.cell", "--host", host, "--port", "8999"]
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, *agents], stdout=file, stderr=file, start_new_session=True
        )
    found = RunningRanks(process, host, log)
    try:
        wait(found.are_ready)
        yield found
    finally:
        process.kill()
        process.wait(30)
        print(log.read_text())


def test_the_death_of_one_engine_restarts_those_of_all_ranks(
    ranks: RunningRanks, wait: Callable[..., None]
) -> None:
    before = ranks.registrations()
    assert [each.data_parallel_size for each in before] == [2, 2]
    other = ranks.find_engine(9000)
    os.kill(ranks.find_engine(9002), signal.SIGKILL)

    def are_all_new() -> bool:
        now = ranks.registrations()
        are_new = all(b.boot_id != n.boot_id for b, n in zip(before, now, strict=True))
        return are_new and all(each.state == agent_pb2.STATE_READY for each in now)

    wait(are_all_new)
    assert not Path(f"/proc/{other}").exists()
    now = ranks.registrations()
    assert [each.restarts for each in now] == [1, 1]
    assert "another data-parallel rank was lost" in now[0].last_failure
    assert "status" in now[1].last_failure


def test_a_drain_of_one_rank_drains_all_and_they_end_together(ranks: RunningRanks) -> None:
    assert ranks.drain(9002).empty
    ranks.process.wait(30)
    assert "ranks: end" in ranks.log.read_text()


def test_a_signal_joins_the_drain_that_another_rank_has_begun(
    ranks: RunningRanks, wait: Callable[..., None]
) -> None:
    body = {"model": "m", "prompt": "x", "max_tokens": 200, "ignore_eos": True}
    url = f"http://{ranks.host}:{PORTS[0] + 1}/v1/completions"
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answer = pool.submit(httpx.post, url, json=body, timeout=120)
        wait(lambda: ranks.healths()[0].load.num_running == 1)
        drain = pool.submit(ranks.drain, PORTS[1])
        draining = agent_pb2.STATE_DRAINING
        wait(lambda: ranks.healths()[0].registration.state == draining)
        ranks.process.send_signal(signal.SIGTERM)
        assert answer.result(120).json()["usage"]["completion_tokens"] == 200
        # The other rank has stayed until now, as its engine takes part in each step.
        assert drain.result(120).empty
    assert ranks.process.wait(30) == 0


def test_all_ranks_end_at_the_signal_of_a_kubelet(ranks: RunningRanks) -> None:
    ranks.process.send_signal(signal.SIGTERM)
    assert ranks.process.wait(30) == 0


def test_ranks_end_when_their_launcher_is_killed(ranks: RunningRanks, all_gone) -> None:
    launcher = Path(f"/proc/{ranks.process.pid}/task/{ranks.process.pid}/children")
    agents = [int(pid) for pid in launcher.read_text().split()]
    engines = [ranks.find_engine(port) for port in PORTS]
    ranks.process.kill()
    all_gone([*agents, *engines])
    assert "the launcher of the data-parallel ranks has ended" in ranks.log.read_text()
    assert "Traceback" not in ranks.log.read_text()


def test_a_rank_is_not_started_alone() -> None:
    arguments = [
        *("--name", "a", "--deployment", "d", "--role", "mixed", "--model", "m"),
        *("--host", "127.0.0.1", "--engine", "emulated", "--data-parallel-size", "2"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "cleave_worker.agent.main", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.endswith("--data-parallel-size: start all ranks with cleave-cell\n")
