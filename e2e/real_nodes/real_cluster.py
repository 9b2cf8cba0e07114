"""A control plane with two real nodes, for tests inside `e2e.real_nodes.sandbox`.

Opened by `e2e.cluster.cluster.opened`. Ready when both nodes are and DNS answers; images of Cleave
are imported from the archives that scripts/images has written.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from e2e.cluster import tools
from e2e.cluster.control_plane import ControlPlane
from e2e.real_nodes import network
from e2e.real_nodes.image_archive import write_archive
from e2e.real_nodes.network_policies import enforced
from e2e.real_nodes.node_host import HostPlan
from e2e.real_nodes.sandbox import FOLDER_VARIABLE

ARCHIVES_VARIABLE = "CLEAVE_ARCHIVES"
"""Environment variable with the folders of archives to import, separated by colons."""
NODES = ("node-a", "node-b")
_hosts: dict[str, subprocess.Popen[bytes]] = {}
"""The process of each node, by name."""
_PLAN_FILE = "plan.json"
_READY_TIMEOUT = "180s"
_END_TIMEOUT_S = 20
_BUILD_TIMEOUT_S = 3600


@contextmanager
def open_real_cluster(programs: Path, folder: Path) -> Iterator[ControlPlane]:
    """A control plane whose nodes are ready; logs go below `folder`. Raises RuntimeError."""
    state = Path(os.environ[FOLDER_VARIABLE])
    node_programs = _build_programs()
    archives = [*_write_small_images(node_programs, state), *_find_archives()]
    network.make_network(NODES)
    with ExitStack() as stack:
        control_plane = stack.enter_context(ControlPlane(programs, folder, network.GATEWAY))
        proxy = control_plane.kubeconfig("system:kube-proxy", [])
        for index, name in enumerate(NODES):
            address = network.build_address(index)
            plan = HostPlan(
                name=name,
                address=address,
                pod_network=network.build_pod_network(index),
                programs=str(node_programs),
                folder=str(state / name),
                logs=str(control_plane.logs),
                pki=str(control_plane.pki),
                kubeconfig=str(control_plane.register_node(name, address)),
                proxy_kubeconfig=str(proxy),
                images=tuple(map(str, archives)),
                has_static_cpus=name == NODES[-1],
            )
            stack.enter_context(_started(plan))
        _wait_for_nodes(programs, control_plane.kubeconfig())
        for index, name in enumerate(NODES):
            log = control_plane.logs / f"{name}-kube-router.log"
            address, admin = network.build_address(index), control_plane.kubeconfig()
            stack.enter_context(enforced(node_programs, name, address, admin, log))
        _install_dns(programs, control_plane.kubeconfig())
        yield control_plane


def _build_programs() -> Path:
    done = subprocess.run(
        [tools.REPOSITORY / "scripts" / "node-tools"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=_BUILD_TIMEOUT_S,
        check=True,
    )
    return Path(done.stdout.strip())


def _write_small_images(programs: Path, folder: Path) -> Iterator[Path]:
    for program in ("pause", "dns"):
        archive = folder / f"{program}.tar"
        write_archive(programs / program, f"localhost/{program}:1", archive)
        yield archive


def _find_archives() -> list[Path]:
    folders = filter(None, os.environ.get(ARCHIVES_VARIABLE, "").split(os.pathsep))
    return [archive for folder in folders for archive in sorted(Path(folder).glob("*.tar"))]


@contextmanager
def _started(plan: HostPlan) -> Iterator[None]:
    """A node's processes in namespaces of their own; what outlives them ends with the sandbox."""
    Path(plan.folder).mkdir()
    (Path(plan.folder) / _PLAN_FILE).write_text(json.dumps(dataclasses.asdict(plan)))
    start_node(plan.name)
    try:
        yield
    finally:
        process = _hosts.pop(plan.name)
        process.terminate()
        process.wait(_END_TIMEOUT_S)


def start_node(name: str) -> None:
    """Start a node, also one whose processes were killed: it boots with its disk as it was."""
    if killed := _hosts.pop(name, None):
        killed.wait(_END_TIMEOUT_S)
    file = Path(os.environ[FOLDER_VARIABLE]) / name / _PLAN_FILE
    enter = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--mount", "--uts"]
    command = [*enter, sys.executable, "-m", "e2e.real_nodes.node_host", str(file)]
    _hosts[name] = subprocess.Popen(command, cwd=tools.REPOSITORY)


def _wait_for_nodes(programs: Path, kubeconfig: Path) -> None:
    for name in NODES:
        args = ("wait", "--for=create", f"node/{name}", f"--timeout={_READY_TIMEOUT}")
        _kubectl(programs, kubeconfig, *args)
    args = ("wait", "--for=condition=Ready", "node", "--all", f"--timeout={_READY_TIMEOUT}")
    _kubectl(programs, kubeconfig, *args)


def _install_dns(programs: Path, kubeconfig: Path) -> None:
    """Run CoreDNS on one of the nodes."""
    _kubectl(programs, kubeconfig, "apply", "-f", str(Path(__file__).with_name("dns.yaml")))
    args = ("rollout", "status", "-n", "kube-system", "deployment/coredns", "--timeout=120s")
    _kubectl(programs, kubeconfig, *args)


def _kubectl(programs: Path, kubeconfig: Path, *args: str) -> None:
    done = subprocess.run(
        [programs / "kubectl", *args], env=os.environ | {"KUBECONFIG": str(kubeconfig)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"kubectl {' '.join(args)}: {done.stderr}")
