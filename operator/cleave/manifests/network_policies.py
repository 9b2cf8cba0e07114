"""NetworkPolicies of a deployment's workers and gateways. Pure.

Called by the controller, for a deployment or a manually created pool. A network plug-in has to
enforce them: docs/install.md names some that do. Engines ask for a key of their start, but
`/health`, `/metrics`, NIXL and what ranks speak to each other do not; and an engine fetches what a
request names, so its own reach is limited too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from cleave.api.deployment import LLMDeployment
from cleave.api.role import MAX_POD_ENGINES
from cleave.manifests.labels import (
    COMPONENT,
    DEPLOYMENT,
    GATEWAY,
    GATEWAY_PORT,
    INTERNAL_PORT,
    NODE_WORKER,
    PICKER_PORT,
    ROUTER_PORT,
    WORKER,
    Manifest,
    build_object,
    get_agent_port,
    get_gateway_name,
    get_workers_name,
)
from cleave.manifests.owned_objects import DeploymentOrPool, get_deployment_name
from cleave.options import declare, declare_each, parse_port

_NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""Label that Kubernetes sets on every namespace."""
_OPERATOR_LABELS = {
    "app.kubernetes.io/name": "cleave",
    "app.kubernetes.io/component": "operator",
}
"""Labels that the chart gives to the operator's pods."""
_DNS_PORTS = (53, 5353)
"""Policies see the port of the DNS pods, not of their Service: often 5353, which needs no root."""
_HTTPS_PORT, _OTLP_PORT = 443, 4317
_EVERYWHERE_BUT_METADATA: tuple[Manifest, ...] = (
    {"ipBlock": {"cidr": "0.0.0.0/0", "except": [
        "100.100.100.200/32", "168.63.129.16/32", "169.254.0.0/16",
    ]}},
    {"ipBlock": {"cidr": "::/0", "except": ["fd00:ec2::254/128", "fe80::/10"]}},
    # Some plug-ins do not apply address blocks to pods.
    {"namespaceSelector": {}},
)  # fmt: skip
"""All addresses but those at which clouds serve credentials of the node."""


@dataclass(frozen=True, slots=True)
class NetworkIsolation:
    """What the policies depend on besides the deployment."""

    operator_namespace: str = "cleave-system"
    scraper_namespaces: tuple[str, ...] = declare_each(
        "--scraper-namespace",
        "whose pods may read the gateways' metrics through these policies",
        metavar="NAME",
    )
    egress_ports: tuple[int, ...] = declare_each(
        "--egress-port",
        "that workers may connect to besides 443, such as a model mirror's",
        parse=parse_port,
        metavar="PORT",
    )
    api_server_port: int = declare(
        "--api-server-port", 6443, "of the API server, besides 443", parse=parse_port
    )


def build_workers_policy(owner: DeploymentOrPool, isolation: NetworkIsolation) -> Manifest:
    """The NetworkPolicy for all workers: admits their deployment's pods, and the operator to the
    agents. KV ports are chosen at each start, hence all ports. Kubernetes always admits the node
    itself, which probes and port-forwarding need."""
    deployment = get_deployment_name(owner)
    agents = map(get_agent_port, range(MAX_POD_ENGINES))
    members = _select_components(deployment, WORKER, NODE_WORKER, GATEWAY)
    ingress = [
        {"from": [{"podSelector": members}]},
        {"from": [_select_operator(isolation)], "ports": _list_ports(agents)},
    ]
    workers = _select_components(deployment, WORKER, NODE_WORKER)
    egress = _build_egress(deployment, isolation, isolation.egress_ports)
    name = get_workers_name(deployment)
    return _build_policy(name, owner.namespace, deployment, workers, ingress, egress)


def build_gateway_policy(deployment: LLMDeployment, isolation: NetworkIsolation) -> Manifest:
    """The NetworkPolicy for gateways: all clients reach the public ports. The internal port,
    which names tenants and checks no key, is for the operator and scrapers."""
    gateway, tracing = deployment.spec.gateway, deployment.spec.gateway.tracing
    public = [
        GATEWAY_PORT,
        *([PICKER_PORT] if gateway.endpoint_picker else []),
        *([ROUTER_PORT] if gateway.router_tls_secret else []),
    ]
    scrapers = [_select_namespace(name) for name in isolation.scraper_namespaces]
    ingress = [
        {"ports": _list_ports(public)},
        {
            "from": [_select_operator(isolation), *scrapers],
            "ports": _list_ports([INTERNAL_PORT]),
        },
    ]
    collector = [urlsplit(tracing.endpoint).port or _OTLP_PORT] if tracing else []
    name, pods = get_gateway_name(deployment.name), _select_components(deployment.name, GATEWAY)
    egress = _build_egress(deployment.name, isolation, collector)
    return _build_policy(name, deployment.namespace, deployment.name, pods, ingress, egress)


def _build_egress(
    deployment: str, isolation: NetworkIsolation, ports: Iterable[int]
) -> list[Manifest]:
    """To the deployment's own pods, name servers, the API server and model hubs, and to `ports`."""
    dns = [
        {"protocol": protocol, "port": port} for port in _DNS_PORTS for protocol in ("UDP", "TCP")
    ]
    # Not by address: name servers of a node, and API servers in some plug-ins, match no block.
    anywhere = [*dns, *_list_ports([_HTTPS_PORT, isolation.api_server_port])]
    rules: list[Manifest] = [
        {"to": [{"podSelector": {"matchLabels": {DEPLOYMENT: deployment}}}]},
        {"ports": anywhere},
    ]
    if further := _list_ports(ports):
        rules.append({"to": list(_EVERYWHERE_BUT_METADATA), "ports": further})
    return rules


def _build_policy(
    name: str,
    namespace: str,
    deployment: str,
    pods: Manifest,
    ingress: list[Manifest],
    egress: list[Manifest],
) -> Manifest:
    spec = {
        "podSelector": pods,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": egress,
    }
    version, labels = "networking.k8s.io/v1", {DEPLOYMENT: deployment}
    return build_object(version, "NetworkPolicy", name, namespace, labels, spec=spec)


def _select_components(deployment: str, *components: str) -> Manifest:
    expression = {"key": COMPONENT, "operator": "In", "values": list(components)}
    return {"matchLabels": {DEPLOYMENT: deployment}, "matchExpressions": [expression]}


def _select_operator(isolation: NetworkIsolation) -> Manifest:
    pods = {"podSelector": {"matchLabels": _OPERATOR_LABELS}}
    return {**_select_namespace(isolation.operator_namespace), **pods}


def _select_namespace(name: str) -> Manifest:
    return {"namespaceSelector": {"matchLabels": {_NAMESPACE_LABEL: name}}}


def _list_ports(numbers: Iterable[int]) -> list[Manifest]:
    return [{"protocol": "TCP", "port": number} for number in numbers]
