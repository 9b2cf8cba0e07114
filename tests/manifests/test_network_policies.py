"""Who may reach workers and gateways, and whom these may reach."""

import ipaddress

import pytest

from cleave.api.manifest import validate
from cleave.manifests.gateway import build_gateway_deployment
from cleave.manifests.labels import Manifest, build_component_labels
from cleave.manifests.network_policies import (
    NetworkIsolation,
    build_gateway_policy,
    build_workers_policy,
)

ISOLATION = NetworkIsolation("cleave-system")
OPERATOR = {"app.kubernetes.io/name": "cleave", "app.kubernetes.io/component": "operator"}


def chat(**gateway: object):
    return validate(
        {
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "chat", "namespace": "team"},
            "spec": {"model": "a/b", "slo": {"ttftMs": 1, "tpotMs": 1}, "gateway": gateway},
        }
    )


def selects(term: dict, labels: dict) -> bool:
    return term.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in term.get("matchExpressions", ())
    )


def list_ports(rule: Manifest) -> list[int]:
    return [each["port"] for each in rule["ports"]]


def test_each_policy_is_for_its_own_component() -> None:
    policies = {
        "worker": build_workers_policy(chat(), ISOLATION),
        "follower": build_workers_policy(chat(), ISOLATION),
        "gateway": build_gateway_policy(chat(), ISOLATION),
    }
    for component, policy in policies.items():
        pods = policy["spec"]["podSelector"]
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        for other in policies:
            is_selected = selects(pods, build_component_labels("chat", other))
            assert is_selected == (policies[other]["metadata"] == policy["metadata"])
        assert not selects(pods, build_component_labels("other", component))
    names = [each["metadata"]["name"] for each in policies.values()]
    assert names == ["chat-workers", "chat-workers", "chat-gateway"]
    assert {each["metadata"]["namespace"] for each in policies.values()} == {"team"}


def test_the_deployments_own_pods_reach_workers_on_every_port() -> None:
    rule, _ = build_workers_policy(chat(), ISOLATION)["spec"]["ingress"]
    (source,) = rule["from"]
    assert "ports" not in rule
    assert "namespaceSelector" not in source
    gateway = build_gateway_deployment(chat())["spec"]["template"]["metadata"]["labels"]
    assert selects(source["podSelector"], gateway)
    assert selects(source["podSelector"], build_component_labels("chat", "worker"))
    assert not selects(source["podSelector"], build_component_labels("other", "gateway"))
    assert not selects(source["podSelector"], {"cleave.dev/deployment": "chat"})


def test_the_operators_pods_alone_of_their_namespace_reach_agents() -> None:
    _, rule = build_workers_policy(chat(), ISOLATION)["spec"]["ingress"]
    (source,) = rule["from"]
    home = {"kubernetes.io/metadata.name": "cleave-system"}
    assert source["namespaceSelector"] == {"matchLabels": home}
    assert source["podSelector"] == {"matchLabels": OPERATOR}
    assert list_ports(rule) == list(range(9000, 9032, 2)), "a pod has up to 16 agents"


def test_gateways_are_open_to_clients_and_their_internal_port_is_not() -> None:
    public, internal = build_gateway_policy(chat(), ISOLATION)["spec"]["ingress"]
    assert "from" not in public
    assert list_ports(public) == [8080]
    assert list_ports(internal) == [8081]
    (source,) = internal["from"]
    assert source["podSelector"] == {"matchLabels": OPERATOR}
    scraped = NetworkIsolation("cleave-system", scraper_namespaces=("monitoring",))
    _, internal = build_gateway_policy(chat(), scraped)["spec"]["ingress"]
    home = {"kubernetes.io/metadata.name": "monitoring"}
    assert internal["from"][1:] == [{"namespaceSelector": {"matchLabels": home}}]
    picking = build_gateway_policy(chat(endpointPicker=True), ISOLATION)
    assert list_ports(picking["spec"]["ingress"][0]) == [8080, 9002]
    routing = build_gateway_policy(chat(routerTlsSecret="router"), ISOLATION)
    assert list_ports(routing["spec"]["ingress"][0]) == [8080, 9003]


def test_workers_reach_their_deployment_names_the_api_server_and_hubs_only() -> None:
    own, anywhere = build_workers_policy(chat(), ISOLATION)["spec"]["egress"]
    assert own == {"to": [{"podSelector": {"matchLabels": {"cleave.dev/deployment": "chat"}}}]}
    assert "to" not in anywhere
    assert list_ports(anywhere) == [53, 53, 5353, 5353, 443, 6443]


@pytest.mark.parametrize("policy", ["workers", "gateway"])
def test_no_port_is_opened_at_an_address_with_the_nodes_credentials(policy: str) -> None:
    isolation = NetworkIsolation(egress_ports=(80,))
    tracing = {"tracing": {"endpoint": "http://collector:80"}}
    built = (
        build_workers_policy(chat(), isolation)
        if policy == "workers"
        else build_gateway_policy(chat(**tracing), isolation)
    )
    _, anywhere, further = built["spec"]["egress"]
    assert 80 not in list_ports(anywhere)
    assert list_ports(further) == [80]
    blocks = [each["ipBlock"] for each in further["to"] if "ipBlock" in each]
    for address in ("169.254.169.254", "168.63.129.16", "100.100.100.200", "fd00:ec2::254"):
        ip = ipaddress.ip_address(address)
        (block,) = (each for each in blocks if ip in ipaddress.ip_network(each["cidr"]))
        assert any(ip in ipaddress.ip_network(each) for each in block["except"])


def test_traces_leave_to_the_collectors_port() -> None:
    for endpoint, port in (("http://c.example:4320", 4320), ("http://c.example", 4317)):
        deployment = chat(tracing={"endpoint": endpoint})
        *_, rule = build_gateway_policy(deployment, ISOLATION)["spec"]["egress"]
        assert list_ports(rule) == [port]
