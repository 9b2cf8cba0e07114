"""Settings of one operator process that manifests and reconciles depend on. Values only."""

import argparse
from dataclasses import dataclass
from functools import partial
from typing import get_args
from urllib.parse import urlsplit

from cleave.api.cluster import Cluster
from cleave.controller.author_policy import allow_lists
from cleave.controller.author_policy.pod_rules import AllowLists
from cleave.manifests.container import OWN_IMAGES, Images
from cleave.manifests.network_policies import NetworkIsolation
from cleave.manifests.resources import Device
from cleave.options import declare, parse_as


def _parse_url(text: str, example: str) -> str:
    parts = urlsplit(text)
    has_host = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc
    if text and (not has_host or parts.query or parts.fragment):
        raise argparse.ArgumentTypeError(f"{text!r}: must be like {example}")
    return text


def _parse_interval(text: str) -> float:
    seconds = float(text)
    if not 0.5 <= seconds <= 300:
        raise argparse.ArgumentTypeError(f"{text}: must be from 0.5 to 300")
    return seconds


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """Set by the operator's command line."""

    namespace: str = declare(
        "--own-namespace",
        "cleave-system",
        "the operator's own namespace, that of the Lease (default: $POD_NAMESPACE)",
        env="POD_NAMESPACE",
    )
    images: Images = OWN_IMAGES
    """Cleave's own images."""
    device: Device = declare(
        "--device", "gpu", "device that the nodes compute on", choices=get_args(Device)
    )
    isolation: NetworkIsolation | None = None
    """Of the NetworkPolicies for workers and gateways; None: there are none."""
    account: str = declare(
        "--account",
        "system:serviceaccount:cleave-system:cleave-operator",
        "service account of this operator, as system:serviceaccount:NAMESPACE:NAME; agents accept "
        "calls of it and of their deployment's only",
        metavar="NAME",
    )
    has_assigned_user: bool = declare(
        "--assigned-user",
        False,
        "pods of deployments name no user and groups: the cluster assigns them (OpenShift)",
    )
    has_leader_worker_sets: bool = False
    """Whether LeaderWorkerSet is installed; it then creates instances that span nodes."""
    has_pod_groups: bool = False
    """Whether the cluster has Kubernetes' own PodGroups, for gangs."""
    traffic_poll_s: float = declare(
        "--watch-interval",
        15.0,
        "seconds between two scrapes of the gateways' metrics",
        parse=_parse_interval,
        metavar="S",
    )
    allow_lists: AllowLists | None = declare(
        "--restrict-pods",
        None,
        "refuse deployments and pools whose pods would have more than Cleave itself needs and than "
        f"these lists hold: {', '.join(allow_lists.NAMES)} (default: they may have all that the "
        "resources have fields for)",
        parse=partial(parse_as, allow_lists.parse),
        metavar="JSON",
    )
    model_hub: str = declare(
        "--model-hub",
        "",
        "read config.json of models that Cleave does not know from here, such as "
        "https://huggingface.co, with the token of $HF_TOKEN (default: not read)",
        parse=partial(_parse_url, example="https://huggingface.co"),
        metavar="URL",
    )
    prometheus: str = declare(
        "--prometheus",
        "",
        "read the gateways' counters from this Prometheus, with the token of $PROMETHEUS_TOKEN; "
        "what it does not have is read from the gateways (default: all is)",
        parse=partial(_parse_url, example="http://prometheus.monitoring:9090"),
        metavar="URL",
    )
    cluster: Cluster | None = None
    """Network, own GPU descriptions and measured profiles; its nodes are ignored."""
