from cleave.api.manifest import validate
from cleave.manifests.gateway import build_gateway_deployment
from cleave.manifests.labels import build_component_labels
from cleave.manifests.network_policy import build_workers_policy

DEPLOYMENT = validate(
    {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat", "namespace": "team"},
        "spec": {"model": "a/b", "slo": {"ttftMs": 1, "tpotMs": 1}},
    }
)


def selects(term: dict, labels: dict) -> bool:
    return term.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in term.get("matchExpressions", ())
    )


def test_workers_and_followers_are_closed_and_gateways_are_not() -> None:
    spec = build_workers_policy(DEPLOYMENT, "cleave-system")["spec"]
    for component in ("worker", "follower"):
        assert selects(spec["podSelector"], build_component_labels("chat", component))
    assert not selects(spec["podSelector"], build_component_labels("chat", "gateway"))
    assert not selects(spec["podSelector"], build_component_labels("other", "worker"))
    # Workers fetch models and watch the API server: nothing is said of where they may go.
    assert spec["policyTypes"] == ["Ingress"]


def test_the_deployments_own_pods_are_let_in_on_every_port() -> None:
    rule, _ = build_workers_policy(DEPLOYMENT, "cleave-system")["spec"]["ingress"]
    (source,) = rule["from"]
    assert "ports" not in rule
    assert "namespaceSelector" not in source
    gateway = build_gateway_deployment(DEPLOYMENT)["spec"]["template"]["metadata"]["labels"]
    assert selects(source["podSelector"], gateway)
    assert selects(source["podSelector"], build_component_labels("chat", "worker"))
    assert not selects(source["podSelector"], build_component_labels("other", "gateway"))


def test_the_operators_namespace_is_let_in_to_agents_only() -> None:
    _, rule = build_workers_policy(DEPLOYMENT, "cleave-system")["spec"]["ingress"]
    (source,) = rule["from"]
    home = {"kubernetes.io/metadata.name": "cleave-system"}
    assert source == {"namespaceSelector": {"matchLabels": home}}
    assert [port["port"] for port in rule["ports"]] == [9000]


def test_it_is_named_after_the_workers() -> None:
    metadata = build_workers_policy(DEPLOYMENT, "cleave-system")["metadata"]
    assert (metadata["name"], metadata["namespace"]) == ("chat-workers", "team")
