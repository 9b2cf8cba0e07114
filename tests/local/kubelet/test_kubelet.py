import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cleave.local.kubelet import process
from cleave.local.kubelet.kubelet import Kubelet
from cleave.local.kubelet.node import GpuDevice, LocalNode
from cleave.local.kubelet.pod_spec import PodError

PodBuilder = Callable[..., dict[str, Any]]
Until = Callable[[Callable[[], object]], Awaitable[None]]

SLEEP = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(600)"
CORE_EACH = {"resources": {"limits": {"cpu": 1}, "requests": {"cpu": "1"}}}
SERVER = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if os.path.exists({flag!r}) else 503)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer((os.environ["POD_IP"], 8080), Handler).serve_forever()
"""
POD_IP = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


def status(kubelet: Kubelet, name: str) -> dict[str, Any]:
    (found,) = [p["status"] for p in kubelet.list_pods() if p["metadata"]["name"] == name]
    return found


def container(kubelet: Kubelet, name: str) -> dict[str, Any]:
    return status(kubelet, name)["containerStatuses"][0]


def pid_of(kubelet: Kubelet, name: str) -> int | None:
    (found,) = [facts.pid for spec, facts in kubelet.list_pod_states() if spec.name == name]
    return found


def printed(kubelet: Kubelet, name: str) -> str:
    log = kubelet.get_log_path(name)
    return log.read_text() if log.exists() else ""


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


async def test_a_pod_gets_its_own_address_name_and_agents_file(
    kubelet: Kubelet, pod: PodBuilder, until: Until
) -> None:
    env = [
        POD_IP,
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "CLEAVE_AGENTS", "value": "dns:chat-workers.default.svc:9000"},
    ]
    code = (
        "import os, sys, json; "
        "print(json.dumps([os.environ[k] for k in ('POD_IP','NAME','CLEAVE_AGENTS')] + sys.argv))"
    )
    for name in ("one", "two"):
        builder = pod(name, code, container={"env": env, "ports": [{"containerPort": 9000}]})
        builder["spec"]["containers"][0]["args"] += ["--host", "$(POD_IP)"]
        kubelet.run_pod(builder)
        await until(lambda n=name: printed(kubelet, n))
    one, two = (
        json.loads(kubelet.get_log_path(n).read_text().splitlines()[0]) for n in ("one", "two")
    )
    assert one[0].startswith("127.")
    assert one[0] != two[0]
    assert one[1:] == ["one", f"file:{kubelet.agents_file}", "-c", "--host", one[0]]


async def test_the_agents_file_names_worker_pods_while_they_are_there(
    kubelet: Kubelet, pod: PodBuilder
) -> None:
    worker = {"cleave.dev/component": "worker"}
    kubelet.run_pod(pod("w", SLEEP, labels=worker))
    kubelet.run_pod(pod("g", SLEEP, labels={"cleave.dev/component": "gateway"}))
    assert kubelet.agents_file.read_text() == f"{status(kubelet, 'w')['podIP']}:9000\n"
    await kubelet.stop_pod("w")
    assert kubelet.agents_file.read_text() == ""


async def test_the_agents_file_names_each_agent_of_a_pod(kubelet: Kubelet, pod: PodBuilder) -> None:
    manifest = pod("w", SLEEP, labels={"cleave.dev/component": "worker"})
    names = {"agent": 9000, "engine": 9001, "agent-1": 9002, "engine-1": 9003}
    (container,) = manifest["spec"]["containers"]
    container["ports"] = [{"name": n, "containerPort": port} for n, port in names.items()]
    kubelet.run_pod(manifest)
    address = status(kubelet, "w")["podIP"]
    assert kubelet.agents_file.read_text() == f"{address}:9000\n{address}:9002\n"


async def test_whole_cores_are_exclusive_and_the_rest_is_shared(
    kubelet: Kubelet, pod: PodBuilder, until: Until
) -> None:
    kubelet.run_pod(pod("gateway", SLEEP))
    await until(lambda: pid_of(kubelet, "gateway"))
    kubelet.run_pod(pod("engine", SLEEP, container=CORE_EACH))
    await until(lambda: pid_of(kubelet, "engine"))
    await until(lambda: os.sched_getaffinity(pid_of(kubelet, "engine") or 0) == {0})
    await until(lambda: os.sched_getaffinity(pid_of(kubelet, "gateway") or 0) == {1})
    await kubelet.stop_pod("engine")
    await until(lambda: os.sched_getaffinity(pid_of(kubelet, "gateway") or 0) == {0, 1})


async def test_a_pod_without_a_free_core_is_refused_in_one_line(
    kubelet: Kubelet, pod: PodBuilder
) -> None:
    kubelet.run_pod(pod("a", SLEEP, container=CORE_EACH))
    kubelet.run_pod(pod("b", SLEEP, container=CORE_EACH))
    with pytest.raises(PodError, match=r"1 exclusive core.* 0 free .*--allow-shared-cores"):
        kubelet.run_pod(pod("c", SLEEP, container=CORE_EACH))
    assert len(kubelet.list_pods()) == 2


async def test_cores_are_shared_when_configured_and_the_pod_gets_the_flag(
    tmp_path: Path, node: LocalNode, pod: PodBuilder, until: Until
) -> None:
    code = "import os; print(os.environ.get('CLEAVE_ALLOW_SHARED_CORES')); " + SLEEP
    async with Kubelet(node, tmp_path / "chat", allow_shared_cores=True) as kubelet:
        for name in "abc":
            kubelet.run_pod(pod(name, code, container=CORE_EACH))
            await until(lambda n=name: printed(kubelet, n) == "1\n")


async def test_gpus_are_given_out_once(tmp_path: Path, pod: PodBuilder, until: Until) -> None:
    gpus = (GpuDevice(0, "H100", 2**36), GpuDevice(1, "H100", 2**36))
    node = LocalNode("here", frozenset({0}), 2**34, gpus)
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES']); " + SLEEP
    one = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    async with Kubelet(node, tmp_path / "chat") as kubelet:
        for name, seen in (("a", "0\n"), ("b", "1\n")):
            kubelet.run_pod(pod(name, code, container=one))
            log = kubelet.get_log_path(name)
            await until(lambda log=log: log.exists() and log.read_text())
            assert log.read_text() == seen
        with pytest.raises(PodError, match="1 GPU"):
            kubelet.run_pod(pod("c", code, container=one))


async def test_a_pod_that_ends_is_started_again_after_a_pause(
    kubelet: Kubelet, pod: PodBuilder, until: Until
) -> None:
    kubelet.run_pod(pod("crash", "raise SystemExit(3)"))
    await until(lambda: "waiting" in container(kubelet, "crash")["state"])
    await until(lambda: container(kubelet, "crash")["lastState"])
    assert container(kubelet, "crash")["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert container(kubelet, "crash")["lastState"]["terminated"]["exitCode"] == 3
    await until(lambda: container(kubelet, "crash")["restartCount"] == 1)


async def test_a_pod_whose_process_cannot_be_started_is_retried(
    kubelet: Kubelet, pod: PodBuilder, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError("too many processes")

        patch.setattr(process, "start_process", full)
        kubelet.run_pod(pod("w", SLEEP))
        await until(lambda: "waiting" in container(kubelet, "w")["state"])
        await until(lambda: "terminated" in container(kubelet, "w")["lastState"])
    ended = container(kubelet, "w")["lastState"]["terminated"]
    assert (ended["exitCode"], ended["reason"]) == (128, "StartError: too many processes")
    await until(lambda: pid_of(kubelet, "w"))


async def test_a_pod_that_is_never_restarted_succeeds_or_fails(
    kubelet: Kubelet, pod: PodBuilder, until: Until
) -> None:
    kubelet.run_pod(pod("good", "", restartPolicy="Never"))
    kubelet.run_pod(pod("bad", "import os; os.kill(os.getpid(), 9)", restartPolicy="Never"))
    await until(lambda: status(kubelet, "good")["phase"] == "Succeeded")
    await until(lambda: status(kubelet, "bad")["phase"] == "Failed")
    assert container(kubelet, "bad")["state"]["terminated"]["exitCode"] == 137


async def test_a_pod_that_ignores_the_signal_is_killed_after_its_grace_with_its_children(
    kubelet: Kubelet, pod: PodBuilder, until: Until
) -> None:
    child = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid)"
    )
    kubelet.run_pod(pod("stubborn", f"{child}; {STUBBORN}", terminationGracePeriodSeconds=1))
    await until(lambda: "up" in printed(kubelet, "stubborn"))
    pid = pid_of(kubelet, "stubborn")
    assert pid is not None
    child_pid = int(kubelet.get_log_path("stubborn").read_text().split()[0])
    await kubelet.stop_pod("stubborn")
    assert not alive(pid)
    await until(lambda: not alive(child_pid))
    assert kubelet.list_pods() == []


async def test_a_second_stop_without_grace_ends_a_slow_one(
    kubelet: Kubelet, pod: PodBuilder, until: Until
) -> None:
    kubelet.run_pod(pod("stubborn", STUBBORN, terminationGracePeriodSeconds=600))
    await until(lambda: printed(kubelet, "stubborn"))
    slow = asyncio.create_task(kubelet.stop_pod("stubborn"))
    await asyncio.sleep(0.1)
    await asyncio.wait_for(kubelet.stop_pod("stubborn", 0), 10)
    await asyncio.wait_for(slow, 10)


async def test_a_pod_is_ready_when_its_probe_says_so(
    kubelet: Kubelet, pod: PodBuilder, until: Until, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    probe = {"httpGet": {"port": "http", "path": "/health"}, "periodSeconds": 0.05}
    kubelet.run_pod(
        pod(
            "web",
            SERVER.format(flag=str(flag)),
            container={
                "env": [POD_IP],
                "ports": [{"name": "http", "containerPort": 8080}],
                "readinessProbe": {**probe, "failureThreshold": 1},
            },
        )
    )
    await until(lambda: container(kubelet, "web")["started"])
    assert not container(kubelet, "web")["ready"]
    flag.touch()
    await until(lambda: container(kubelet, "web")["ready"])
    assert {"type": "Ready", "status": "True"} in status(kubelet, "web")["conditions"]
    flag.unlink()
    await until(lambda: not container(kubelet, "web")["ready"])


async def test_a_container_that_fails_its_liveness_probe_is_restarted(
    kubelet: Kubelet, pod: PodBuilder, until: Until
) -> None:
    probe = {"httpGet": {"port": 8080}, "periodSeconds": 0.05, "failureThreshold": 2}
    kubelet.run_pod(pod("dead", SLEEP, container={"livenessProbe": probe}))
    await until(lambda: container(kubelet, "dead")["restartCount"] == 1)


async def test_an_address_whose_port_is_occupied_is_skipped(
    kubelet: Kubelet, pod: PodBuilder
) -> None:
    """Pods of a kubelet that died may still drain on their addresses."""
    kubelet.run_pod(pod("first", SLEEP))
    prefix, _, host = status(kubelet, "first")["podIP"].rpartition(".")
    with socket.create_server((f"{prefix}.{int(host) + 1}", 8080)):
        kubelet.run_pod(pod("next", SLEEP, container={"ports": [{"containerPort": 8080}]}))
    assert status(kubelet, "next")["podIP"] == f"{prefix}.{int(host) + 2}"


KUBELET_PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from cleave.local.kubelet.kubelet import Kubelet
from cleave.local.kubelet.node import inspect_node

async def main():
    async with Kubelet(inspect_node(), Path(sys.argv[1])) as kubelet:
        kubelet.run_pod(json.loads(sys.argv[2]))
        ((_, state),) = kubelet.list_pod_states()
        while not state.pid:
            await asyncio.sleep(0.01)
        print(state.pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_pods_get_the_signal_when_the_kubelet_is_killed(
    pod: PodBuilder, until: Until, tmp_path: Path
) -> None:
    code = (
        "import signal, sys, time, pathlib\n"
        f"drained = pathlib.Path({str(tmp_path / 'drained')!r})\n"
        "signal.signal(15, lambda *_: (drained.touch(), sys.exit(0)))\n"
        "print('up'); time.sleep(600)"
    )
    args = [str(tmp_path / "chat"), json.dumps(pod("p", code))]
    with subprocess.Popen(  # noqa: ASYNC220 - starting is all that happens here
        [sys.executable, "-c", KUBELET_PROGRAM, *args], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        log = tmp_path / "chat" / "logs" / "p.log"
        await until(lambda: log.exists() and "up" in log.read_text())
        os.kill(program.pid, signal.SIGKILL)
    await until(lambda: not alive(pid))
    assert (tmp_path / "drained").exists()
