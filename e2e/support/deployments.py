"""Deployments brought up through the command line, as a user does, and taken down for good."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import yaml

from cleave.local.files import TOKEN_FILE
from cleave.rpc.credentials import TOKEN_ENV, Metadata, sign_with_token
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

from e2e.support.engine_keys import remember
from tests.support.ports import find_free_port

CLEAVE = Path(sys.executable).with_name("cleave")
MARK = "CLEAVE_STATE_DIR"


@dataclass(frozen=True)
class Deployment:
    """A deployment that runs on this machine."""

    name: str
    url: str
    state_dir: Path

    def cleave(self, *args: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [CLEAVE, *args],
            env=os.environ | {MARK: str(self.state_dir)},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def healths(self) -> list[agent_pb2.HealthResponse]:
        """What each agent that answers says of its instance."""
        found = []
        (file,) = self.state_dir.rglob("agents")
        for address in file.read_text().split():
            with grpc.insecure_channel(address) as channel, suppress(grpc.RpcError):
                agent = agent_pb2_grpc.AgentStub(channel)
                request, own = agent_pb2.HealthRequest(), self.sign(address)
                found.append(agent.Health(request, timeout=20, metadata=own))
                remember(found[-1].registration)
        return found

    def sign(self, address: str) -> Metadata:
        """What a call of the agent at an address shows."""
        return sign_with_token(Path(self.agent_env[TOKEN_ENV]), address)

    @property
    def agent_env(self) -> dict[str, str]:
        """Environment of a process that calls agents."""
        (file,) = self.state_dir.rglob(TOKEN_FILE)
        return {TOKEN_ENV: str(file)}

    def instances(self) -> dict[str, agent_pb2.Registration]:
        """Registrations by instance name."""
        return {health.registration.instance: health.registration for health in self.healths()}

    def processes(self) -> list[psutil.Process]:
        """Every process that descends from this deployment: they inherit its environment, which
        an engine's process overwrites when it gives itself a name."""
        found = set()
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.state_dir):
                    found |= {process, *process.children(recursive=True)}
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return [p for p in found if p.pid != os.getpid()]

    def agent(self, instance: str) -> psutil.Process:
        """The agent's process of an instance."""
        (found,) = [
            p
            for p in self.processes()
            if "cleave_worker.agent.main" in (line := command(p)) and f"--name {instance} " in line
        ]
        return found

    def engine(self, instance: str) -> psutil.Process:
        """The process of an instance that serves HTTP."""
        # A child between fork and exec has its command line, too.
        found, *_ = [
            p
            for p in self.agent(instance).children(recursive=True)
            if ("api_server" in (line := command(p)) or "emulator.main" in line)
            and "subreaper" not in line
        ]
        return found


def command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) + " "
    except psutil.NoSuchProcess:
        return ""


def until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Wait for something to come true; fail with its name when it does not."""
    began = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(compute_pause_s(waited_s))


def compute_pause_s(waited_s: float) -> float:
    """Time until the next look: a tenth of the wait, so that long ones leave the machine to what
    they wait for. Conditions call servers, which are busy with that meanwhile."""
    return min(max(0.05, 0.1 * waited_s), 0.3)


@contextmanager
def deployed(manifest: dict[str, object], folder: Path, timeout_s: int) -> Iterator[Deployment]:
    """Bring a manifest up, hand it out ready, take it down and see that nothing is left."""
    port = find_free_port()
    name = manifest["metadata"]["name"]  # type: ignore[index]
    file = folder / "deployment.yaml"
    file.write_text(yaml.safe_dump(manifest))
    deployment = Deployment(name, f"http://127.0.0.1:{port}", folder / "state")
    try:
        up = deployment.cleave(
            *("up", "-f", str(file), "--port", str(port), "--detach", "--timeout", str(timeout_s)),
            timeout_s=timeout_s + 30,
        )
        assert up.returncode == 0, up.stdout + up.stderr + tails(deployment)
        yield deployment
        down = deployment.cleave("down", name)
        assert down.returncode == 0, down.stdout + down.stderr
        left = [command(p) for p in deployment.processes()]
        assert not left, f"left running: {left}"
    finally:
        for process in deployment.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()


def idle(deployment: Deployment) -> bool:
    """Whether no engine runs, queues or holds anything."""
    loads = [health.load for health in deployment.healths()]
    return not any(load.num_running or load.num_waiting or load.kv_cache_usage for load in loads)


def tails(deployment: Deployment) -> str:
    return "".join(
        f"\n== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        for log in sorted(deployment.state_dir.rglob("*.log"))
    )


def emulated(
    name: str, prefill: int, decode: int, time_scale: float = 0.1, lease_s: int = 30
) -> dict[str, object]:
    """A manifest for instances of the emulated engine."""
    kv_transfer = {"kv_connector_extra_config": {"kv_lease_duration": lease_s}}
    return {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": "facebook/opt-13b", "servedName": name, "maxModelLen": 8192},
            "slo": {"ttftMs": 400, "tpotMs": 40},
            "engine": {
                "type": "Emulated",
                "args": ["--kv-transfer-config", json.dumps(kv_transfer)],
                "emulated": {"latency": "distserve/opt-13b/tp1", "timeScale": time_scale},
            },
            "placement": {
                "manual": [
                    {"role": "prefill", "replicas": prefill},
                    {"role": "decode", "replicas": decode},
                ]
            },
        },
    }


FAST_START_ARGS = ["--enforce-eager", "--distributed-executor-backend", "uni"]
FAST_START_ENV = {"name": "VLLM_ENABLE_V1_MULTIPROCESSING", "value": "0"}
"""For engines of tests: at each start, compiling costs 10 s of a core, and a process for the only
rank 10 s more. `vllm_pair` starts engines as the product does."""


def start_fast(**engine: Any) -> dict[str, Any]:
    """`spec.engine` of a vLLM engine that starts with less work."""
    args, env = engine.get("args", []), engine.get("env", [])
    return engine | {"args": [*FAST_START_ARGS, *args], "env": [FAST_START_ENV, *env]}


def tiny_vllm(model: Path, **spec: object) -> dict[str, object]:
    """A manifest for vLLM with the tiny model: a prefill and a decode instance by default."""
    return {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "tiny"},
        "spec": {
            # bfloat16, the engine's choice otherwise, makes ties that either side may break.
            "model": {
                "source": str(model),
                "servedName": "tiny",
                "dtype": "float32",
                "maxModelLen": 4096,
            },
            "slo": {"ttftMs": 1000, "tpotMs": 200},
            # Tests count what engines compute.
            "witness": {"engineShare": 0},
            # Less than is usual for vLLM: the model is small, and other tests run beside.
            "template": {"resources": {"limits": {"memory": "4Gi"}}},
            **spec,
        },
    }
