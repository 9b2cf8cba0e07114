"""What worker and gateway containers have in common: hardening, addresses, images. Pure."""

from importlib.metadata import version

from cleave.pods.labels import Manifest

UID = 1000
"""User and group that the images create."""

HOME = "/home/cleave"


def pod_security() -> Manifest:
    """Security context of a pod: never root."""
    return {
        "runAsNonRoot": True,
        "runAsUser": UID,
        "runAsGroup": UID,
        "fsGroup": UID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Manifest:
    """Security context of a container: no rights beyond its user's, nothing to write to."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def image(kind: str) -> str:
    """Cleave's own image of a kind, at this version."""
    return f"cleave-{kind}:{version('cleave')}"


def addresses(agents: str) -> list[Manifest]:
    """Environment variables that tell a pod who it is and where the agents are."""
    return [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "CLEAVE_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "CLEAVE_AGENTS", "value": agents},
    ]


def scratch(name: str, path: str, **volume: object) -> tuple[Manifest, Manifest]:
    """An empty directory (volume, mount): the root file system is read-only."""
    return {"name": name, "emptyDir": volume}, {"name": name, "mountPath": path}
