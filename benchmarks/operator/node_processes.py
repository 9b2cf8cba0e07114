"""The nodes of a trial, each kind in a process of its own.

- `fake`: one process answers for all nodes and reports every pod ready at once.
- `hollow`: kubelets of kubemark, all in one process (`go/main.go`).
- `process`: the nodes of end-to-end tests, which run every pod as a process.

With the first two no pod runs; a further process answers for their gateways.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.nodes import Nodes, gpu_node, manifest
from e2e.cluster.tools import REPOSITORY

KINDS = ("fake", "hollow", "process")
NODE_USER = "system:node:hollow"
_ADDRESS = "10.77.0.1"
_BUILD_TIMEOUT_S = 3600
_STOP_S = 10
_HERE = Path(__file__).parent


@contextmanager
def run_nodes(
    kind: str, count: int, control_plane: ControlPlane, folder: Path
) -> Iterator[Mapping[str, psutil.Process]]:
    """So many nodes of this kind, and what belongs to them; yields their processes by name."""
    kubeconfig = str(control_plane.kubeconfig())
    if kind == "process":
        with Nodes(control_plane.kubeconfig(), folder / "nodes") as nodes:
            nodes.add(*(gpu_node(f"node-{n}") for n in range(count)))
            yield {"nodes": nodes.process}
        return
    if kind == "fake":
        command = [sys.executable, str(_HERE / "fake_nodes.py"), kubeconfig, str(count)]
    else:
        command = _build_hollow_command(control_plane, count)
    gateways = [sys.executable, str(_HERE / "fake_gateways.py"), kubeconfig]
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(_run(name, each, folder))
            for name, each in (("nodes", command), ("gateways", gateways))
        }


def _build_hollow_command(control_plane: ControlPlane, count: int) -> list[str]:
    built = subprocess.run(
        [REPOSITORY / "scripts" / "hollow-nodes"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=_BUILD_TIMEOUT_S,
        check=True,
    )
    # A kubelet looks for its node's address among those of the machine.
    subprocess.run(["ip", "addr", "replace", f"{_ADDRESS}/32", "dev", "lo"], check=True)
    shape = gpu_node("")
    labels = manifest(shape, _ADDRESS)["metadata"]["labels"]
    own = {name: text for name, text in labels.items() if not name.startswith("kubernetes.io/")}
    devices = {name: count for name, count in shape.resources.items() if "/" in name}
    return [
        built.stdout.strip(),
        *("-kubeconfig", str(control_plane.kubeconfig(NODE_USER, ["system:nodes"]))),
        *("-nodes", str(count), "-address", _ADDRESS),
        *("-labels", _join(own), "-devices", _join(devices)),
    ]


def _join(pairs: Mapping[str, str]) -> str:
    return ",".join(f"{name}={text}" for name, text in pairs.items())


@contextmanager
def _run(name: str, command: Sequence[str], folder: Path) -> Iterator[psutil.Process]:
    """A process that says a line when it is ready, and ends with its standard input."""
    path = folder / f"{name}.log"
    with path.open("ab") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"{name} does not start:\n{path.read_text()[-2_000:]}")
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait(_STOP_S)
