"""The process kubelet: runs Kubernetes v1 Pods as processes of this machine.

`cleave up` and end-to-end tests give it the same manifests a cluster would get. It offers what pods
need of a kubelet: an address per pod, the downward API, exclusive cores, probes, restarts,
graceful termination. `<state>/agents` is its DNS: one ip:9000 per worker pod, rewritten at each
change.
The pure modules beside this one decide; this one only assigns addresses, cores and GPUs to pods
and frees them again. What is hard: these assignments must always match the set of pods.
"""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from cleave.local import files
from cleave.local.kubelet import cpu_manager, environment, logs
from cleave.local.kubelet.network import HOST_IP, AddressShortageError, Network, busy_ports
from cleave.local.kubelet.node import Gpu, Node
from cleave.local.kubelet.pod_spec import PodError, PodSpec, parse
from cleave.local.kubelet.pod_status import Facts, status
from cleave.local.kubelet.pod_worker import Command, PodLife
from cleave.manifests.labels import AGENT_PORT, COMPONENT, WORKER, Manifest
from cleave.rpc import agent_discovery

SHARED_CORES_ENV = "CLEAVE_ALLOW_SHARED_CORES"
_HOUSEKEEPING_S = 5.0


class Kubelet:
    """Runs pods until closed; an async context manager, used from one event loop."""

    def __init__(
        self,
        node: Node,
        state: Path,
        *,
        allow_shared_cores: bool = False,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._node = node
        self._state = state
        self._allow_shared_cores = allow_shared_cores
        self._changed = changed
        self._manifests: dict[str, Manifest] = {}
        self._lives: dict[str, PodLife] = {}
        self._own_cores: dict[str, frozenset[int]] = {}
        self._own_gpus: dict[str, frozenset[Gpu]] = {}
        self._housekeeping: asyncio.Task[None] | None = None

    @property
    def agents_file(self) -> Path:
        """Addresses of all agents, for CLEAVE_AGENTS."""
        return self._state / "agents"

    async def __aenter__(self) -> Self:
        files.private_folder(self._state / "logs")
        self._network = Network(self._state.name)
        self._publish()
        self._housekeeping = asyncio.create_task(self._keep_house())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await asyncio.gather(*(self.stop(name) for name in list(self._lives)))
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
        self._network.close()

    def run(self, pod: Manifest) -> None:
        """Admit `pod` and start it. Raises PodError when this machine cannot run it."""
        spec = parse(pod)
        if spec.name in self._lives:
            raise PodError(f"pod {spec.name} is already running")
        address = self._address(spec)
        try:
            own_cores, own_gpus = self._own(spec)
            command = self._command(spec, address, own_gpus)
        except PodError:
            self._network.give_back(address)
            raise
        self._manifests[spec.name] = pod
        self._own_cores[spec.name], self._own_gpus[spec.name] = own_cores, own_gpus
        facts = Facts(pod_ip=address, admitted_at=time.time())
        pod_cores = own_cores or self._shared_cores()
        self._lives[spec.name] = PodLife(spec, facts, command, pod_cores, self._changed)
        self._settle()

    async def stop(self, name: str, grace_s: float | None = None) -> None:
        """Stop a pod and remove it; its processes have ended on return. Ignores unknown names."""
        life = self._lives.get(name)
        if life is None:
            return
        await life.stop(grace_s)
        if self._lives.pop(name, None) is None:
            return  # a concurrent call has removed it
        self._network.give_back(life.facts.pod_ip)
        for assignments in (self._manifests, self._own_cores, self._own_gpus):
            assignments.pop(name, None)
        self._settle()

    def pods(self) -> list[Manifest]:
        """Manifests of all pods with their status."""
        return [
            {**self._manifests[name], "status": status(life.spec, life.facts)}
            for name, life in self._lives.items()
        ]

    def observed(self) -> list[tuple[PodSpec, Facts]]:
        """Specs of all pods and what was observed of them."""
        return [(life.spec, life.facts) for life in self._lives.values()]

    def log(self, name: str) -> Path:
        """The log file of pod `name`."""
        return self._state / "logs" / f"{name}.log"

    def _address(self, spec: PodSpec) -> str:
        if spec.host_network:
            if busy := busy_ports(HOST_IP, spec.ports):
                raise PodError(f"pod {spec.name}: port {busy[0]} of {HOST_IP} is in use")
            return HOST_IP
        try:
            return self._network.take(spec.ports)
        except AddressShortageError as error:
            raise PodError(f"pod {spec.name}: {error}") from error

    def _own(self, spec: PodSpec) -> tuple[frozenset[int], frozenset[Gpu]]:
        free_gpus = sorted(
            set(self._node.gpus).difference(*self._own_gpus.values()), key=lambda gpu: gpu.index
        )
        if spec.gpus > len(free_gpus):
            raise PodError(f"pod {spec.name}: {spec.gpus} GPU(s) needed, {len(free_gpus)} free")
        return self._exclusive_cores(spec), frozenset(free_gpus[: spec.gpus])

    def _exclusive_cores(self, spec: PodSpec) -> frozenset[int]:
        free = self._node.free_cores.difference(*self._own_cores.values())
        try:
            return cpu_manager.allocate(free, spec.exclusive_cores)
        except cpu_manager.CoreShortageError as error:
            if self._allow_shared_cores:
                return frozenset()
            raise PodError(
                f"pod {spec.name}: {error} of {len(self._node.cores)}; "
                "use --allow-shared-cores to share them (slower, unreliable timings)"
            ) from error

    def _command(self, spec: PodSpec, address: str, own_gpus: frozenset[Gpu]) -> Command:
        fields = environment.fields(spec, address, HOST_IP, self._node.name)
        env = environment.resolve(spec.env, fields, self._overrides(own_gpus))
        argv = environment.command_line(spec.command, env)
        return Command(argv, {**os.environ, **env}, self.log(spec.name))

    def _overrides(self, own_gpus: frozenset[Gpu]) -> dict[str, str]:
        overrides = {agent_discovery.ENV: f"file:{self.agents_file}"}
        if self._allow_shared_cores:
            # Set it for all pods: one that shares may have locked a core assigned to another.
            overrides[SHARED_CORES_ENV] = "1"
        if self._node.gpus:
            indices = sorted(gpu.index for gpu in own_gpus)
            overrides["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, indices))
        return overrides

    def _shared_cores(self) -> frozenset[int]:
        exclusive = self._node.held_cores.union(*self._own_cores.values())
        return cpu_manager.shared(self._node.cores, exclusive)

    def _settle(self) -> None:
        """Update shared cores and the list of agents after the set of pods has changed."""
        shared = self._shared_cores()
        for name, life in self._lives.items():
            if not self._own_cores[name] and life.cores != shared:
                life.place(shared)
        self._publish()
        self._changed()

    def _publish(self) -> None:
        agents = sorted(
            f"{life.facts.pod_ip}:{AGENT_PORT}"
            for life in self._lives.values()
            if life.spec.labels.get(COMPONENT) == WORKER
        )
        files.replace(self.agents_file, "".join(f"{agent}\n" for agent in agents))

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            for life in self._lives.values():
                logs.bound(life.log)
