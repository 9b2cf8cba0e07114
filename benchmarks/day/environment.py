"""The fleet's machines: a real control plane with the operator as its chart installs it, nodes that
run pods as processes, and a Prometheus that finds and scrapes them as it would anywhere."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployment import (
    GPUS_PER_INSTANCE,
    INSTANCE_CPUS,
    INSTANCES,
    NAME,
    NODE_ROLE,
    WORKER_NODE,
)

from cleave.manifests.labels import GATEWAY_PORT

from e2e.cluster.cluster import Cluster, opened, wait_until
from e2e.cluster.nodes import Nodes, Shape
from e2e.support.prometheus import Prometheus, find_programs, pod_jobs, running

ROOT = Path(__file__).parents[2]
SYSTEM = "cleave-system"
NAMESPACE = "default"
PER_NODE = 2
"""Instances that a node has room for: with four GPUs each, eight GPUs."""
READY_S = 180.0
WATCH_S = 2
"""Between two looks at the gateways' counts; 15 in days of 24 hours."""
_OTHERS = Shape("others", gpus=0, cpus=32)
"""Where operator and gateways run."""
_LOAD_START_S = 120.0


@dataclass(frozen=True)
class Stage:
    """A cluster with an operator, without a deployment."""

    cluster: Cluster
    nodes: Nodes
    prometheus: Prometheus
    lost: list[Shape] = field(default_factory=list)
    """Nodes that do not run at the moment."""

    @contextmanager
    def serving(self, manifest: dict[str, Any]) -> Iterator[None]:
        """A deployment, ready; nothing of it is left afterwards, and every node is back."""
        self.cluster.apply(manifest)
        try:
            self.until_ready()
            yield
        finally:
            # First, for what ran on a lost node is gone only when the node says so.
            self.nodes.add(*(self.lost.pop() for _ in list(self.lost)))
            self.cluster.kubectl("delete", "llmd", NAME, timeout_s=READY_S)

    def change(self, manifest: dict[str, Any]) -> None:
        """Another placement, ready when this returns."""
        self.cluster.apply(manifest)
        self.until_ready()

    def until_ready(self) -> None:
        """Wait until the desired pods are ready and every gateway knows them."""
        wait_until(self._is_ready, READY_S, "the deployment is ready")

    def lose_node(self) -> None:
        """The node with the most instances, its processes killed at once."""
        pods = self._workers()
        names = [pod["spec"]["nodeName"] for pod in pods if "nodeName" in pod["spec"]]
        lost = max(sorted(set(names)), key=names.count)
        self.nodes.lose(lost)
        self.lost.extend(shape for shape in _worker_nodes() if shape.name == lost)

    def gateways(self) -> list[str]:
        """URLs of the gateways that are ready."""
        found = self.cluster.list("pods", NAMESPACE, "cleave.dev/component=gateway")
        return [
            f"http://{pod['status']['podIP']}:{GATEWAY_PORT}" for pod in found if _is_ready(pod)
        ]

    def status(self) -> dict[str, Any]:
        """Of the deployment."""
        found = self.cluster.get("llmd", NAME, NAMESPACE) or {}
        return dict(found.get("status", {}))

    def events(self) -> str:
        """What Kubernetes keeps of what went on."""
        return self.cluster.kubectl("get", "events", "-n", NAMESPACE, "--sort-by=.lastTimestamp")

    def load(self, trace: Path, seen: Path, time_scale: float) -> "subprocess.Popen[str]":
        """A process that asks as `trace` says; it has begun when this returns."""
        process = subprocess.Popen(
            [
                *(sys.executable, str(Path(__file__).with_name("clients.py"))),
                *(str(trace), str(seen), str(time_scale), *self.gateways()),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"the load does not start: exit code {process.wait(_LOAD_START_S)}")
        return process

    def _workers(self) -> list[dict[str, Any]]:
        selector = "cleave.dev/component=worker"
        return self.cluster.list("pods", NAMESPACE, selector)

    def _is_ready(self) -> bool:
        found = self.cluster.get("llmd", NAME, NAMESPACE) or {"metadata": {}}
        status = found.get("status", {})
        conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
        return (
            status.get("observedGeneration") == found["metadata"].get("generation")
            and conditions.get("Ready") == "True"
            and conditions.get("Progressing") != "True"
            and len(self.gateways()) == 2
            and all(_is_ready(pod) for pod in self._workers())
        )


@contextmanager
def opened_stage(folder: Path) -> Iterator[Stage]:
    """A stage of its own, its data and logs in `folder`; it ends with the block."""
    programs = find_programs(build=True)
    assert programs is not None
    with opened(folder) as cluster:
        assert cluster.nodes is not None
        cluster.nodes.add(_OTHERS, *_worker_nodes())
        with (
            _operator(cluster),
            running(programs, folder / "prometheus", pod_jobs(cluster.kubeconfig)) as found,
        ):
            yield Stage(cluster, cluster.nodes, found)


@contextmanager
def _operator(cluster: Cluster) -> Iterator[None]:
    cluster.helm(
        *("install", "cleave", str(ROOT / "charts" / "cleave"), "-n", SYSTEM),
        *("--create-namespace", "--wait", "--timeout", "120s", "--set", "operator.replicas=1"),
        *("--set", f"operator.args={{--watch-interval={WATCH_S}}}"),
        timeout_s=150,
    )
    yield


def _worker_nodes() -> list[Shape]:
    taint = {"key": NODE_ROLE, "value": WORKER_NODE, "effect": "NoSchedule"}
    return [
        Shape(
            f"node-{index}",
            gpus=PER_NODE * GPUS_PER_INSTANCE,
            cpus=int(PER_NODE * INSTANCE_CPUS),
            labels={NODE_ROLE: WORKER_NODE},
            taints=[taint],
        )
        for index in range(INSTANCES // PER_NODE)
    ]


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def log_line(line: str) -> None:
    """Progress, beside the results."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")


def write_json(file: Path, content: object) -> None:
    """For people and other programs."""
    file.write_text(json.dumps(content, indent=2) + "\n")
