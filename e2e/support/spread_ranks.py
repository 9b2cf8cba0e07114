"""Instances whose data-parallel ranks have several pods, beside each other on this machine.

The pods are those of the operator. Each has a loopback address of its own instead of a node, and
its launcher runs as a process; a gateway follows all agents.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool
from cleave.local.kubelet.environment import build_command_line, resolve_env
from cleave.local.kubelet.network import LoopbackNetwork
from cleave.manifests.cell_pod import build_cell_pod
from cleave.manifests.labels import Manifest, get_agent_port
from cleave.manifests.multi_node import LEADER_ENV, build_node_pods
from cleave.manifests.pool import build_pools
from cleave.planner.placement import choose_placement
from cleave.planner.resolved_deployment import resolve_in_cluster
from cleave.rpc.agent_discovery import ENV as AGENTS_ENV
from cleave.rpc.credentials import TOKEN_ENV, Metadata, sign_with_token
from cleave.rpc.v1 import agent_pb2, agent_pb2_grpc

from e2e.support.deployments import until
from e2e.support.engine_keys import remember
from tests.support.ports import find_free_port

_START_S = 120
_END_S = 60


@dataclass
class RunningPod:
    """A launcher, its agents and their engines."""

    manifest: Manifest
    ip: str
    leader_ip: str
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def agents(self) -> list[str]:
        """Addresses of its agents."""
        (container,) = self.manifest["spec"]["containers"]
        ranks = len(container["ports"]) // 2
        return [f"{self.ip}:{get_agent_port(number)}" for number in range(ranks)]

    def start(self, env: dict[str, str]) -> None:
        (container,) = self.manifest["spec"]["containers"]
        meta = self.manifest["metadata"]
        labels = {f"metadata.labels['{key}']": value for key, value in meta["labels"].items()}
        known = {"status.podIP": self.ip, "metadata.name": meta["name"], **labels}
        own = resolve_env(container["env"], known, {AGENTS_ENV: env[AGENTS_ENV]})
        if LEADER_ENV in own:
            # There is no DNS for its host name.
            own[LEADER_ENV] = self.leader_ip
        line = build_command_line(container["command"], own)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                line, env=os.environ | own | env, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self) -> int:
        """Drain it, as the deletion of a pod does; its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_END_S)

    def kill(self) -> None:
        """Kill all its processes, as the loss of a node does."""
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(_END_S)


@dataclass
class SpreadRanks:
    """The pods of all instances of a deployment, and its gateway."""

    name: str
    folder: Path
    url: str
    pods: list[RunningPod] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        """Of all processes."""
        return {
            AGENTS_ENV: f"file:{self.folder / 'agents'}",
            TOKEN_ENV: str(self.folder / "token"),
            "CLEAVE_ALLOW_SHARED_CORES": "1",
        }

    def instances(self) -> dict[str, agent_pb2.Registration]:
        """Registrations of the agents that answer, by instance."""
        found = {}
        for address in self.list_agents():
            with grpc.insecure_channel(address) as channel, suppress(grpc.RpcError):
                stub, request = agent_pb2_grpc.AgentStub(channel), agent_pb2.HealthRequest()
                health = stub.Health(request, timeout=20, metadata=self._sign(address))
                remember(health.registration)
                found[health.registration.instance] = health.registration
        return found

    def list_agents(self) -> list[str]:
        return [agent for pod in self.pods for agent in pod.agents]

    def set_role(self, instance: str, role: "agent_pb2.Role.ValueType") -> None:
        """Set the role of all ranks of an instance, as a gateway's flip does."""
        for name, found in self.instances().items():
            if name.partition(".")[0] != instance:
                continue
            host = found.engine_url.removeprefix("http://").rpartition(":")
            agent = f"{host[0]}:{int(host[2]) - 1}"
            request = agent_pb2.SetRoleRequest(role=role, epoch=found.epoch + 1)
            with grpc.insecure_channel(agent) as channel:
                stub = agent_pb2_grpc.AgentStub(channel)
                stub.SetRole(request, timeout=60, metadata=self._sign(agent))

    def are_verified(self, count: int) -> bool:
        """Whether so many ranks are ready, and have handed KV over if there are peers."""
        ready = agent_pb2.STATE_READY
        found = self.instances().values()
        return len(found) == count and all(
            each.state == ready and each.kv_path.verified for each in found
        )

    def _sign(self, address: str) -> Metadata:
        return sign_with_token(self.folder / "token", address)


@contextmanager
def spread(manifest: dict[str, Any], folder: Path, nodes: int = 2) -> Iterator[SpreadRanks]:
    """Start all instances of a deployment with each one's ranks on so many nodes, and a gateway;
    end them afterwards."""
    with closing(LoopbackNetwork(manifest["metadata"]["name"])) as network:
        yield from _run(manifest, folder, nodes, network)


def _run(
    manifest: dict[str, Any], folder: Path, nodes: int, network: LoopbackNetwork
) -> Iterator[SpreadRanks]:
    folder.mkdir()
    (folder / "token").write_text("secret")
    deployment = LLMDeployment.model_validate(manifest)
    found = SpreadRanks(deployment.name, folder, f"http://127.0.0.1:{find_free_port()}")
    resolved = resolve_in_cluster(deployment)
    for pool in build_pools(resolved, choose_placement(resolved)):
        wide = pool.model_copy(update={"spec": pool.spec.model_copy(update={"nodes": nodes})})
        for number in range(pool.spec.replicas):
            found.pods += _build_pods(wide, number, folder, network)
    (folder / "agents").write_text("\n".join(found.list_agents()))
    port = found.url.rpartition(":")[2]
    command = [sys.executable, "-m", "cleave.gateway.main", "--deployment", deployment.name]
    command += ["--agents", f"file:{folder / 'agents'}", "--flipping", "Off"]
    command += ["--port", port, "--internal-port", str(find_free_port())]
    with (folder / "gateway.log").open("wb") as log:
        gateway = subprocess.Popen(command, env=os.environ | found.env, stdout=log, stderr=log)
    try:
        for pod in found.pods:
            pod.start(found.env)
        until(lambda: _is_alive(found.url), _START_S, "the gateway answers")
        yield found
    finally:
        for pod in found.pods:
            if pod.process is not None and pod.process.poll() is None:
                pod.process.send_signal(signal.SIGTERM)
        gateway.terminate()
        for pod in found.pods:
            if pod.process is not None:
                with suppress(subprocess.TimeoutExpired):
                    pod.process.wait(_END_S)
                pod.kill()
        gateway.wait(_END_S)


def _build_pods(
    pool: InstancePool, number: int, folder: Path, network: LoopbackNetwork
) -> list[RunningPod]:
    first = build_cell_pod(pool, number, device="cpu")
    manifests = [first, *build_node_pods(pool, first, device="cpu")]
    ports = [each["containerPort"] for each in first["spec"]["containers"][0]["ports"]]
    ips = [network.allocate(ports) for _ in manifests]
    return [
        RunningPod(each, ip, ips[0], folder / f"{each['metadata']['name']}.log")
        for each, ip in zip(manifests, ips, strict=True)
    ]


def _is_alive(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
