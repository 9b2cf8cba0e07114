"""What whoever installs the operator may choose, as far as manifests depend on it. Values only."""

from dataclasses import dataclass

from cleave.api.cluster import Cluster
from cleave.pods.resources import Device


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one operator."""

    namespace: str = "cleave-system"
    """Where the operator itself is."""
    image_prefix: str = ""
    """Where Cleave's own images are pulled from."""
    discovery_role: str = "cleave-discovery"
    """ClusterRole that lets pods read the EndpointSlices of their namespace."""
    device: Device = "gpu"
    """What computes tokens on the nodes."""
    isolates: bool = False
    """Whether only a deployment's own pods may reach its workers (NetworkPolicy)."""
    has_sets: bool = False
    """Whether LeaderWorkerSet is installed, which then makes instances that span nodes."""
    watch_s: float = 15.0
    """How often the gateways' counts are looked at."""
    cluster: Cluster | None = None
    """Network, own GPUs and measured profiles; its nodes do not count, the real ones do."""
