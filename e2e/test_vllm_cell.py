"""Two vLLM engines of a cell in one container, as `cleave_worker.agent.cell` starts them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

from e2e.support.deployments import FAST_START_ARGS, FAST_START_ENV, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

HOST = "127.0.0.143"


def test_the_engines_of_a_cell_hand_over_kv_and_drain(tiny_model: Path, tmp_path: Path) -> None:
    known = tmp_path / "agents"
    known.write_text(f"{HOST}:9000\n{HOST}:9002\n")
    agents = [
        json.dumps(
            [
                *("--name", f"c.{role}-0", "--deployment", "chat", "--role", role, "--cell", "c"),
                *("--model", str(tiny_model), "--host", HOST, "--port", str(port)),
                *("--engine-port", str(port + 1), "--max-model-len", "512", "--cores", "none"),
                *("--peers", f"file:{known}", "--drain-timeout", "5", "--", "--dtype", "float32"),
                *FAST_START_ARGS,
            ]
        )
        for role, port in (("prefill", 9000), ("decode", 9002))
    ]
    command = [sys.executable, "-m", "cleave_worker.agent.cell", "--host", HOST, "--port", "8999"]
    with (tmp_path / "log").open("wb") as log:
        env = os.environ | {FAST_START_ENV["name"]: FAST_START_ENV["value"]}
        process = subprocess.Popen([*command, *agents], stderr=log, start_new_session=True, env=env)
    try:
        with grpc.insecure_channel(f"{HOST}:8999") as channel:
            until(lambda: is_ready(process, channel, tmp_path / "log"), 300, "the cell is ready")
        for port in (9000, 9002):
            kv_path = fetch_registration(port).kv_path
            assert kv_path.verified, kv_path
            print(kv_path.transport, kv_path.detail)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def is_ready(process: subprocess.Popen[bytes], channel: grpc.Channel, log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-4000:]
    request = health_pb2.HealthCheckRequest(service="ready")
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def fetch_registration(port: int) -> agent_pb2.Registration:
    with grpc.insecure_channel(f"{HOST}:{port}") as channel:
        stub = agent_pb2_grpc.AgentStub(channel)
        return stub.Health(agent_pb2.HealthRequest(), timeout=10).registration
