"""Controllers of other projects for tests (`scripts/third-party` builds them).

Nodes of a test cluster run no images of others, so each controller is a process beside the cluster,
with the rights of the account that it would have (cert-manager and the Prometheus operator as
administrators). What is a Service to the API server (webhooks,
metrics) leads to it by an EndpointSlice.
"""

import base64
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.cluster import Cluster
from e2e.cluster.control_plane import TIED
from e2e.support.prometheus import ROOT

ADDRESS = "10.77.254.1"
"""Where controllers listen: no pod has it, and the API server reaches it."""
_STOP_TIMEOUT_S = 20
_WEBHOOK_PORT = 9443
_CONFIG_FILE = "controller_manager_config.yaml"


def find(name: str) -> Path:
    """The folder of a controller's programs and manifests; skips the test if it is not built."""
    line = [ROOT / "scripts" / "third-party", "--built", name]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"{name} is not here; scripts/third-party {name} builds it")
    return Path(done.stdout.strip())


@contextmanager
def running(
    line: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """A program while the block lasts; its log is printed where the block fails."""
    tied = [sys.executable, "-I", "-S", "-c", TIED, str(os.getpid())]
    with log.open("ab") as out:
        process = subprocess.Popen(
            [*tied, *map(str, line)],
            env=os.environ | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        yield process
    except BaseException:
        print(f"{log}:\n{log.read_text(errors='replace')[-8000:]}")
        raise
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def apply_crds(cluster: Cluster, folder: Path) -> None:
    """CRDs in files of a folder. Many are too large for the annotation of a plain apply."""
    cluster.kubectl("apply", "--server-side", "-f", str(folder))
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")


def lead_service(cluster: Cluster, namespace: str, service: str, ports: Mapping[str, int]) -> None:
    """Let a Service lead to a controller that listens at ADDRESS; ports by their names."""
    cluster.apply(
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": f"{service}-outside",
                "labels": {"kubernetes.io/service-name": service},
            },
            "addressType": "IPv4",
            "endpoints": [{"addresses": [ADDRESS], "conditions": {"ready": True}}],
            "ports": [
                {"name": name, "port": port, "protocol": "TCP"} for name, port in ports.items()
            ],
        },
        namespace=namespace,
    )


def install_chart(
    cluster: Cluster, chart: Path, namespace: str, *values: str, config: str = ""
) -> dict[str, Any]:
    """Install a project's own chart without its pods; what its ConfigMap `config` says, parsed.

    The account's rights, webhooks and CRDs are the chart's.
    """
    name = chart.name
    cluster.helm("install", name, str(chart), "-n", namespace, "--create-namespace", *values)
    text = (cluster.get("configmap", config, namespace) or {})["data"][_CONFIG_FILE]
    return dict(yaml.safe_load(text))


@contextmanager
def served_webhook(
    cluster: Cluster, namespace: str, name: str, config: dict[str, Any], folder: Path
) -> Iterator[Path]:
    """A configuration file for a controller that issues its webhook's certificate itself.

    It writes the certificate into a Secret and waits until that is a file: the work of a kubelet,
    and of a thread here.
    """
    certificates = folder / "certificates"
    config["webhook"] = {"host": ADDRESS, "port": _WEBHOOK_PORT, "certDir": str(certificates)}
    config["metrics"] = {"bindAddress": "0"}
    config["leaderElection"] = {"leaderElect": False}
    file = folder / _CONFIG_FILE
    file.write_text(yaml.safe_dump(config))
    lead_service(cluster, namespace, f"{name}-webhook-service", {"": _WEBHOOK_PORT})
    with mounted(cluster, namespace, f"{name}-webhook-server-cert", certificates):
        yield file


@contextmanager
def mounted(cluster: Cluster, namespace: str, secret: str, folder: Path) -> Iterator[None]:
    """A Secret as files of a folder from when it has any, as a kubelet mounts it."""
    is_over = threading.Event()

    def mount() -> None:
        while not is_over.wait(1) and not save_secret(cluster, namespace, secret, folder):
            pass

    thread = threading.Thread(target=mount)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def save_secret(cluster: Cluster, namespace: str, name: str, folder: Path) -> bool:
    """Write a Secret's files to a folder, as a kubelet does; whether there are any."""
    data = (cluster.get("secret", name, namespace) or {}).get("data") or {}
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in data.items():
        (folder / file).write_bytes(base64.b64decode(content))
    return bool(data)
