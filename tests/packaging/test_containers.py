"""Containers of the operator, gateways and workers: processes started as their manifests say."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cleave.api.manifest import validate
from cleave.local.kubelet import environment
from cleave.manifests.gateway import build_gateway_deployment
from cleave.manifests.multi_node import build_node_pods
from cleave.manifests.worker import build_worker_pod

from tests.support.built_pools import build_pools

Manifest = dict[str, Any]
Started = subprocess.Popen[bytes]

START_S = 60
EARLY_S = 0.05
"""From the start of a process to its SIGTERM: Python takes longer to import anything of ours."""
END_S = 10
SANDBOX = ["sh", "-c", '"$@" & wait $!', "pause"]
"""PID 1 of a pod whose containers share their process namespace."""
NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child"]


@pytest.fixture
def specs(plain: list[Manifest]) -> dict[str, Manifest]:
    """Pod specs by the name of their program."""
    chat = validate(
        {
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "chat", "namespace": "llm"},
            "spec": {
                "model": "org/model",
                "slo": {"ttftMs": 400, "tpotMs": 40},
            },
        }
    )
    pool = build_pools(chat)[1]
    pool = pool.model_copy(update={"spec": pool.spec.model_copy(update={"nodes": 2})})
    leader = build_worker_pod(pool, "leader")
    (operator,) = [each for each in plain if each["kind"] == "Deployment"]
    return {
        "operator": operator["spec"]["template"]["spec"],
        "gateway": build_gateway_deployment(chat)["spec"]["template"]["spec"],
        "worker": leader["spec"],
        "follower": build_node_pods(pool, leader)[0]["spec"],
    }


@pytest.fixture
def pod_ip() -> str:
    """A loopback address that no other test uses now."""
    return f"127.{random.randint(90, 99)}.{random.randint(0, 255)}.{random.randint(1, 254)}"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """What containers write."""
    return tmp_path / "log"


@pytest.fixture
def start(tmp_path: Path, pod_ip: str, log: Path) -> Iterator[Callable[..., Started]]:
    """Starts the container of a pod; options that come last win."""
    started: list[Started] = []
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(json.dumps(CLUSTER_THAT_IS_AWAY))
    agents = tmp_path / "agents"
    agents.touch()

    def run(spec: Manifest, *options: str, before: tuple[str, ...] = ()) -> Started:
        (container,) = spec["containers"]
        env = {
            "POD_IP": pod_ip,
            "CLEAVE_AGENTS": f"file:{agents}",
            "CLEAVE_ROLE": "decode",
            "CLEAVE_LEADER": "127.0.0.1",
        }
        command = [*container["command"], *container.get("args", []), *options]
        with log.open("w") as lines:
            process = subprocess.Popen(
                [*before, *environment.build_command_line(command, env)],
                env={**os.environ, **env, "KUBECONFIG": str(kubeconfig)},
                cwd=tmp_path,
                stdout=lines,
                stderr=lines,
                start_new_session=True,
            )
        started.append(process)
        return process

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


CLUSTER_THAT_IS_AWAY = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "it",
    "clusters": [{"name": "it", "cluster": {"server": "http://127.0.0.1:9"}}],
    "users": [{"name": "it", "user": {}}],
    "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
}


def is_answered(url: str) -> bool:
    """Whether there is an answer to a request, be it an error's."""
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True


def until_answered(process: Started, url: str) -> None:
    deadline = time.monotonic() + START_S
    while not is_answered(url):
        assert process.poll() is None, f"{url}: it ended with {process.returncode}"
        assert time.monotonic() < deadline, url
        time.sleep(0.1)


PUBLIC_AND_INTERNAL = {"--port": "/health", "--internal-port": "/metrics"}


@pytest.mark.parametrize(
    ("program", "options", "pages"),
    [
        ("gateway", (), PUBLIC_AND_INTERNAL),
        ("gateway", ("--processes", "2"), PUBLIC_AND_INTERNAL),
        ("operator", (), {"--port": "/metrics"}),
    ],
)
def test_a_container_answers_on_its_pods_address_and_where_port_forward_dials(
    specs: dict[str, Manifest],
    start: Callable[..., Started],
    pod_ip: str,
    program: str,
    options: tuple[str, ...],
    pages: dict[str, str],
) -> None:
    ports = dict(zip(pages, free_ports(), strict=False))
    process = start(specs[program], *options, *(f"{name}={port}" for name, port in ports.items()))
    for host in (pod_ip, "127.0.0.1"):
        for name, path in pages.items():
            until_answered(process, f"http://{host}:{ports[name]}{path}")


@pytest.mark.parametrize("program", ["operator", "gateway", "worker", "follower"])
def test_a_container_that_is_terminated_during_its_start_ends_at_once(
    specs: dict[str, Manifest], start: Callable[..., Started], program: str
) -> None:
    process, main = start_in_pod(specs[program], start)
    time.sleep(EARLY_S)
    os.kill(main, signal.SIGTERM)
    # Not by an exit of its own, for want of a cluster or a leader.
    assert process.wait(END_S) in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_a_gateway_that_serves_still_drains(
    specs: dict[str, Manifest], start: Callable[..., Started], pod_ip: str, log: Path
) -> None:
    public, internal = free_ports()
    ports = (f"--port={public}", f"--internal-port={internal}")
    process, main = start_in_pod(specs["gateway"], start, *ports, "--shutdown-delay=0")
    until_answered(process, f"http://{pod_ip}:{public}/health")
    os.kill(main, signal.SIGTERM)
    assert process.wait(START_S) == 0
    assert "draining" in log.read_text()


def free_ports() -> list[int]:
    """Two ports that the kernel does not give to others meanwhile."""
    return random.sample(range(20_000, 30_000), 2)


def start_in_pod(
    spec: Manifest, start: Callable[..., Started], *options: str
) -> tuple[Started, int]:
    """A container in a process namespace as its pod has it, and the pid of its first process."""
    namespaced = [*NAMESPACE, "true"]
    if not shutil.which(NAMESPACE[0]) or subprocess.run(namespaced, check=False).returncode:
        pytest.skip("this user may not make a process namespace; run as root")
    is_shared = spec.get("shareProcessNamespace", False)
    process = start(spec, *options, before=(*NAMESPACE, *(SANDBOX if is_shared else ())))
    main = process.pid
    for _ in range(2 if is_shared else 1):
        main = only_child(main)
    while Path(f"/proc/{main}/exe").resolve() != Path(sys.executable).resolve():
        assert process.poll() is None, f"it ended with {process.returncode}"
        time.sleep(0.001)
    return process, main


def only_child(pid: int) -> int:
    deadline = time.monotonic() + START_S
    while not (children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        assert time.monotonic() < deadline, pid
        time.sleep(0.001)
    (child,) = children
    return int(child)
