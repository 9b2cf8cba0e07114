"""The client of examples/router before real processes: a gateway's router, agents, engines with
keys. The engines are emulated."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest

from cleave.rpc.pull_counters import parse_pull_counters
from cleave.rpc.v1 import router_pb2, router_pb2_grpc

from e2e.support.deployments import CLEAVE, Deployment, deployed, emulated, idle, until
from tests.support.certificates import Files
from tests.support.ports import find_free_port

CLIENT = Path(__file__).parents[1] / "examples" / "router" / "client.py"
PROMPT = "Once upon a time"


@dataclass(frozen=True)
class Stage:
    deployment: Deployment
    gateway: str
    router: str
    files: Files
    """Of the gateway."""
    caller: Files

    def run_client(self, shown: Files, *options: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, CLIENT, "--router", self.router, "--model", "chat", *options]
        line += ["--ca", self.files.certificate, "--cert", shown.certificate, "--key", shown.key]
        return subprocess.run(
            [*line, PROMPT], capture_output=True, text=True, timeout=60, check=False
        )

    def complete(self) -> str:
        """What the gateway itself answers."""
        body = {"model": "chat", "prompt": PROMPT, "max_tokens": 16}
        answer = httpx.post(f"{self.gateway}/v1/completions", json=body, timeout=60).json()
        return answer["choices"][0]["text"]

    def count_kv_bytes(self) -> float:
        urls = [each.engine_url for each in self.deployment.instances().values()]
        pages = (httpx.get(f"{url}/metrics", timeout=30).content for url in urls)
        counters = map(parse_pull_counters, pages)
        return sum(each.num_bytes for each in counters if each is not None)

    def is_empty(self) -> bool:
        ca, own = self.files.certificate.read_bytes(), self.caller
        pair = own.key.read_bytes(), own.certificate.read_bytes()
        credentials = grpc.ssl_channel_credentials(ca, *pair)
        with grpc.secure_channel(self.router, credentials) as channel:
            fleet = router_pb2_grpc.RouterStub(channel).Fleet(router_pb2.FleetRequest())
        requests = [each.requests_in_flight for each in fleet.instances]
        return idle(self.deployment) and bool(requests) and not any(requests)


def make_files(folder: Path, name: str) -> Files:
    (folder / name).mkdir()
    return Files(folder / name).write()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("router")
    port, router_port = find_free_port(), find_free_port()
    files, caller = make_files(folder, "gateway"), make_files(folder, "caller")
    with deployed(emulated("chat", 1, 1), folder, 180) as deployment:
        (agents,) = deployment.state_dir.rglob("agents")
        line = [CLEAVE, "gateway", "--agents", f"file:{agents}", "--port", str(port)]
        line += ["--router-port", str(router_port), "--router-cert", files.certificate]
        line += ["--router-key", files.key, "--router-client-ca", caller.certificate]
        line += ["--witness-share", "0"]
        with (folder / "gateway.log").open("wb") as log:
            env = os.environ | deployment.agent_env
            gateway = subprocess.Popen(line, env=env, stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            until(lambda: is_ready(url), 60, "the gateway is ready")
            yield Stage(deployment, url, f"127.0.0.1:{router_port}", files, caller)
        finally:
            gateway.terminate()
            gateway.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def test_a_caller_with_a_certificate_computes_what_a_gateway_computes(stage: Stage) -> None:
    kv_bytes = stage.count_kv_bytes()
    ended = stage.run_client(stage.caller)
    assert ended.returncode == 0, ended.stderr
    assert stage.count_kv_bytes() > kv_bytes, "the KV went from one engine to the other"
    assert ended.stdout == stage.complete() + "\n"
    until(stage.is_empty, 60, "everything has left the books")


def test_a_caller_without_its_own_certificate_learns_nothing(stage: Stage) -> None:
    ended = stage.run_client(stage.files)
    assert ended.returncode == 1
    assert "UNAVAILABLE" in ended.stderr
    assert "http://" not in ended.stderr


def test_an_engine_refuses_requests_without_the_key_of_a_pick(stage: Stage) -> None:
    for instance in stage.deployment.instances().values():
        body = {"model": "chat", "prompt": PROMPT, "max_tokens": 1}
        answer = httpx.post(f"{instance.engine_url}/v1/completions", json=body, timeout=30)
        assert answer.status_code == 401


def test_a_failed_instance_is_avoided(stage: Stage) -> None:
    """A lost prefill engine: the decode engine computes the prompt."""
    stage.deployment.engine("chat-prefill-0").kill()
    ended = stage.run_client(stage.caller)
    assert ended.returncode == 0, ended.stderr
    until(stage.is_empty, 60, "everything has left the books")
