"""What a supervisor runs: the pods of a deployment and the machine they were planned for.

Made by `planning`, run by the supervisor; left in the state folder when that is another process.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from cleave.local import files
from cleave.local.network import HOST_IP
from cleave.local.node import Node
from cleave.local.state import StateFolder
from cleave.pods.labels import Manifest


@dataclass(frozen=True, slots=True)
class Job:
    """A deployment, ready to be run on this machine."""

    deployment: str
    model: str
    """The name that clients ask for."""
    port: int
    """Of the gateway, on 127.0.0.1."""
    internal_port: int
    """Of the gateway as well, for `cleave top`."""
    node: Node
    pods: tuple[Manifest, ...]
    allow_shared_cores: bool = False
    plan: dict[str, Any] = field(default_factory=dict)
    """The placement and what it is expected to do, as in `status.plan`."""

    @property
    def url(self) -> str:
        """Where clients find the gateway."""
        return f"http://{HOST_IP}:{self.port}"

    @property
    def internal_url(self) -> str:
        """Where it tells of the fleet."""
        return f"http://{HOST_IP}:{self.internal_port}"

    def save(self, folder: StateFolder) -> None:
        """Leave it for a supervisor in another process."""
        files.replace(folder.path / "job.json", msgspec.json.encode(self).decode())

    @staticmethod
    def load(folder: StateFolder) -> "Job":
        """What `save` left."""
        return msgspec.json.decode((folder.path / "job.json").read_bytes(), type=Job)
