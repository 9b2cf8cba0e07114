"""Fields common to worker and gateway containers: security, addresses and images. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cleave import distribution
from cleave.manifests.labels import Manifest

UID = 1000
"""User and group that the images create."""

HOME_FOLDER = "/home/cleave"

LISTEN_ON = "$(POD_IP),127.0.0.1"
"""`--host` of gateways: the pod's address, and the one that `kubectl port-forward` connects to
inside the pod, also where pods have IPv6 addresses."""


def build_pod_defaults() -> Manifest:
    """Fields of every pod spec: not root, and a token for the API server, to discover agents."""
    return {
        "restartPolicy": "Always",
        "automountServiceAccountToken": True,
        # Kubernetes would set VLLM_PORT for a Service named vllm, which vLLM reads.
        "enableServiceLinks": False,
        # The kernel drops SIGTERM for a PID 1 without a handler, which Python has only once it has
        # imported everything: a pod deleted before that would stay for its whole grace period.
        "shareProcessNamespace": True,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "fsGroup": UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def remove_user(spec: Manifest) -> Manifest:
    """Return a pod spec without a user and groups of its own, as security context constraints of
    OpenShift demand. The user that the cluster assigns is in no /etc/passwd, and torch reads its
    name: USER is one for it."""
    assigned = ("runAsUser", "runAsGroup", "fsGroup")
    security = {key: each for key, each in spec["securityContext"].items() if key not in assigned}
    user = {"name": "USER", "value": "cleave"}
    containers = [
        {**each, "env": [*each.get("env", ()), user]}
        if all(variable["name"] != "USER" for variable in each.get("env", ()))
        else each
        for each in spec["containers"]
    ]
    return {**spec, "securityContext": security, "containers": containers}


def build_container_security() -> Manifest:
    """Security context of a container: read-only and without capabilities.

    IPC_LOCK would change nothing: Kubernetes gives added capabilities to root only.
    """
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def build_flags(options: Mapping[str, object]) -> list[str]:
    """Command-line flags: none for None, False and empty text; True: a flag without a value."""
    flags: list[str] = []
    for flag, value in options.items():
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False and value != "":
            flags += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return flags


@dataclass(frozen=True, slots=True)
class Images:
    """Where nodes pull Cleave's own images from."""

    prefix: str = ""
    """Registry and path, which the names of images follow."""
    references: Mapping[str, str] = field(default_factory=dict)
    """Whole references by kind, with tag or digest, in place of prefix, name and version."""

    def get(self, kind: str) -> str:
        """Reference of the image of a kind, such as gateway; without one of its own, at this
        version."""
        return self.references.get(kind, get_image(kind, self.prefix))


OWN_IMAGES = Images()
"""Those that are on the nodes already."""
IMAGE_KINDS = ("gateway", "worker-cuda", "worker-cpu", "worker-emulated")
"""Images of deployments' pods."""


def get_image(kind: str, prefix: str = "") -> str:
    """Name of Cleave's own image of a kind, at this version; `prefix`: registry and path."""
    return f"{prefix}cleave-{kind}:{distribution.get_version()}"


def build_address_env(agents: str) -> list[Manifest]:
    """Environment variables with the pod's name and address and where to discover agents."""
    return [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "CLEAVE_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "CLEAVE_AGENTS", "value": agents},
    ]


def build_scratch_volume(name: str, path: str, **volume: object) -> tuple[Manifest, Manifest]:
    """An empty directory (volume, mount), as the root file system is read-only."""
    return {"name": name, "emptyDir": volume}, {"name": name, "mountPath": path}
