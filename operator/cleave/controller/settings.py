"""Settings of one operator process that manifests and reconciles depend on. Values only."""

from dataclasses import dataclass

from cleave.api.cluster import Cluster
from cleave.controller.author_policy.pod_rules import AllowLists
from cleave.manifests.container import OWN_IMAGES, Images
from cleave.manifests.network_policies import NetworkIsolation
from cleave.manifests.resources import Device


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """Set by the operator's command line."""

    namespace: str = "cleave-system"
    """The operator's own namespace."""
    images: Images = OWN_IMAGES
    """Cleave's own images."""
    device: Device = "gpu"
    """What the nodes compute on."""
    isolation: NetworkIsolation | None = None
    """Of the NetworkPolicies for workers and gateways; None: there are none."""
    account: str = "system:serviceaccount:cleave-system:cleave-operator"
    """The operator's service account, whose orders agents accept."""
    has_assigned_user: bool = False
    """Whether the cluster assigns users and groups of pods, as OpenShift does."""
    has_leader_worker_sets: bool = False
    """Whether LeaderWorkerSet is installed; it then creates instances that span nodes."""
    has_pod_groups: bool = False
    """Whether the cluster has Kubernetes' own PodGroups, for gangs."""
    traffic_poll_s: float = 15.0
    """Seconds between two reads of the gateways' metrics."""
    model_hub: str = ""
    """URL of Hugging Face or a mirror, which has config.json of models that the operator does not
    know; empty: it is not read."""
    prometheus: str = ""
    """URL of a Prometheus that scrapes the gateways; empty: the operator reads their pages."""
    allow_lists: AllowLists | None = None
    """What authors may add to Cleave's own pods; None: everything that the API has fields for."""
    cluster: Cluster | None = None
    """Network, own GPU descriptions and measured profiles; its nodes are ignored."""
