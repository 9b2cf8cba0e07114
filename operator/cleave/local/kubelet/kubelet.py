"""The process kubelet: runs Kubernetes v1 Pods as processes of this machine.

`cleave up` and end-to-end tests give it the same manifests a cluster would get. It provides the
kubelet features that pods need: an address per pod, the downward API, exclusive cores, probes,
restarts, graceful termination. `<state>/agents` is its DNS: ip:port of each agent of each worker
pod, rewritten at each change and when it was damaged. The pure modules beside this one decide; this
one only assigns addresses, cores and GPUs to pods and frees them again. These assignments must
always match the set of pods.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from cleave.local import files
from cleave.local.files import OwnedFiles
from cleave.local.kubelet import environment, logs, network
from cleave.local.kubelet.network import HOST_IP, AddressShortageError
from cleave.local.kubelet.node import GpuDevice, LocalNode
from cleave.local.kubelet.pod_spec import PodError, PodSpec, parse_pod
from cleave.local.kubelet.pod_status import PodState, build_status
from cleave.local.kubelet.pod_worker import ContainerCommand, PodWorker
from cleave.manifests.labels import COMPONENT, WORKER, Manifest
from cleave.rpc import agent_discovery
from cleave.rpc.credentials import TOKEN_ENV

SHARED_CORES_ENV = "CLEAVE_ALLOW_SHARED_CORES"
_HOUSEKEEPING_INTERVAL_S = 1.0


class CoreShortageError(ValueError):
    """A pod requests more exclusive cores than are free."""


def allocate_cores(free: frozenset[int], count: int) -> frozenset[int]:
    """The `count` lowest of the `free` cores. Raises CoreShortageError."""
    if count > len(free):
        raise CoreShortageError(f"{count} exclusive core(s) needed, {len(free)} free")
    return frozenset(sorted(free)[:count])


def get_shared_cores(cores: frozenset[int], exclusive: frozenset[int]) -> frozenset[int]:
    """The cores of pods without exclusive ones.

    Kubernetes reserves cores for them. A small machine may have none left, so when every core is
    exclusive they run on all cores: the gateway then competes with engines but still runs.
    """
    return cores - exclusive or cores


class Kubelet:
    """Runs pods until closed; an async context manager, used from one event loop."""

    def __init__(
        self,
        node: LocalNode,
        state: Path,
        allow_shared_cores: bool = False,
        on_change: Callable[[], None] = lambda: None,
        owned: OwnedFiles | None = None,
    ) -> None:
        """`owned`: further files that it restores while it runs."""
        self._node = node
        self._state = state
        self._allow_shared_cores = allow_shared_cores
        self._on_change = on_change
        self._owned = owned or OwnedFiles()
        self._manifests: dict[str, Manifest] = {}
        self._pod_workers: dict[str, PodWorker] = {}
        self._assigned_cores: dict[str, frozenset[int]] = {}
        self._assigned_gpus: dict[str, frozenset[GpuDevice]] = {}
        self._housekeeping_task: asyncio.Task[None] | None = None

    @property
    def agents_file(self) -> Path:
        """Addresses of all agents, for CLEAVE_AGENTS."""
        return self._state / "agents"

    async def __aenter__(self) -> Self:
        files.create_private_folder(self._state / "logs")
        self._owned.write(self._state / files.TOKEN_FILE, secrets.token_hex(32))
        self._network = network.LoopbackNetwork(self._state.name)
        self._write_agents_file()
        self._housekeeping_task = asyncio.create_task(self._run_housekeeping())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await asyncio.gather(*(self.stop_pod(name) for name in list(self._pod_workers)))
        if self._housekeeping_task is not None:
            self._housekeeping_task.cancel()
            await asyncio.gather(self._housekeeping_task, return_exceptions=True)
        self._network.close()

    def run_pod(self, pod: Manifest) -> None:
        """Admit `pod` and start it. Raises PodError when this machine cannot run it."""
        spec = parse_pod(pod)
        if spec.name in self._pod_workers:
            raise PodError(f"pod {spec.name} is already running")
        address = self._allocate_address(spec)
        try:
            own_cores, own_gpus = self._allocate_resources(spec)
            command = self._build_command(spec, address, own_gpus)
        except PodError:
            self._network.release(address)
            raise
        self._manifests[spec.name] = pod
        self._assigned_cores[spec.name], self._assigned_gpus[spec.name] = own_cores, own_gpus
        state = PodState(pod_ip=address, admitted_at=time.time())
        cores = own_cores or self._get_shared_cores()
        self._pod_workers[spec.name] = PodWorker(spec, state, command, cores, self._on_change)
        self._sync_pods()

    async def stop_pod(self, name: str, grace_s: float | None = None) -> None:
        """Stop a pod and remove it; its processes have ended on return. Ignores unknown names."""
        life = self._pod_workers.get(name)
        if life is None:
            return
        await life.stop(grace_s)
        if self._pod_workers.pop(name, None) is None:
            return  # A concurrent call has removed it.
        self._network.release(life.state.pod_ip)
        for assignments in (self._manifests, self._assigned_cores, self._assigned_gpus):
            assignments.pop(name, None)
        self._sync_pods()

    def list_pods(self) -> list[Manifest]:
        """Manifests of all pods with their status."""
        return [
            {**self._manifests[name], "status": build_status(life.spec, life.state)}
            for name, life in self._pod_workers.items()
        ]

    def list_pod_states(self) -> list[tuple[PodSpec, PodState]]:
        """Specs and observed states of all pods."""
        return [(life.spec, life.state) for life in self._pod_workers.values()]

    def get_log_path(self, name: str) -> Path:
        """The log file of pod `name`."""
        return self._state / "logs" / f"{name}.log"

    def _allocate_address(self, spec: PodSpec) -> str:
        if spec.host_network:
            if busy := network.find_busy_ports(HOST_IP, spec.ports):
                raise PodError(f"pod {spec.name}: port {busy[0]} of {HOST_IP} is in use")
            return HOST_IP
        try:
            return self._network.allocate(spec.ports)
        except AddressShortageError as error:
            raise PodError(f"pod {spec.name}: {error}") from error

    def _allocate_resources(self, spec: PodSpec) -> tuple[frozenset[int], frozenset[GpuDevice]]:
        unassigned = set(self._node.gpus).difference(*self._assigned_gpus.values())
        free_gpus = sorted(unassigned, key=lambda gpu: gpu.index)
        if spec.gpus > len(free_gpus):
            raise PodError(f"pod {spec.name}: {spec.gpus} GPU(s) needed, {len(free_gpus)} free")
        return self._allocate_cores(spec), frozenset(free_gpus[: spec.gpus])

    def _allocate_cores(self, spec: PodSpec) -> frozenset[int]:
        free = self._node.free_cores.difference(*self._assigned_cores.values())
        try:
            return allocate_cores(free, spec.exclusive_cores)
        except CoreShortageError as error:
            if self._allow_shared_cores:
                return frozenset()
            raise PodError(
                f"pod {spec.name}: {error} of {len(self._node.cores)}; "
                "use --allow-shared-cores to share them (slower, unreliable timings)"
            ) from error

    def _build_command(
        self, spec: PodSpec, address: str, own_gpus: frozenset[GpuDevice]
    ) -> ContainerCommand:
        fields = environment.build_downward_api_fields(spec, address, HOST_IP, self._node.name)
        env = environment.resolve_env(spec.env, fields, self._build_env_overrides(own_gpus))
        argv = environment.build_command_line(spec.command, env)
        return ContainerCommand(argv, {**os.environ, **env}, self.get_log_path(spec.name))

    def _build_env_overrides(self, own_gpus: frozenset[GpuDevice]) -> dict[str, str]:
        overrides = {
            agent_discovery.ENV: f"file:{self.agents_file}",
            TOKEN_ENV: str(self._state / files.TOKEN_FILE),
        }
        if self._allow_shared_cores:
            # Set it for all pods: one that shares may have locked a core assigned to another.
            overrides[SHARED_CORES_ENV] = "1"
        if self._node.gpus:
            indices = sorted(gpu.index for gpu in own_gpus)
            overrides["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, indices))
        return overrides

    def _get_shared_cores(self) -> frozenset[int]:
        exclusive = self._node.held_cores.union(*self._assigned_cores.values())
        return get_shared_cores(self._node.cores, exclusive)

    def _sync_pods(self) -> None:
        """Update shared cores and the list of agents after the set of pods has changed."""
        shared = self._get_shared_cores()
        for name, life in self._pod_workers.items():
            if not self._assigned_cores[name] and life.cores != shared:
                life.set_cores(shared)
        self._write_agents_file()
        self._on_change()

    def _write_agents_file(self) -> None:
        agents = sorted(
            f"{life.state.pod_ip}:{port}"
            for life in self._pod_workers.values()
            if life.spec.labels.get(COMPONENT) == WORKER
            for port in life.spec.agent_ports
        )
        self._owned.write(self.agents_file, "".join(f"{agent}\n" for agent in agents))

    async def _run_housekeeping(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_INTERVAL_S)
            self._owned.restore()
            for life in self._pod_workers.values():
                logs.rotate(life.log)
