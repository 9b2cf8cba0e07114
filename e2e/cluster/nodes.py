"""Nodes for a test cluster: what they offer, and the handle by which a test adds and loses them.

The nodes themselves live in one process (`e2e.cluster.kubelet`) that follows this one's orders on
its standard input and ends when that closes.
"""

import dataclasses
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from e2e.cluster.client import Manifest
from e2e.cluster.tools import REPOSITORY

_ANSWER_TIMEOUT_S = 30


@dataclass(frozen=True)
class Shape:
    """What a node offers and how it is labelled."""

    name: str
    gpus: int = 8
    product: str = "NVIDIA-H100-80GB-HBM3"
    gpu_memory_mib: int = 81559
    cpus: int = 96
    memory_gib: int = 1024
    rdma_units: int = 0
    devices: Mapping[str, str] = field(default_factory=dict)
    """Further resources."""
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Manifest] = ()

    @property
    def resources(self) -> dict[str, str]:
        """Capacity, of which everything may be used."""
        gpus = {"nvidia.com/gpu": str(self.gpus)} if self.gpus else {}
        cards = {"rdma/hca": str(self.rdma_units)} if self.rdma_units else {}
        shared = {"cpu": str(self.cpus), "memory": f"{self.memory_gib}Gi", "pods": "250"}
        shared["ephemeral-storage"] = "4Ti"
        return shared | gpus | cards | dict(self.devices)


def gpu_node(
    name: str, *, clique: str = "", zone: str = "a", rack: str = "1", infiniband: bool = True,
    gpus: int = 8, product: str = "NVIDIA-H100-80GB-HBM3", gpu_memory_mib: int = 81559,
) -> Shape:  # fmt: skip
    """A node with GPUs, labelled as NVIDIA's and the cloud's tools label theirs."""
    labels = {
        "topology.kubernetes.io/region": "test",
        "topology.kubernetes.io/zone": zone,
        "topology.kubernetes.io/rack": rack,
        "feature.node.kubernetes.io/rdma.capable": str(infiniband).lower(),
    }
    if infiniband:
        labels["feature.node.kubernetes.io/pci-15b3.present"] = "true"
    if clique:
        labels["nvidia.com/gpu.clique"] = clique
    units = 1000 if infiniband else 0
    return Shape(name, gpus, product, gpu_memory_mib, rdma_units=units, labels=labels)


def manifest(shape: Shape, address: str) -> Manifest:
    """The Node object, ready."""
    labels = {
        "kubernetes.io/hostname": shape.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        **shape.labels,
    }
    if shape.gpus:
        labels |= {
            "nvidia.com/gpu.present": "true",
            "nvidia.com/gpu.product": shape.product,
            "nvidia.com/gpu.count": str(shape.gpus),
            "nvidia.com/gpu.memory": str(shape.gpu_memory_mib),
        }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": shape.name, "labels": labels},
        "spec": {"taints": list(shape.taints)} if shape.taints else {},
        "status": {
            "capacity": shape.resources,
            "allocatable": shape.resources,
            "addresses": [
                {"type": "InternalIP", "address": address},
                {"type": "Hostname", "address": shape.name},
            ],
            "conditions": [
                {"type": "Ready", "status": "True", "reason": "KubeletReady"},
                *(
                    {"type": kind, "status": "False", "reason": "KubeletHasEnough"}
                    for kind in ("MemoryPressure", "DiskPressure", "PIDPressure")
                ),
            ],
            "nodeInfo": {
                "kubeletVersion": "v1.36.4", "operatingSystem": "linux", "architecture": "amd64",
                "bootID": "", "containerRuntimeVersion": "process://1", "kernelVersion": "",
                "kubeProxyVersion": "", "machineID": "", "osImage": "", "systemUUID": "",
            },
        },
    }  # fmt: skip


class Nodes:
    """Nodes that run pods as processes of this machine; a context manager."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self._kubeconfig = kubeconfig
        self.folder = folder

    def __enter__(self) -> Self:
        (self.folder / "pods").mkdir(parents=True, exist_ok=True)
        (self.folder / "hosts").write_text(Path("/etc/hosts").read_text())
        with (self.folder / "kubelet.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "e2e.cluster.kubelet", self._kubeconfig, self.folder],
                env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                start_new_session=True,
            )
        self._expect("ready")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_ANSWER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def process(self) -> psutil.Process:
        """That of all nodes; pods are its children."""
        return psutil.Process(self._process.pid)

    def add(self, *shapes: Shape) -> None:
        """Register nodes and let them run pods. Adding a lost node brings it back."""
        for shape in shapes:
            self._order("add", dataclasses.asdict(shape))

    def install(self, tag: str, sources: Path) -> None:
        """Let pods whose image has this tag run another version of Cleave."""
        (self.folder / "versions").mkdir(exist_ok=True)
        link = self.folder / "versions" / tag
        # A test that runs again has extracted them again.
        link.unlink(missing_ok=True)
        link.symlink_to(sources)

    def lose(self, name: str) -> None:
        """Kill a node's processes and let it be silent from now on."""
        self._order("lose", name)

    def kill(self, pod: str) -> None:
        """SIGKILL a pod's process, as the kernel does when memory is short; it is restarted."""
        self._order("kill", pod)

    def log(self, pod: str) -> str:
        """What the pods of this name have written, all of them."""
        logs = sorted((self.folder / "pods").glob(f"*_{pod}_*.log"))
        return "".join(log.read_text(errors="replace") for log in logs)

    def _order(self, verb: str, what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, what]) + "\n")
        self._expect("done")

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], _ANSWER_TIMEOUT_S)
        answer = self._process.stdout.readline().strip() if readable else "nothing"
        if answer != word:
            log = (self.folder / "kubelet.log").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the nodes' process said {answer!r} instead of {word!r}:\n{log}")
