"""The network of a cluster with real nodes: a bridge, and a network namespace for each node.

The control plane and the tests live in the sandbox's own namespace, at GATEWAY, and reach nodes,
pods and Services by routes. Nothing leads out of the sandbox.
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.control_plane import SERVICE_NETWORK

GATEWAY = "10.76.0.1"
_BRIDGE = "nodes"


def build_address(index: int) -> str:
    """The address of a node."""
    return f"10.76.0.{index + 11}"


def build_pod_network(index: int) -> str:
    """The network of a node's pods."""
    return f"10.79.{index + 1}.0/24"


def make_network(nodes: Sequence[str]) -> None:
    """Make the bridge and a namespace for each node; Services are reached through the first."""
    _run("ip", "link", "add", _BRIDGE, "type", "bridge")
    _run("ip", "address", "add", f"{GATEWAY}/24", "dev", _BRIDGE)
    _run("ip", "link", "set", _BRIDGE, "up")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    for index, name in enumerate(nodes):
        _make_namespace(index, name)
    for index, name in enumerate(nodes):
        route = [build_pod_network(index), "via", build_address(index)]
        _run("ip", "route", "add", *route)
        for other in nodes:
            if other != name:
                _run("ip", "-n", other, "route", "add", *route)
    _run("ip", "route", "add", SERVICE_NETWORK, "via", build_address(0))


@contextmanager
def lent_address(address: str) -> Iterator[None]:
    """The sandbox has one more address while the block lasts, and nodes and pods a route to it."""
    own = (f"{address}/32", "dev", _BRIDGE)
    _run("ip", "address", "add", *own)
    try:
        yield
    finally:
        _run("ip", "address", "delete", *own)


def disconnect_node(index: int) -> None:
    """Cut a node and its pods off from everything else; they go on."""
    _run("ip", "link", "set", f"node-{index}", "down")


def connect_node(index: int) -> None:
    """Connect a node again."""
    _run("ip", "link", "set", f"node-{index}", "up")


def _make_namespace(index: int, name: str) -> None:
    _run("ip", "netns", "add", name)
    _run("ip", "-n", name, "link", "set", "lo", "up")
    peer = ["peer", "name", f"node-{index}", "netns", "1"]
    _run("ip", "-n", name, "link", "add", "eth0", "type", "veth", *peer)
    _run("ip", "link", "set", f"node-{index}", "master", _BRIDGE, "up")
    _run("ip", "-n", name, "address", "add", f"{build_address(index)}/24", "dev", "eth0")
    _run("ip", "-n", name, "link", "set", "eth0", "up")
    _run("ip", "-n", name, "route", "add", "default", "via", GATEWAY)
    forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
    _run("nsenter", f"--net=/run/netns/{name}", "sh", "-c", forward)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
