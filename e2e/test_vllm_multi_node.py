"""One vLLM engine over two nodes: an agent with one rank, a worker node with the other."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc
from cleave_worker.agent.launch import find_free_port

from e2e.support.deployments import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(700)]

HOST = "127.0.0.1"


class Pair:
    """The two processes of an instance."""

    def __init__(self, model: Path, logs: Path) -> None:
        self.address = f"{HOST}:{find_free_port(HOST)}"
        self.logs = logs
        size = ["--tensor-parallel-size", "2", "--max-model-len", "512", "--drain-timeout", "5"]
        shared = ["--model", str(model), "--host", HOST, *size]
        self.leader = self._start(
            *("agent.main", "--name", "x", "--deployment", "chat", "--role", "mixed"),
            *("--port", self.address.rpartition(":")[2], "--cores", "none", "--peer-wait", "0"),
            *(*shared, *self._rank(0)),
        )
        self.worker_node = self._start(
            "agent.worker_node", "--leader", self.address, *shared, *self._rank(1)
        )

    def _rank(self, rank: int) -> list[str]:
        ranks = ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", HOST]
        return ["--", *ranks, "--dtype", "float32", "--enforce-eager"]

    def _start(self, module: str, *line: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "VLLM_HOST_IP": HOST, "VLLM_CPU_KVCACHE_SPACE": "1"}
        with (self.logs / module).open("wb") as log:
            command = [sys.executable, "-m", f"cleave_worker.{module}", *line]
            return subprocess.Popen(command, env=env, stderr=log)

    def registration(self) -> agent_pb2.Registration:
        with grpc.insecure_channel(self.address) as channel:
            agent = agent_pb2_grpc.AgentStub(channel)
            answer = agent.Health(agent_pb2.HealthRequest(), timeout=10, wait_for_ready=True)
        return answer.registration

    def is_ready(self) -> bool:
        assert self.worker_node.poll() is None, (self.logs / "agent.worker_node").read_text()[
            -4000:
        ]
        return self.registration().state == agent_pb2.STATE_READY

    def end(self) -> None:
        for process in (self.worker_node, self.leader):
            process.terminate()
        for process in (self.worker_node, self.leader):
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture
def pair(tiny_model: Path, tmp_path: Path) -> Iterator[Pair]:
    new_pair = Pair(tiny_model, tmp_path)
    yield new_pair
    new_pair.end()


def test_an_engine_over_two_nodes_answers_and_drains_when_either_is_to_go(pair: Pair) -> None:
    until(pair.is_ready, 420, "the engine is ready")
    body = {"model": "x", "prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0}
    body["model"] = pair.registration().model
    url = f"{pair.registration().engine_url}/v1/completions"
    first, second = (httpx.post(url, json=body, timeout=60).json() for _ in range(2))
    assert first["usage"]["completion_tokens"] == 8
    assert first["choices"][0]["text"] == second["choices"][0]["text"]

    pair.worker_node.send_signal(signal.SIGTERM)
    assert (pair.worker_node.wait(60), pair.leader.wait(60)) == (0, 0)
