"""NetworkPolicies on real nodes: kube-router enforces them in each node's network.

Started by `real_cluster`. Its router and its proxy stay off, and kube-proxy goes on. As everywhere,
a node reaches its own pods despite any policy, and a new pod is open for part of a second.
"""

import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.control_plane import SERVICE_NETWORK

_HEALTH_PORT = 20244
_START_TIMEOUT_S = 60
_END_TIMEOUT_S = 20


@contextmanager
def enforced(
    programs: Path, node: str, address: str, kubeconfig: Path, log: Path
) -> Iterator[None]:
    """Policies are enforced on a registered node while the block lasts. Raises RuntimeError."""
    command = [
        *("nsenter", f"--net=/run/netns/{node}", programs / "kube-router"),
        f"--kubeconfig={kubeconfig}",
        f"--hostname-override={node}",
        *("--run-firewall=true", "--run-router=false", "--run-service-proxy=false"),
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        f"--health-port={_HEALTH_PORT}",
    ]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        _wait_until_healthy(process, address, log)
        yield
    finally:
        process.terminate()
        process.wait(_END_TIMEOUT_S)


def _wait_until_healthy(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not _answers(f"http://{address}:{_HEALTH_PORT}/healthz"):
        if process.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise RuntimeError(f"kube-router does not answer:\n{tail}")
        time.sleep(0.2)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
