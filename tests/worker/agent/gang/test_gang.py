"""Data-parallel ranks: their common life as a decision, and with real agents."""

import concurrent.futures
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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


def test_no_engine_starts_while_ranks_find_different_weights() -> None:
    gang = Gang(3)
    for rank, weights in ((0, "a1"), (1, "b2")):
        assert gang.apply(rank, Report.READY, 0, weights) is None
    refused = gang.apply(2, Report.READY, 0, "a1")
    assert refused is not None
    assert (refused.kind, refused.start) == (Order.REFUSE, 0)
    assert "a1 at rank 0 and 2, b2 at rank 1; give the nodes" in refused.reason
    # All of them read again; one that has not yet does not count with what it found before.
    assert gang.apply(1, Report.READY, 0, "a1") is None
    assert gang.apply(0, Report.READY, 0, "a1") is None
    assert gang.apply(2, Report.READY, 0, "a1") == GangOrder(Order.START, 1)


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


def test_a_rank_that_has_left_stops_the_others_and_may_join_again() -> None:
    gang = Gang(2)
    gang.apply(0, Report.READY, 0)
    assert gang.remove(0) is None
    assert gang.apply(1, Report.READY, 0) is None
    assert gang.join() is None
    assert gang.apply(0, Report.READY, 0) == GangOrder(Order.START, 1)
    assert gang.remove(1) == GangOrder(Order.STOP, 1)
    assert gang.apply(0, Report.LOST, 1) is None
    assert gang.apply(0, Report.READY, 1) is None
    assert gang.apply(1, Report.READY, 0) == GangOrder(Order.START, 2)


def test_the_others_drain_without_a_rank_that_has_left() -> None:
    gang = Gang(3)
    for rank in range(3):
        gang.apply(rank, Report.READY, 0)
    gang.apply(0, Report.DRAINS, 1)
    gang.apply(0, Report.DRAINED, 1)
    # Its engine computed for the two that still serve.
    assert gang.remove(0) == GangOrder(Order.STOP, 1)
    assert gang.join() == GangOrder(Order.DRAIN, 1)
    assert gang.apply(1, Report.DRAINED, 1) is None
    assert gang.remove(2) == GangOrder(Order.END, 1)
    assert gang.remove(1) is None


@dataclass
class RunningRanks:
    """Data-parallel ranks with emulated engines in one pod, and their launcher."""

    process: subprocess.Popen[bytes]
    host: str
    log: Path
    ports: tuple[int, ...] = PORTS

    def healths(self) -> list[agent_pb2.HealthResponse]:
        found = []
        for port in self.ports:
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


def launch(log: Path, host: str, numbers: Sequence[int], *options: str) -> RunningRanks:
    """Some of two ranks, as a pod."""
    ports = PORTS[: len(numbers)]
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
        for rank, port in zip(numbers, ports, strict=True)
    ]
    command = [sys.executable, "-m", "cleave_worker.agent.cell", "--host", host, "--port", "8999"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, *options, *agents], stdout=file, stderr=file, start_new_session=True
        )
    return RunningRanks(process, host, log, ports)


def lose(pod: RunningRanks) -> None:
    """Kill all processes of a pod, as the loss of its node does."""
    os.killpg(pod.process.pid, signal.SIGKILL)
    pod.process.wait(30)


@pytest.fixture
def ranks(tmp_path: Path, host: str, wait: Callable[..., None]) -> Iterator[RunningRanks]:
    found = launch(tmp_path / "log", host, (0, 1))
    try:
        wait(found.are_ready)
        yield found
    finally:
        found.process.kill()
        found.process.wait(30)
        print(found.log.read_text())


@dataclass
class RunningPods:
    """The two pods of an instance of two ranks."""

    folder: Path
    host: str
    pods: list[RunningRanks] = field(default_factory=list)

    def start_pod(self, rank: int) -> RunningRanks:
        network, _, last = self.host.rpartition(".")
        leader = ["--leader", f"{self.host}:8999"] if rank else []
        host = f"{network}.{int(last) % 250 + rank}"
        pod = launch(self.folder / f"log-{len(self.pods)}", host, (rank,), *leader)
        self.pods.append(pod)
        return pod


@pytest.fixture
def pods(tmp_path: Path, host: str, wait: Callable[..., None]) -> Iterator[RunningPods]:
    network, _, last = host.rpartition(".")
    found = RunningPods(tmp_path, f"{network}.{int(last) % 250}")
    try:
        # The leader's pod may come last.
        further, leader = found.start_pod(1), found.start_pod(0)
        wait(lambda: leader.are_ready() and further.are_ready())
        yield found
    finally:
        for pod in found.pods:
            with contextlib.suppress(ProcessLookupError):
                lose(pod)
            print(pod.log.read_text())


def are_new(pods: Sequence[RunningRanks], boot_ids: set[str]) -> bool:
    """Whether all engines are ready, and none of them has one of these boot ids."""
    if not all(pod.are_ready() for pod in pods):
        return False
    return boot_ids.isdisjoint(each.boot_id for pod in pods for each in pod.registrations())


def list_boots(pods: Sequence[RunningRanks]) -> set[str]:
    return {each.boot_id for pod in pods for each in pod.registrations()}


def test_ranks_of_two_pods_are_restarted_when_one_engine_dies(
    pods: RunningPods, wait: Callable[..., None]
) -> None:
    further, leader = pods.pods
    before = list_boots(pods.pods)
    os.kill(further.find_engine(PORTS[0]), signal.SIGKILL)
    wait(lambda: are_new(pods.pods, before))
    (own,) = leader.registrations()
    assert "another data-parallel rank was lost" in own.last_failure
    assert own.data_parallel_size == 2


@pytest.mark.parametrize("number", [0, 1])
def test_both_pods_of_an_instance_drain_when_one_is_deleted(pods: RunningPods, number: int) -> None:
    pods.pods[number].process.send_signal(signal.SIGTERM)
    assert [pod.process.wait(40) for pod in pods.pods] == [0, 0]
    assert not any("Traceback" in pod.log.read_text() for pod in pods.pods)


def test_ranks_wait_for_a_lost_pod_and_start_with_the_one_that_comes_back(
    pods: RunningPods, wait: Callable[..., None]
) -> None:
    further, leader = pods.pods
    before = list_boots(pods.pods)
    lose(further)
    wait(lambda: leader.registrations()[0].state == agent_pb2.STATE_STARTING)
    again = pods.start_pod(1)
    wait(lambda: are_new([leader, again], before))


def test_a_pod_ends_without_the_first_one_which_keeps_the_ranks(pods: RunningPods) -> None:
    further, leader = pods.pods
    lose(leader)
    assert further.process.wait(40) == 1
    assert "the launcher of the data-parallel ranks is lost" in further.log.read_text()


def test_a_pod_that_hangs_is_lost_after_some_seconds(
    pods: RunningPods, wait: Callable[..., None]
) -> None:
    further, leader = pods.pods
    # Beyond the pings that gRPC sends without data by default.
    time.sleep(16)
    os.killpg(further.process.pid, signal.SIGSTOP)
    wait(lambda: leader.registrations()[0].state == agent_pb2.STATE_STARTING, 40)


def test_a_pod_ends_when_the_first_one_hangs(pods: RunningPods) -> None:
    further, leader = pods.pods
    time.sleep(16)
    os.killpg(leader.process.pid, signal.SIGSTOP)
    assert further.process.wait(60) == 1


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
    assert "the launcher of the data-parallel ranks is lost" in ranks.log.read_text()
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
