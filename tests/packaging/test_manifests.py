"""What a default installation is made of: read from manifests/, so that helm is not needed."""

import re
import shutil
from pathlib import Path

import yaml

from cleave.api.crd import build_deployment_crd, build_pool_crd
from cleave.api.manifest import validate
from cleave.controller.cluster.actions import Apply
from cleave.controller.cluster.apply import FINALIZER
from cleave.controller.cluster.client import KINDS
from cleave.controller.cluster.inventory import build_inventory
from cleave.controller.deployment.reconcile import reconcile
from cleave.controller.resync import WATCHED_KINDS
from cleave.controller.settings import OperatorSettings
from cleave.controller.views import DeploymentView
from cleave.manifests.container import UID
from cleave.manifests.credentials import name_accounts
from cleave.manifests.labels import AGENT_PORT, INTERNAL_PORT
from cleave.manifests.network_policies import NetworkIsolation
from cleave.manifests.owned_objects import build_accounts
from cleave.planner.resolved_deployment import resolve_in_cluster

from tests.support.deployment_views import own_accounts

ROOT = Path(__file__).parent.parent.parent

APPLIED = {"list", "watch", "create", "patch"}
RIGHTS = {
    ("cleave.dev", "llmdeployments"): {"list", "watch", "patch"},
    ("cleave.dev", "llmdeployments/status"): {"patch"},
    ("cleave.dev", "llmdeployments/finalizers"): {"update"},
    ("cleave.dev", "instancepools"): {"get", *APPLIED, "delete"},
    ("cleave.dev", "instancepools/status"): {"patch"},
    ("cleave.dev", "instancepools/finalizers"): {"update"},
    ("", "pods"): {"get", *APPLIED, "delete"},
    ("", "services"): {"get", *APPLIED},
    ("apps", "deployments"): {"get", *APPLIED},
    ("", "resourcequotas"): {"list", "watch"},
    ("policy", "poddisruptionbudgets"): {"get", *APPLIED},
    ("leaderworkerset.x-k8s.io", "leaderworkersets"): {"get", "create", "delete"},
    ("scheduling.k8s.io", "podgroups"): {"create", "patch"},
    ("scheduling.volcano.sh", "podgroups"): {"create", "patch"},
    ("networking.k8s.io", "networkpolicies"): {"get", *APPLIED},
    ("", "configmaps"): {"get"},
    ("", "serviceaccounts"): {"get", *APPLIED},
    ("rbac.authorization.k8s.io", "roles"): {"get", *APPLIED},
    ("rbac.authorization.k8s.io", "rolebindings"): {"get", *APPLIED},
    # It may do what its roles for pods allow: nobody else may write such roles.
    ("discovery.k8s.io", "endpointslices"): {"get", "list", "watch"},
    ("", "serviceaccounts/token"): {"create"},
    ("", "events"): {"create", "patch"},
}
"""Everything the operator may do in the namespaces of deployments."""
DEPLOYMENT = validate(
    {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat", "uid": "u", "finalizers": [FINALIZER]},
        "spec": {"model": "a/b", "slo": {"ttftMs": 1, "tpotMs": 1}},
    }
)
ACCOUNTS = name_accounts("default", "chat", "u")


def one(manifests, kind, name=None):
    (found,) = [
        each
        for each in manifests
        if each["kind"] == kind and name in (None, each["metadata"]["name"])
    ]
    return found


def rights(role):
    found = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                found.setdefault((group, resource), set()).update(rule["verbs"])
    return found


def test_the_operator_may_do_exactly_what_it_does(plain) -> None:
    assert rights(one(plain, "ClusterRole", "cleave-operator")) == RIGHTS


def test_beyond_namespaces_the_operator_sees_nodes_and_its_own_webhook(plain) -> None:
    role = one(plain, "ClusterRole", "cleave-operator-cluster")
    assert rights(role) == {
        ("", "nodes"): {"list", "watch"},
        ("admissionregistration.k8s.io", "validatingwebhookconfigurations"): {"get", "patch"},
    }
    (webhook,) = [rule for rule in role["rules"] if "patch" in rule["verbs"]]
    assert webhook["resourceNames"] == ["cleave-webhook"]


def test_no_rule_of_the_operator_has_a_wildcard(plain) -> None:
    for role in plain:
        if role["kind"] in ("Role", "ClusterRole"):
            for rule in role["rules"]:
                assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]


def test_the_only_secret_that_the_operator_reads_is_its_certificate(plain) -> None:
    rules = [
        rule
        for role in plain
        if role["kind"] in ("Role", "ClusterRole")
        for rule in role["rules"]
        if "secrets" in rule["resources"]
    ]
    (rule,) = rules
    assert rule["resourceNames"] == ["cleave-webhook"]
    assert set(rule["verbs"]) == {"get", "update"}
    assert "data" not in one(plain, "Secret", "cleave-webhook")


def test_the_roles_that_the_operator_writes_allow_no_more_than_it_may_do(plain) -> None:
    own = rights(one(plain, "ClusterRole", "cleave-operator"))
    roles = [each for each in build_accounts(DEPLOYMENT, ACCOUNTS) if each["kind"] == "Role"]
    assert len(roles) == 2
    for role in roles:
        assert all(verbs <= own[key] for key, verbs in rights(role).items())


def test_at_home_the_operator_requests_tokens_of_its_own_account_only(plain) -> None:
    (rule,) = [
        rule
        for rule in one(plain, "Role", "cleave-operator")["rules"]
        if "serviceaccounts/token" in rule["resources"]
    ]
    assert (rule["resourceNames"], rule["verbs"]) == (["cleave-operator"], ["create"])


def test_the_operator_may_list_and_watch_all_it_watches(plain) -> None:
    granted = {
        key: verbs for role in plain if "rules" in role for key, verbs in rights(role).items()
    }
    for kind in WATCHED_KINDS:
        api = KINDS[kind]
        verbs = granted[api.version.rpartition("/")[0], api.plural]
        assert {"list", "watch"} <= verbs, kind


def test_the_operator_is_hardened(plain) -> None:
    spec = one(plain, "Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == UID
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    assert container["readinessProbe"] != container["livenessProbe"]


def test_a_second_operator_stands_by_and_one_survives_a_drained_node(plain) -> None:
    deployment = one(plain, "Deployment")
    budget = one(plain, "PodDisruptionBudget")
    assert deployment["spec"]["replicas"] == 2
    assert budget["spec"]["minAvailable"] == 1
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_selectors_find_the_operator(plain) -> None:
    labels = one(plain, "Deployment")["spec"]["template"]["metadata"]["labels"].items()
    assert one(plain, "Service")["spec"]["selector"].items() <= labels
    assert one(plain, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"].items() <= labels
    ports = one(plain, "Deployment")["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert {port["name"] for port in ports} == {"http", "webhook"}


def test_an_operator_that_is_away_holds_up_no_deletion(plain) -> None:
    (hook,) = one(plain, "ValidatingWebhookConfiguration")["webhooks"]
    (rule,) = hook["rules"]
    assert rule["operations"] == ["CREATE", "UPDATE"]
    assert not [name for name in rule["resources"] if "/" in name]
    conditions = {each["name"]: each["expression"] for each in hook["matchConditions"]}
    # Taking a finalizer off is an update: with failurePolicy Fail it would hang without these.
    assert "deletionTimestamp" in conditions["is-wanted"]
    assert "oldObject.spec" in conditions["spec-changes"]
    assert "cleave-system:cleave-operator" in conditions["not-by-the-operator"]
    assert hook["sideEffects"] == "None"
    assert "caBundle" not in hook["clientConfig"]


def test_the_manifests_bring_their_namespace_which_allows_restricted_pods_only(plain) -> None:
    namespace = one(plain, "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    inside = {each["metadata"].get("namespace", "cleave-system") for each in plain}
    assert inside == {namespace["metadata"]["name"]}


def test_crds_are_what_the_types_say_and_survive_an_uninstall(scripts) -> None:
    expected = {
        each["metadata"]["name"]: each for each in (build_deployment_crd(), build_pool_crd())
    }
    carried = [yaml.safe_load(path.read_text()) for path in (ROOT / "crds").iterdir()]
    assert len(carried) == len(expected) == 2
    for each in carried:
        assert each["metadata"].pop("annotations") == {
            "helm.sh/resource-policy": "keep",
            "cleave.dev/release": str(scripts.number_version(scripts.read_version())),
        }
        assert each == expected[each["metadata"]["name"]]
    assert (ROOT / "charts/cleave/files/crds").resolve() == ROOT / "crds"


def test_the_admission_policies_know_the_names_of_accounts(plain) -> None:
    patterns = set()
    for name in ("objects", "pods", "tokens"):
        policy = one(plain, "ValidatingAdmissionPolicy", f"cleave-operator-{name}")["spec"]
        texts = [each["expression"] for each in policy["validations"] + policy["matchConditions"]]
        patterns |= set(re.findall(r"-\([a-z|]+\)-\S+?\$(?=')", " ".join(texts)))
    (pattern,) = patterns
    for name in ACCOUNTS.names:
        assert re.search(f"^chat{pattern}", name)
    assert not re.search(f"^chat{pattern}", "chat-workers")


def test_releases_are_numbered_in_their_order(scripts) -> None:
    versions = ["0.1.0", "0.1.9", "0.1.10", "0.2.0", "1.0.0", "1.0.1"]
    numbers = [scripts.number_version(version) for version in versions]
    assert numbers == sorted(set(numbers))


def test_removing_the_operators_manifest_keeps_the_crds(plain) -> None:
    assert not [each for each in plain if each["kind"] == "CustomResourceDefinition"]


def test_the_operator_reaches_agents_and_what_gateways_know(plain) -> None:
    egress = one(plain, "NetworkPolicy", "cleave-operator")["spec"]["egress"]
    open_to = {
        rule["to"][0]["podSelector"]["matchLabels"]["cleave.dev/component"]: rule["ports"][0][
            "port"
        ]
        for rule in egress
        if "to" in rule
    }
    assert open_to == {"gateway": INTERNAL_PORT, "worker": AGENT_PORT}


def test_the_operators_metrics_are_for_named_namespaces_only(plain) -> None:
    ingress = one(plain, "NetworkPolicy", "cleave-operator")["spec"]["ingress"]
    assert [port["port"] for rule in ingress for port in rule["ports"]] == ["webhook"]


def test_the_operator_reaches_dns_pods_on_both_of_their_usual_ports(plain) -> None:
    egress = one(plain, "NetworkPolicy", "cleave-operator")["spec"]["egress"]
    anywhere = {
        (each["port"], each["protocol"])
        for rule in egress
        if "to" not in rule
        for each in rule["ports"]
    }
    assert {(port, kind) for port in (53, 5353) for kind in ("UDP", "TCP")} <= anywhere


def test_isolated_workers_get_a_policy_and_others_none() -> None:
    deployment = DEPLOYMENT
    built = {
        isolates: {
            action.manifest["kind"]
            for action in reconcile(
                DeploymentView(
                    resolve_in_cluster(deployment),
                    build_inventory([]),
                    0.0,
                    children=own_accounts(deployment),
                    settings=OperatorSettings(isolation=isolates),
                )
            )
            if isinstance(action, Apply)
        }
        for isolates in (NetworkIsolation(), None)
    }
    assert built[NetworkIsolation()] - built[None] == {"NetworkPolicy"}


def test_without_helm_the_manifests_stay_while_the_chart_is_unchanged(
    scripts, chart, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(scripts, "find_helm", lambda: None)
    shutil.copytree(chart, tmp_path / "chart")
    monkeypatch.setattr(scripts, "_CHART", tmp_path / "chart")
    assert scripts.main([str(tmp_path)]) == 0
    committed = (ROOT / "manifests" / "cleave.yaml").read_text()
    assert (tmp_path / "manifests" / "cleave.yaml").read_text() == committed

    values = tmp_path / "chart" / "values.yaml"
    values.write_text(values.read_text().replace("replicas: 2", "replicas: 3"))
    assert scripts.main([str(tmp_path)]) == 1
