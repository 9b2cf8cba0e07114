"""Several agents in one container: their GPUs, their health, and how they end."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc
from cleave_worker.agent.cell import CellError, assign_cores, assign_gpus, plan_agents

SERVING = health_pb2.HealthCheckResponse.SERVING


def arguments(name: str, role: str, port: int, *more: str, host: str = "127.0.0.1") -> list[str]:
    return [
        *("--name", name, "--deployment", "d", "--revision", "r1", "--role", role),
        *("--model", "facebook/opt-13b", "--served-model-name", "m", "--host", host),
        *("--port", str(port), "--engine-port", str(port + 1), *more),
    ]


def commands(*agents: list[str]) -> list[str]:
    return [json.dumps(each) for each in agents]


@pytest.mark.parametrize(
    ("env", "shares"),
    [
        # A container that a device plugin gave three GPUs sees all of them.
        ({}, ["0", "1,2"]),
        ({"CUDA_VISIBLE_DEVICES": "5,6,7"}, ["5", "6,7"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d"}, ["GPU-a", "GPU-b,GPU-c"]),
    ],
)
def test_each_engine_has_gpus_of_its_own(env: dict[str, str], shares: list[str]) -> None:
    assert assign_gpus([1, 2], env) == shares


@pytest.mark.parametrize("visible", ["", "0", "0,1"])
def test_too_few_gpus_are_refused(visible: str) -> None:
    with pytest.raises(CellError, match=r"the engines need 3 GPUs, CUDA_VISIBLE_DEVICES names"):
        assign_gpus([1, 2], {"CUDA_VISIBLE_DEVICES": visible})


def test_agents_see_their_gpus_only_where_there_are_any() -> None:
    two = commands(
        arguments("c.prefill-0", "prefill", 9000),
        arguments("c.decode-0", "decode", 9002, "--tensor-parallel-size", "2"),
    )
    on_gpus = plan_agents(two, {"HOME": "/h"}, has_gpus=True)
    assert [each.env["CUDA_VISIBLE_DEVICES"] for each in on_gpus] == ["0", "1,2"]
    assert all(each.env["HOME"] == "/h" for each in on_gpus)
    on_cpu = plan_agents(two, {}, has_gpus=False)
    assert not any("CUDA_VISIBLE_DEVICES" in each.env for each in on_cpu)


def test_bad_commands_are_refused_in_a_line() -> None:
    same = commands(arguments("a", "prefill", 9000), arguments("b", "decode", 9001))
    with pytest.raises(CellError, match=r"ports \[9000, 9001, 9001, 9002\] of the agents"):
        plan_agents(same, {}, has_gpus=False)
    with pytest.raises(CellError, match="must be a JSON list of texts"):
        plan_agents(['{"a": 1}'], {}, has_gpus=False)


@pytest.mark.parametrize(
    ("affinity", "shares"),
    [
        ({2, 3, 5, 7, 8, 9}, ["2,3", "5,7,8,9"]),
        ({2, 3, 5, 7}, ["2", "3,5"]),
        # Not a static CPU manager's: agents lock free ones by themselves.
        (set(range(16)), ["auto", "auto"]),
        ({1, 2}, ["auto", "auto"]),
    ],
)
def test_engines_on_cpu_share_the_cores_of_their_container(
    affinity: set[int], shares: list[str]
) -> None:
    assert assign_cores([1, 2], frozenset(affinity), frozenset(range(16))) == shares


def ranks(*numbers: int, size: int = 2) -> list[str]:
    return commands(
        *(
            arguments(
                f"i.rank-{at}",
                "decode",
                9000 + 2 * at,
                *("--data-parallel-size", str(size), "--data-parallel-rank", str(number)),
            )
            for at, number in enumerate(numbers)
        )
    )


@pytest.mark.parametrize(
    ("agents", "is_leader"),
    [
        (ranks(1, 1), True),
        (ranks(0, 1, size=3), True),
        (ranks(0, 2, size=4), True),
        (ranks(1, 2, size=4), False),
        (ranks(2, 3, size=4), True),
        (ranks(0, 1, size=4), False),
        (ranks(0, size=1), False),
    ],
)
def test_a_pod_has_equally_many_data_parallel_ranks_in_a_row(
    agents: list[str], is_leader: bool
) -> None:
    for size in (2, 4):
        assert len(plan_agents(ranks(0, 1, size=size), {}, has_gpus=False)) == 2
    further = plan_agents(ranks(2, 3, size=4), {}, has_gpus=False, is_leader=False)
    assert [each.config.data_parallel_rank for each in further] == [2, 3]
    with pytest.raises(CellError, match="a pod must have equally many ranks of one instance"):
        plan_agents(agents, {}, has_gpus=False, is_leader=is_leader)


@pytest.fixture
def cell(tmp_path: Path, host: str, until: Callable[..., None]):
    """A cell of a prefill and a decode agent with emulated engines, ready."""
    known = tmp_path / "agents"
    known.write_text(f"{host}:9000\n{host}:9002\n")
    more = ("--engine", "emulated", "--peers", f"file:{known}", "--cell", "c", "--drain-timeout")
    agents = commands(
        arguments("c.prefill-0", "prefill", 9000, *more, "5", host=host),
        arguments("c.decode-0", "decode", 9002, *more, "5", host=host),
    )
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "cleave_worker.agent.cell", "--host", host, "--port", "8999",
             *agents],
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    channel = grpc.insecure_channel(f"{host}:8999")
    try:
        until(lambda: check(channel, "ready"), 60)
        yield process, channel, host
    finally:
        process.kill()
        process.wait(30)
        channel.close()
        print((tmp_path / "log").read_text())


@pytest.fixture
def until() -> Callable[..., None]:
    def wait(condition: Callable[[], bool], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    return wait


def check(channel: grpc.Channel, service: str) -> bool:
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status == SERVING
    except grpc.RpcError:
        return False


def list_children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_cell_is_ready_with_all_its_agents_and_drains_with_them(cell) -> None:
    process, channel, host = cell
    found = {}
    for port in (9000, 9002):
        with grpc.insecure_channel(f"{host}:{port}") as agent:
            health = agent_pb2_grpc.AgentStub(agent).Health(agent_pb2.HealthRequest(), timeout=20)
            found[health.registration.instance] = health.registration
    assert found.keys() == {"c.prefill-0", "c.decode-0"}
    assert all(each.kv_path.verified and each.cell == "c" for each in found.values())
    assert check(channel, "")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_an_agent_that_is_killed_ends_the_cell(cell, until, all_gone) -> None:
    process, *_ = cell
    # Beside agents the resource tracker of Python may be a child.
    first, *others = list_children(process.pid)
    below = [engine for agent in others for engine in list_children(agent)]
    subprocess.run(["kill", "-9", str(first)], check=True)
    assert process.wait(30) == 1
    all_gone([*others, *below])
