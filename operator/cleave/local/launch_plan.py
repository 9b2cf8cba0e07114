"""The input of a supervisor: the pods of a deployment and the machine they were planned for.

Built by `planning`; passed through the state folder to a supervisor in another process.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from cleave.local import files
from cleave.local.kubelet.network import HOST_IP
from cleave.local.kubelet.node import LocalNode
from cleave.local.state import StateFolder
from cleave.manifests.labels import Manifest


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A deployment, ready to be started on this machine."""

    deployment: str
    model: str
    """The model name in clients' requests."""
    port: int
    """Port of the gateway on 127.0.0.1."""
    internal_port: int
    """Internal port of the gateway, for `cleave top`."""
    node: LocalNode
    pods: tuple[Manifest, ...]
    allow_shared_cores: bool = False
    plan: dict[str, Any] = field(default_factory=dict)
    """The placement and its predictions, as in `status.plan`."""

    @property
    def url(self) -> str:
        """URL of the gateway for clients."""
        return f"http://{HOST_IP}:{self.port}"

    @property
    def internal_url(self) -> str:
        """URL of the gateway's internal port (`/fleet`, `/metrics`)."""
        return f"http://{HOST_IP}:{self.internal_port}"

    def save(self, folder: StateFolder) -> None:
        """Write to the state folder, for a supervisor in another process."""
        files.write_atomically(folder.path / "job.json", msgspec.json.encode(self).decode())

    @staticmethod
    def load(folder: StateFolder) -> "LaunchPlan":
        """Read what `save` has written."""
        return msgspec.json.decode((folder.path / "job.json").read_bytes(), type=LaunchPlan)
