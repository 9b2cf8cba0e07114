"""One real node from inside: mounts, then containerd, kubelet and kube-proxy, until SIGTERM.

Run by `node.Node` in the node's namespaces: `python -m e2e.real_nodes.node_host FILE`, FILE being
the JSON of a `HostPlan`. Where these programs have folders of their own on the machine, the node's
are mounted over them, and over the settings of the kernel that a kubelet writes.
"""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from e2e.real_nodes.sandbox import CGROUP, MOUNT_POINTS, find_hierarchies

DNS_ADDRESS = "10.78.0.10"
POD_NETWORK = "10.79.0.0/16"
REGISTRY = "registry.local/ai/"
"""Images have names there too, as in README's lines; nothing is ever pulled."""
_LIBRARY = "docker.io/library/"
_SOCKET = "/run/containerd/containerd.sock"
_START_TIMEOUT_S = 60
_SETTINGS = (
    "kernel/keys/root_maxbytes", "kernel/keys/root_maxkeys", "kernel/panic", "kernel/panic_on_oops",
    "vm/overcommit_memory", "vm/panic_on_oom",
)  # fmt: skip
"""What the kubelet sets for the whole machine: it gets copies."""


@dataclass(frozen=True)
class HostPlan:
    """All that a node's processes need."""

    name: str
    address: str
    pod_network: str
    programs: str
    """Folder of scripts/node-tools."""
    folder: str
    """For the node's state."""
    logs: str
    pki: str
    """Folder with ca.crt, and the node's certificate and key by its name."""
    kubeconfig: str
    proxy_kubeconfig: str
    images: tuple[str, ...] = ()
    """Archives to import before pods start."""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    has_static_cpus: bool = False
    """Whether containers that ask for whole cores get them for themselves."""


def main(plan: HostPlan) -> None:
    """Start the node's processes, and stop when one ends or on SIGTERM."""
    socket.sethostname(plan.name)
    _mount_folders(Path(plan.folder))
    _mount_settings(Path(plan.folder))
    _make_cgroups(plan.name)
    os.environ["PATH"] = f"{plan.programs}:/usr/sbin:/sbin:{os.environ['PATH']}"
    Path("/etc/cni/net.d/10-pods.conflist").write_text(json.dumps(_build_network(plan)))
    Path("/etc/containerd/config.toml").write_text(_build_containerd_config(plan))
    kubelet = Path(plan.folder) / "kubelet.yaml"
    kubelet.write_text(yaml.safe_dump(_build_kubelet_config(plan)))
    # The machine's own may name a server on its loopback.
    (Path(plan.folder) / "resolv.conf").write_text("")
    processes = [_start(plan, "containerd", "--config", "/etc/containerd/config.toml")]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _wait_for_containerd(processes[0])
    # After the first boot they are on its disk.
    for image in plan.images if not _run_ctr("images", "ls", "-q") else ():
        _run_ctr("images", "import", image)
    for name in _run_ctr("images", "ls", "-q").split():
        if name.startswith(_LIBRARY):
            _run_ctr("images", "tag", name, name.replace(_LIBRARY, REGISTRY))
    processes += [
        _start(
            plan,
            "kubelet",
            f"--config={kubelet}",
            f"--kubeconfig={plan.kubeconfig}",
            f"--hostname-override={plan.name}",
            f"--node-ip={plan.address}",
            f"--node-labels={','.join(f'{key}={value}' for key, value in plan.labels.items())}",
        ),
        _start(
            plan,
            "kube-proxy",
            f"--kubeconfig={plan.proxy_kubeconfig}",
            f"--hostname-override={plan.name}",
            "--proxy-mode=nftables",
            f"--cluster-cidr={POD_NETWORK}",
            "--conntrack-max-per-core=0",
            f"--bind-address={plan.address}",
        ),
    ]
    while all(process.poll() is None for process in processes):
        time.sleep(0.2)
    sys.exit(f"{plan.name}: one of containerd, kubelet and kube-proxy has ended; see {plan.logs}")


def _mount_folders(own: Path) -> None:
    # A node that boots again keeps its disk only.
    shutil.rmtree(own / "run", ignore_errors=True)
    for name in MOUNT_POINTS:
        (own / name).mkdir(parents=True, exist_ok=True)
        _run("mount", "--bind", str(own / name), f"/{name}")
    # Volumes of pods are mounted by the kubelet and must appear in containers.
    _run("mount", "--make-rshared", "/")


def _mount_settings(own: Path) -> None:
    for setting in _SETTINGS:
        copy = own / "settings" / setting
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(Path("/proc/sys", setting).read_text())
        _run("mount", "--bind", str(copy), f"/proc/sys/{setting}")
    boot_id = own / "settings" / "boot_id"
    boot_id.write_text(f"{uuid.uuid4()}\n")
    _run("mount", "--bind", str(boot_id), "/proc/sys/kernel/random/boot_id")


def _make_cgroups(node: str) -> None:
    """A control group for the node in each hierarchy; in cpuset it must be filled in."""
    for hierarchy in find_hierarchies():
        for group in (hierarchy / CGROUP, hierarchy / CGROUP / node):
            group.mkdir(exist_ok=True)
            for name in ("cpuset.cpus", "cpuset.mems"):
                if hierarchy.name == "cpuset":
                    (group / name).write_text((hierarchy / name).read_text())


def _build_network(plan: HostPlan) -> dict[str, object]:
    """Each pod has a link to its node, so all of its traffic passes the node's rules."""
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": plan.pod_network}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    plugin = {"type": "ptp", "ipMasq": False, "ipam": addresses}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [plugin]}


def _build_containerd_config(plan: HostPlan) -> str:
    return f"""
version = 3
# Nodes have no folder of their own for its socket.
[plugins.'io.containerd.nri.v1.nri']
  disable = true
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = 'localhost/pause:1'
[plugins.'io.containerd.cri.v1.runtime']
  # Without CAP_SYS_RESOURCE a process's oom_score_adj can only be raised.
  restrict_oom_score_adj = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
  bin_dirs = ['{plan.programs}']
  conf_dir = '/etc/cni/net.d'
[plugins.'io.containerd.cri.v1.runtime'.containerd]
  default_runtime_name = 'runc'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
  BinaryName = '/usr/sbin/runc'
  SystemdCgroup = false
"""


def _build_kubelet_config(plan: HostPlan) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": plan.address,
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}/{plan.name}",
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": ["pods"],
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{plan.pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{plan.pki}/{plan.name}.crt",
        "tlsPrivateKeyFile": f"{plan.pki}/{plan.name}.key",
        "clusterDomain": "cluster.local",
        "clusterDNS": [DNS_ADDRESS],
        "resolvConf": f"{plan.folder}/resolv.conf",
        "containerRuntimeEndpoint": f"unix://{_SOCKET}",
        "failSwapOn": False,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "nodeStatusUpdateFrequency": "4s",
        "nodeLeaseDurationSeconds": 10,
        "kubeReserved": {"cpu": "100m", "memory": "200Mi"},
        "cpuManagerPolicy": "static" if plan.has_static_cpus else "none",
    }


def _start(plan: HostPlan, program: str, *flags: str) -> subprocess.Popen[bytes]:
    with Path(plan.logs, f"{plan.name}-{program}.log").open("ab") as log:
        return subprocess.Popen([program, *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _wait_for_containerd(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while subprocess.run(["ctr", "version"], capture_output=True, check=False).returncode:
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit("containerd does not answer; see its log")
        time.sleep(0.2)


def _run_ctr(*arguments: str) -> str:
    command = ["ctr", "-n", "k8s.io", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    return done.stdout


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    read = json.loads(Path(sys.argv[1]).read_text())
    main(HostPlan(**read | {"images": tuple(read["images"])}))
