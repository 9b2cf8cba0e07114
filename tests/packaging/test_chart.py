"""What values change; needs helm."""

import base64
import copy
import functools
import json
import re
import subprocess
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml
from cel_expr_python import cel

from cleave.api.manifest import load_cluster, validate
from cleave.api.pool import InstancePool
from cleave.controller import install_check, main, uninstall_check
from cleave.controller.author_policy.admission_rules import build_rules
from cleave.controller.author_policy.allow_lists import add_own_images, parse
from cleave.controller.object_preview import list_pods
from cleave.controller.settings import OperatorSettings
from cleave.distribution import get_version
from cleave.manifests.container import IMAGE_KINDS, Images
from cleave.manifests.multi_node import build_leader_worker_set

from tests.packaging.conftest import find

ROOT = Path(__file__).parent.parent.parent
ASSIGNED = ("runAsUser", "runAsGroup", "fsGroup")
OPERATOR_LABELS = {
    "app.kubernetes.io/name": "cleave",
    "app.kubernetes.io/component": "operator",
}


def operator(manifests):
    (deployment,) = find(manifests, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container


def test_the_chart_is_of_this_version(chart) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart_file = yaml.safe_load((chart / "Chart.yaml").read_text())
    assert chart_file["version"] == chart_file["appVersion"] == project["version"]


def test_the_schema_knows_every_value(chart) -> None:
    values = yaml.safe_load((chart / "values.yaml").read_text())
    schema = json.loads((chart / "values.schema.json").read_text())
    jsonschema.validate(values, schema)

    def compare(given, node, path):
        known = node.get("properties", {})
        assert set(given) == set(known) or not known, path
        for key, value in given.items():
            if isinstance(value, dict) and key in known:
                compare(value, known[key], f"{path}.{key}")

    compare(values, schema, "")


def test_helm_finds_nothing_to_complain_about(helm, chart) -> None:
    completed = subprocess.run(
        [helm, "lint", "--strict", str(chart)], capture_output=True, text=True, timeout=60
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("operator.replicas=0", "replicas"),
        ("operator.replica=2", "replica"),
        ("webhook.failurePolicy=Never", "failurePolicy"),
        ("webhook.certificate=none", "certificate"),
        ("images.prefix=registry", "prefix"),
        ("metrics.podMonitor.interval=often", "interval"),
        ("typo=1", "typo"),
        ("commonLabels.app\\.kubernetes\\.io/name=x", "app.kubernetes.io/name"),
        ("fullnameOverride=Upper", "fullnameOverride"),
        ("metrics.rules.runbooks=", "runbooks"),
        ("webhook.issuerRef.kind=Secret", "kind"),
        ("operator.extraEnv[0].value=x", "extraEnv"),
        ("operator.logLevel=loud", "logLevel"),
        ("operator.livenessProbe.exec=x", "exec"),
        ("images.digests.gateway=latest", "gateway"),
        ("images.references.router=x", "router"),
        ("images.pullSecrets[0].secret=x", "pullSecrets"),
        ("global.imageRegistry=registry.local/path/", "imageRegistry"),
        ("namespaceOverride=Upper", "namespaceOverride"),
        ("metrics.rules.availability=0.5", "availability"),
        ("metrics.rules.disabled={CleavePoolsFlaps}", "disabled"),
        ("metrics.rules.severities.CleavePoolsFlaps=info", "CleavePoolsFlaps"),
        ("webhook.certificate=secret", "webhook.caBundle"),
        ("webhook.caBundle=x", "webhook.caBundle"),
        ("policy.profile=Baseline", "profile"),
        ("policy.allow.env={X}", "policy.allow.env has no effect with policy.profile Open"),
        ("policy.allow.volumes={gitRepo}", "volumes"),
        ("policy.allow.fields={hostPID}", "fields"),
        ("policy.allow.folders={data}", "folders"),
        ("policy.allow.images={registry*}", "images"),
        ("policy.allow.args={-tp}", "args"),
    ],
)
def test_wrong_values_are_refused_by_name(render, value, complaint) -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        render(value)
    assert complaint in error.value.stderr


def test_the_plain_manifests_are_what_the_chart_renders(helm, scripts) -> None:
    assert scripts.render(helm) == (ROOT / "manifests" / "cleave.yaml").read_text()


def test_the_crds_come_with_the_release_by_default(render) -> None:
    crds = find(render(), "CustomResourceDefinition")
    assert {each["metadata"]["annotations"]["helm.sh/resource-policy"] for each in crds} == {"keep"}
    assert len(crds) == 2
    assert not find(render("crds.enabled=false"), "CustomResourceDefinition")


def test_images_come_from_where_the_values_say(render) -> None:
    container = operator(render("images.prefix=registry.local/ai/", "images.tag=1.2"))
    assert container["image"] == "registry.local/ai/cleave-operator:1.2"
    assert "--image-prefix=registry.local/ai/" in container["args"]


@pytest.mark.parametrize(
    ("values", "prefix"),
    [
        (["global.imageRegistry=mirror:5000"], "mirror:5000/"),
        (["global.imageRegistry=mirror", "images.prefix=registry.local/ai/"], "mirror/ai/"),
        (["global.imageRegistry=mirror/", "images.prefix=team/ai/"], "mirror/team/ai/"),
    ],
)
def test_a_parent_charts_registry_replaces_that_of_the_prefix(render, values, prefix) -> None:
    container = operator(render(*values))
    assert container["image"] == f"{prefix}cleave-operator:{get_version()}"
    assert f"--image-prefix={prefix}" in container["args"]


def test_images_may_have_a_digest_or_a_reference_of_their_own(render) -> None:
    digest = f"sha256:{'ab' * 32}"
    container = operator(
        render(
            f"images.digests.operator={digest}",
            f"images.digests.worker-cpu={digest}",
            "images.references.gateway=mirror/gw:7",
        )
    )
    assert container["image"] == f"cleave-operator:{get_version()}@{digest}"
    images = main._build_parser("operator").parse_args(container["args"]).image
    assert images == [
        ("gateway", "mirror/gw:7"),
        ("worker-cpu", f"cleave-worker-cpu:{get_version()}@{digest}"),
    ]


def test_a_tag_is_that_of_all_images(render) -> None:
    container = operator(render("images.tag=main-1"))
    assert container["image"] == "cleave-operator:main-1"
    images = main._build_parser("operator").parse_args(container["args"]).image
    assert {kind for kind, _ in images} == {*IMAGE_KINDS}
    assert all(reference.endswith(":main-1") for _, reference in images)


def test_pull_secrets_are_names_or_objects_of_this_chart_and_its_parent(render) -> None:
    values = ("global.imagePullSecrets[0]=a", "images.pullSecrets[0].name=b")
    manifests = render(*values)
    pods = [each["spec"] for each in find(manifests, "Pod")]
    (deployment,) = find(manifests, "Deployment")
    for spec in [*pods, deployment["spec"]["template"]["spec"]]:
        assert spec["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]


def test_the_chart_may_be_in_another_namespace_than_its_release(render) -> None:
    values = [f"metrics.{name}.enabled=true" for name in ("podMonitor", "rules", "dashboards")]
    manifests = render("namespaceOverride=other", "crds.enabled=false", *values)
    namespaces = {each["metadata"].get("namespace") for each in manifests}
    assert namespaces == {"other", None}
    # The command that keeps the release names the release's own namespace.
    text = yaml.safe_dump_all(manifests, width=1_000).replace("-n cleave-system", "")
    assert "cleave-system" not in text


def test_probes_strategy_network_and_account_are_values(render) -> None:
    manifests = render(
        "operator.livenessProbe.periodSeconds=30",
        "operator.livenessProbe.initialDelaySeconds=null",
        "operator.strategy.type=Recreate",
        "operator.strategy.rollingUpdate=null",
        "operator.revisionHistoryLimit=2",
        "operator.hostNetwork=true",
        "operator.logLevel=debug",
        "operator.serviceAccount.annotations.role=arn",
    )
    (deployment,) = find(manifests, "Deployment")
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    assert deployment["spec"]["revisionHistoryLimit"] == 2
    pod = deployment["spec"]["template"]["spec"]
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    container = operator(manifests)
    assert container["livenessProbe"] == {
        "httpGet": {"path": "/healthz", "port": "http"},
        "periodSeconds": 30,
        "timeoutSeconds": 5,
        "failureThreshold": 3,
    }
    assert main._build_parser("operator").parse_args(container["args"]).log_level == "debug"
    accounts = {each["metadata"]["name"]: each for each in find(manifests, "ServiceAccount")}
    assert accounts["cleave-operator"]["metadata"]["annotations"] == {"role": "arn"}
    assert "hostNetwork" not in find(render(), "Deployment")[0]["spec"]["template"]["spec"]


def test_a_certificate_from_elsewhere_is_read_and_its_authority_trusted(render, tmp_path) -> None:
    pem = "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"
    for text in (pem, base64.b64encode(pem.encode()).decode()):
        file = tmp_path / "values.yaml"
        webhook = {"certificate": "secret", "caBundle": text}
        file.write_text(yaml.safe_dump({"webhook": webhook}))
        manifests = render(files=[file])
        (hooks,) = find(manifests, "ValidatingWebhookConfiguration")
        bundle = hooks["webhooks"][0]["clientConfig"]["caBundle"]
        assert base64.b64decode(bundle).decode() == pem
        assert not find(manifests, "Secret"), "it is not the chart's"
        assert "validatingwebhookconfigurations" not in yaml.safe_dump_all(
            find(manifests, "ClusterRole")
        )
        args = main._build_parser("operator").parse_args(operator(manifests)["args"])
        assert args.webhook_certificate == "secret"


def test_a_hook_refuses_to_uninstall_while_deployments_are_left(render) -> None:
    manifests = render("operator.namespaces={team-a,team-b}")
    (pod,) = (
        each
        for each in find(manifests, "Pod")
        if each["metadata"]["annotations"]["helm.sh/hook"] == "pre-delete"
    )
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["python", "-m", "cleave.controller.uninstall_check"]
    options = uninstall_check.build_parser().parse_args(container["args"])
    assert options.namespace == ["team-a", "team-b"]
    assert options.rollback == "helm rollback cleave 1 -n cleave-system"
    assert pod["spec"]["serviceAccountName"] == "cleave-operator", "which may list them"
    assert not OPERATOR_LABELS.items() <= pod["metadata"]["labels"].items(), "no Service selects it"
    assert "pre-delete" not in yaml.safe_dump_all(render("uninstallGuard.enabled=false"))


def test_a_narrowed_operator_has_rights_in_its_namespaces_only(render) -> None:
    manifests = render("operator.namespaces={team-a,team-b}")
    bound = {each["metadata"]["namespace"] for each in find(manifests, "RoleBinding")}
    assert bound == {"team-a", "team-b", "cleave-system"}
    wide = {each["roleRef"]["name"] for each in find(manifests, "ClusterRoleBinding")}
    assert wide == {"cleave-operator-cluster"}
    args = operator(manifests)["args"]
    assert {"--namespace=team-a", "--namespace=team-b"} <= set(args)
    (hooks,) = find(manifests, "ValidatingWebhookConfiguration")
    (term,) = hooks["webhooks"][0]["namespaceSelector"]["matchExpressions"]
    assert term["values"] == ["team-a", "team-b"]


@pytest.mark.parametrize(
    ("url", "port"),
    [("http://metrics.monitoring:9090/select", 9090), ("http://metrics1", 80), ("https://m", 443)],
)
def test_the_operator_asks_the_prometheus_that_is_named(render, url, port) -> None:
    manifests = render(f"planning.prometheus={url}")
    assert f"--prometheus={url}" in operator(manifests)["args"]
    (policy,) = find(manifests, "NetworkPolicy")
    assert {"ports": [{"port": port, "protocol": "TCP"}]} in policy["spec"]["egress"]
    with pytest.raises(subprocess.CalledProcessError):
        render("planning.prometheus=http://user:password@metrics")


def test_without_the_webhook_nothing_of_it_is_left(render) -> None:
    text = yaml.safe_dump_all(render("webhook.enabled=false", "crds.enabled=false"))
    assert "webhook" not in text
    assert "secrets" not in text


def test_with_cert_manager_the_operator_may_not_write_the_secret(render) -> None:
    manifests = render("webhook.certificate=cert-manager")
    assert not find(manifests, "Secret")
    (role,) = (each for each in find(manifests, "Role") if "hook" not in str(each["metadata"]))
    (rule,) = [rule for rule in role["rules"] if "secrets" in rule["resources"]]
    assert rule["verbs"] == ["get"]
    assert rule["resourceNames"] == ["cleave-webhook"]
    (hooks,) = find(manifests, "ValidatingWebhookConfiguration")
    injected = hooks["metadata"]["annotations"]["cert-manager.io/inject-ca-from"]
    assert injected == "cleave-system/cleave-webhook"
    assert "validatingwebhookconfigurations" not in yaml.safe_dump_all(
        find(manifests, "ClusterRole")
    )


def test_with_cert_manager_a_ca_that_keeps_its_key_signs_the_webhooks_certificate(render) -> None:
    manifests = render("webhook.certificate=cert-manager")
    issuers = {each["metadata"]["name"]: each["spec"] for each in find(manifests, "Issuer")}
    certificates = {each["metadata"]["name"]: each for each in find(manifests, "Certificate")}
    served = certificates["cleave-webhook"]["spec"]
    signer = issuers[served["issuerRef"]["name"]]["ca"]["secretName"]
    (authority,) = [
        each["spec"] for each in certificates.values() if each["spec"]["secretName"] == signer
    ]
    assert authority["isCA"]
    assert "cleave-webhook" not in issuers, "it signed itself, and would not issue again"
    assert authority["privateKey"]["rotationPolicy"] == "Never"
    assert issuers[authority["issuerRef"]["name"]] == {"selfSigned": {}}


def test_two_releases_share_no_name(render) -> None:
    def names(release, namespace):
        manifests = render("crds.enabled=false", release=release, namespace=namespace)
        return {(each["kind"], each["metadata"]["name"]) for each in manifests}

    assert not names("cleave", "a") & names("other", "b")


def test_configured_node_facts_reach_the_planner(render, tmp_path) -> None:
    manifests = render(
        "planning.network.kind=Ethernet",
        "planning.network.bandwidthGbps=25",
        "planning.gpus[0].name=Own-1,planning.gpus[0].memoryGib=24,planning.gpus[0].memoryGbps=900"
        ",planning.gpus[0].denseTflops=100",
        "planning.profiles.mine\\.yaml=kind: Profile",
    )
    (found,) = find(manifests, "ConfigMap")
    for name, text in found["data"].items():
        (tmp_path / name).write_text(text)
    cluster = load_cluster(tmp_path / "cluster.yaml")
    assert cluster.network.bandwidth_gbps == 25
    assert [gpu.name for gpu in cluster.gpus] == ["Own-1"]
    assert cluster.profiles == [str(tmp_path / "mine.yaml")]
    assert found["data"]["mine.yaml"] == "kind: Profile\n"
    assert "--cluster=/etc/cleave/planning/cluster.yaml" in operator(manifests)["args"]


def test_nodes_without_gpus_compute_on_cores_when_configured(render) -> None:
    assert "--device=cpu" in operator(render("workers.device=cpu"))["args"]


def test_every_argument_is_one_that_the_operator_takes(render) -> None:
    values = ("operator.namespaces={a,b}", "images.prefix=r/", "planning.network.kind=Ethernet")
    args = operator(render(*values, "workers.device=cpu"))["args"]
    # Ends the test with its complaint about one that it does not know.
    main._build_parser("operator").parse_args(args)


def test_one_operator_alone_has_no_budget_that_would_block_every_drain(render) -> None:
    assert not find(render("operator.replicas=1"), "PodDisruptionBudget")


def test_names_may_be_overridden_and_labels_that_select_stay(render) -> None:
    def read(*values, release="r"):
        (found,) = find(render("crds.enabled=false", *values, release=release), "Deployment")
        return found["metadata"]["name"], found["spec"]["selector"]["matchLabels"]

    assert read()[0] == "r-cleave-operator"
    assert read("nameOverride=ai")[0] == "r-ai-operator"
    assert read("nameOverride=ai", release="my-ai")[0] == "my-ai-operator"
    name, selector = read("fullnameOverride=llm", "nameOverride=ai")
    assert name == "llm-operator"
    assert OPERATOR_LABELS.items() <= selector.items(), "deployments' policies admit it by these"


def test_common_labels_are_on_every_object_and_select_nothing(render) -> None:
    values = [f"metrics.{name}.enabled=true" for name in ("podMonitor", "rules", "dashboards")]
    manifests = render("crds.enabled=false", "commonLabels.team=ml", *values)
    for each in manifests:
        labels = each["metadata"]["labels"]
        assert labels["team"] == "ml", each["kind"]
        assert labels["helm.sh/chart"].startswith("cleave-")
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
    (deployment,) = find(manifests, "Deployment")
    assert "team" not in deployment["spec"]["selector"]["matchLabels"]


def test_the_operators_pods_may_have_labels_and_annotations_of_the_chart_otherwise(render) -> None:
    values = ("commonLabels.team=ml", "operator.podLabels.team=serving")
    never = "operator.podAnnotations.prometheus\\.io/scrape=never"
    (deployment,) = find(render(*values, never), "Deployment")
    assert deployment["metadata"]["labels"]["team"] == "ml"
    meta = deployment["spec"]["template"]["metadata"]
    assert meta["labels"]["team"] == "serving"
    assert meta["annotations"]["prometheus.io/scrape"] == "never"
    assert meta["annotations"]["prometheus.io/port"] == "8081"


def test_pods_of_the_operator_take_what_other_charts_pods_take(render, tmp_path) -> None:
    values = {
        "podLabels": {"a": "b"},
        "podAnnotations": {"c": "d"},
        "priorityClassName": "system-cluster-critical",
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone"}],
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy"}],
        "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca"}],
    }
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({"operator": values}))
    (deployment,) = find(render(files=[file]), "Deployment")
    template = deployment["spec"]["template"]
    assert template["metadata"]["labels"]["a"] == "b"
    assert template["metadata"]["annotations"]["c"] == "d"
    spec = template["spec"]
    assert spec["priorityClassName"] == "system-cluster-critical"
    assert spec["topologySpreadConstraints"] == values["topologySpreadConstraints"]
    (container,) = spec["containers"]
    assert values["extraEnv"][0] in container["env"]
    assert values["extraVolumes"][0] in spec["volumes"]
    assert values["extraVolumeMounts"][0] in container["volumeMounts"]


def test_a_cluster_may_assign_the_user(render) -> None:
    nothing = ",".join(f"operator.podSecurityContext.{f}=null" for f in ASSIGNED)
    manifests = render(nothing, "workers.assignedUser=true")
    (deployment,) = find(manifests, "Deployment")
    spec = deployment["spec"]["template"]["spec"]
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert "--assigned-user" in operator(manifests)["args"]
    assert "--assigned-user" not in operator(render())["args"]


def test_extra_objects_are_installed_and_their_templates_expanded(render, tmp_path) -> None:
    file = tmp_path / "values.yaml"
    added = {"kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}}
    file.write_text(yaml.safe_dump({"extraObjects": [added]}))
    names = [each["metadata"]["name"] for each in find(render(files=[file]), "ConfigMap")]
    assert names == ["cleave-more"]


def test_an_issuer_of_ones_own_signs_the_webhooks_certificate(render) -> None:
    issuer = ("webhook.issuerRef.kind=ClusterIssuer", "webhook.issuerRef.name=corporate")
    manifests = render("webhook.certificate=cert-manager", *issuer)
    assert not find(manifests, "Issuer")
    (certificate,) = find(manifests, "Certificate")
    assert certificate["spec"]["issuerRef"] == {"kind": "ClusterIssuer", "name": "corporate"}
    with pytest.raises(subprocess.CalledProcessError) as error:
        render(*issuer)
    assert "webhook.issuerRef" in error.value.stderr


def test_the_operator_may_run_under_an_account_that_exists(render) -> None:
    usual = render("operator.namespaces={team-a}")
    values = "operator.serviceAccount.create=false", "operator.serviceAccount.name=platform"
    changed = render("operator.namespaces={team-a}", *values)
    (own,) = (
        each["metadata"]["name"]
        for each in find(usual, "ServiceAccount")
        if "helm.sh/hook" not in each["metadata"].get("annotations", {})
    )

    def rename(text: str) -> str:
        renamed = text.replace(f"system:serviceaccount:cleave-system:{own}", "system:...:platform")
        renamed = renamed.replace(
            "system:serviceaccount:cleave-system:platform", "system:...:platform"
        )
        renamed = renamed.replace(
            f'"serviceAccountName": "{own}"', '"serviceAccountName": "platform"'
        )
        tokens = r'("resources": \["serviceaccounts/token"\], "resourceNames": )\["[a-z-]+"\]'
        renamed = re.sub(tokens, r'\1["platform"]', renamed)
        return re.sub(rf'("kind": "ServiceAccount", "name": )"{own}"', r'\1"platform"', renamed)

    def write(manifests: list[dict]) -> str:
        kept = [
            each
            for each in manifests
            if (each["kind"], each["metadata"]["name"]) != ("ServiceAccount", own)
        ]
        return rename(json.dumps(kept))

    assert write(changed) == write(usual)
    text = json.dumps(changed)
    assert f"cleave-system:{own}" not in text
    assert text.count("cleave-system:platform") == 5


def test_helm_tests_check_runs_with_permissions_of_its_own(render) -> None:
    manifests = render("operator.namespaces={team-a,team-b}")
    hooks = [
        each
        for each in manifests
        if each["metadata"].get("annotations", {}).get("helm.sh/hook") == "test"
    ]
    assert {each["kind"] for each in hooks} == {"Pod", "Role", "RoleBinding", "ServiceAccount"}
    (pod,) = find(hooks, "Pod")
    # Helm makes hooks of equal weight one by one in the order of their names; a pod is waited for.
    weights = {
        each["kind"]: int(each["metadata"]["annotations"].get("helm.sh/hook-weight", 0))
        for each in hooks
    }
    of_pod = weights.pop("Pod")
    assert all(of_pod > weight for weight in weights.values())
    # Helm prints its lines, also those of a success.
    policy = pod["metadata"]["annotations"]["helm.sh/hook-output-log-policy"]
    assert policy == "hook-succeeded,hook-failed"
    assert not OPERATOR_LABELS.items() <= pod["metadata"]["labels"].items(), "no Service selects it"
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["python", "-m", "cleave.controller.install_check"]
    # Ends the test with its complaint about an argument that it does not know.
    options = install_check.build_parser().parse_args(container["args"])
    (deployment,) = find(manifests, "Deployment")
    assert options.lease == f"cleave-system/{deployment['metadata']['name']}"
    assert (options.namespace, options.webhook) == ("team-a", True)
    create = next(each for each in find(hooks, "Role") if each["metadata"]["namespace"] == "team-a")
    assert create["rules"] == [
        {"apiGroups": ["cleave.dev"], "resources": ["llmdeployments"], "verbs": ["create"]}
    ]


def test_annotations_for_artifact_hub_name_the_crds(chart) -> None:
    annotations = yaml.safe_load((chart / "Chart.yaml").read_text())["annotations"]
    described = yaml.safe_load(annotations["artifacthub.io/crds"])
    files = [yaml.safe_load(path.read_text()) for path in (ROOT / "crds").glob("*.yaml")]
    assert {(each["kind"], each["name"], each["version"]) for each in described} == {
        (each["spec"]["names"]["kind"], each["metadata"]["name"], version["name"])
        for each in files
        for version in each["spec"]["versions"]
    }
    (example,) = yaml.safe_load(annotations["artifacthub.io/crdsExamples"])
    validate(example)


def test_pods_are_judged_by_the_same_lists_in_the_operator_and_in_the_api_server(render) -> None:
    values = (
        "policy.profile=Restricted", "policy.allow.env={A,B*}", "policy.allow.folders={/x/,/}",
        "images.prefix=r:5000/c/", "images.references.gateway=own:1@sha256:ab",
    )  # fmt: skip
    manifests = render(*values)
    argument = next(
        each for each in operator(manifests)["args"] if each.startswith("--restrict-pods=")
    )
    images = Images("r:5000/c/", {"gateway": "own:1@sha256:ab"})
    lists = add_own_images(parse(argument.removeprefix("--restrict-pods=")), images)
    (policy,) = [
        each
        for each in find(manifests, "ValidatingAdmissionPolicy")
        if each["metadata"]["name"] == "cleave-operator-authors"
    ]
    variables = {each["name"]: each["expression"] for each in policy["spec"]["variables"]}
    for name in ("env", "folders", "images", "secrets"):
        exact, prefixes = json.loads(variables[name]), json.loads(variables[f"{name}Prefixes"])
        entries = {*exact, *(f"{each}*" for each in prefixes)}
        assert entries == {*lists.get(name, ())}, name
    assert policy["spec"]["validations"] == build_rules()["validations"]
    bindings = find(manifests, "ValidatingAdmissionPolicyBinding")
    assert "cleave-operator-authors" in {each["spec"]["policyName"] for each in bindings}


def test_with_the_open_profile_there_is_no_policy_about_authors(render) -> None:
    for values in ((), ("policy.profile=Restricted", "policy.admission=false")):
        names = {
            each["metadata"]["name"] for each in find(render(*values), "ValidatingAdmissionPolicy")
        }
        assert "cleave-operator-authors" not in names


@pytest.mark.parametrize("kind", ["Pod", "Deployment", "LeaderWorkerSet"])
def test_pods_and_templates_of_pods_are_judged_alike(render, kind: str) -> None:
    (policy,) = [
        each
        for each in find(render("policy.profile=Restricted"), "ValidatingAdmissionPolicy")
        if each["metadata"]["name"] == "cleave-operator-authors"
    ]
    environment = cel.NewEnv(
        variables=dict.fromkeys(("object", "request", "variables"), cel.Type.DYN)
    )

    def admits(written: dict) -> bool:
        bound = {"object": written, "request": {"kind": {"kind": kind}}, "variables": {}}
        for each in policy["spec"]["variables"]:
            value = environment.compile(each["expression"]).eval(data=bound)
            bound["variables"][each["name"]] = value.plain_value()
        expressions = [each["expression"] for each in policy["spec"]["validations"]]
        return all(
            environment.compile(each).eval(data=bound).value() is True for each in expressions
        )

    own = {"deployment": "chat", "role": "mixed", "revision": "r", "model": "org/m"}
    pool = InstancePool.model_validate_json(
        json.dumps({
            "metadata": {"name": "p"},
            "spec": {**own, "nodes": 2, "parallelism": {"tensor": 2}},
        })
    )  # fmt: skip
    pod = next(list_pods(pool, OperatorSettings()))
    group = build_leader_worker_set(pool, "p-0")
    for part in ("leaderTemplate", "workerTemplate"):
        group["spec"]["leaderWorkerTemplate"][part]["spec"]["serviceAccountName"] = "own"
    written = {
        "Pod": pod,
        "Deployment": {"spec": {"template": pod}},
        "LeaderWorkerSet": group,
    }[kind]
    assert admits(written)
    places = {
        "Pod": [("spec",)],
        "Deployment": [("spec", "template", "spec")],
        "LeaderWorkerSet": [
            ("spec", "leaderWorkerTemplate", part, "spec")
            for part in ("leaderTemplate", "workerTemplate")
        ],
    }
    for place in places[kind]:
        changed = copy.deepcopy(written)
        functools.reduce(dict.__getitem__, place, changed)["hostPID"] = True
        assert not admits(changed)
