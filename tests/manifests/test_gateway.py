"""The gateway's pod, and its Deployment and Service in a cluster."""

import argparse
from dataclasses import fields
from itertools import pairwise

import pytest

from cleave.api.deployment import LLMDeploymentStatus, WitnessSpec
from cleave.api.manifest import ManifestError
from cleave.api.plan import SelectedPlan
from cleave.gateway.config import GatewayConfig, Timeouts, build_config
from cleave.manifests.container import LISTEN_ON, Images
from cleave.manifests.gateway import (
    SHUTDOWN_DELAY_S,
    build_gateway_deployment,
    build_gateway_pod,
    build_gateway_service,
    build_url,
    get_thresholds,
)
from cleave.manifests.worker import build_worker_pod
from cleave.options import add_options
from cleave.rpc.plan_thresholds import PlanThresholds

from tests.support.built_pools import hash_revision


def container(pod):
    (only,) = pod["spec"]["containers"]
    return only


def option(line: list[str], name: str) -> str:
    return line[line.index(name) + 1]


def test_the_command_line_is_the_gateways(deployment) -> None:
    chat = deployment(
        routing={
            "fallback": "OnPrefillLoss",
            "policy": "PrefixAware",
            "sessionHeader": "x-session",
            "late": "Refuse",
            "queueLimit": 7,
        },
        pools={"flipping": "Advisory", "minDecode": 2},
        slo={"ttftMs": 400, "tpotMs": 40.5, "itlP99Ms": 60},
    )
    assert container(build_gateway_pod(chat))["command"] == [
        *("python", "-m", "cleave.gateway.main", "--host", LISTEN_ON, "--port", "8080"),
        *("--internal-port", "8081"),
        *("--agents", "$(CLEAVE_AGENTS)", "--deployment", "chat", "--fallback", "OnPrefillLoss"),
        *("--policy", "PrefixAware", "--session-header", "x-session"),
        *("--ttft-ms", "400", "--tpot-ms", "40.5", "--itl-p99-ms", "60"),
        *("--late-requests", "Refuse", "--queue-limit", "7"),
        *("--flipping", "Advisory", "--min-prefill", "1", "--min-decode", "2"),
        *("--drain-timeout", "600", "--allowed-hosts", "localhost"),
    ]


def test_the_gateway_learns_all_names_of_the_model(deployment) -> None:
    chat = deployment(gateway={"modelAliases": ["gpt-4o", "org/m"]})
    parser = argparse.ArgumentParser()
    add_options(parser, GatewayConfig, Timeouts)
    options, _ = parser.parse_known_args(container(build_gateway_pod(chat))["command"][3:])
    names = build_config(options).model_names
    assert names == (chat.spec.model.name, "gpt-4o", "org/m")
    # Engines and plans have no part in them.
    assert hash_revision(chat) == hash_revision(deployment())


def test_the_share_of_the_witness_is_given_only_where_it_differs_from_the_gateways(
    deployment,
) -> None:
    command = container(build_gateway_pod(deployment(witness={"engineShare": 0})))["command"]
    assert option(command, "--witness-share") == "0"
    assert "--witness-share" not in container(build_gateway_pod(deployment()))["command"]
    defaults = {field.name: field.default for field in fields(GatewayConfig)}
    assert WitnessSpec().engine_share == defaults["witness_share"]


@pytest.mark.parametrize(
    ("scheduling", "is_sent"),
    [
        (None, False),
        ({"order": "ShortestFirst"}, False),
        ({"order": "InTimeFirst"}, True),
        ({"admission": "WithinTpot"}, True),
    ],
    ids=str,
)
def test_targets_go_to_engines_that_schedule_by_them(deployment, scheduling, is_sent) -> None:
    chat = deployment(**({"engine": {"scheduling": scheduling}} if scheduling else {}))
    assert ("--send-targets" in container(build_gateway_pod(chat))["command"]) == is_sent


def test_the_gateway_listens_on_its_configured_address(deployment) -> None:
    pod = build_gateway_pod(deployment(), host="127.0.0.1", port=9999, internal_port=9)
    gateway = container(pod)
    assert gateway["command"][3:7] == ["--host", "127.0.0.1", "--port", "9999"]
    assert option(gateway["command"], "--internal-port") == "9"
    assert [port["containerPort"] for port in gateway["ports"]] == [9999, 9]
    assert gateway["readinessProbe"]["httpGet"] == {"path": "/health", "port": 9999}


def test_the_gateway_finds_the_agents_where_workers_look_for_peers(deployment, pool) -> None:
    sources = [
        {var["name"]: var.get("value") for var in container(pod)["env"]}["CLEAVE_AGENTS"]
        for pod in (build_gateway_pod(deployment()), build_worker_pod(pool(), 0))
    ]
    assert sources == ["endpoints:llm/chat-workers:9000"] * 2


def test_the_gateway_is_confined_like_workers_are(deployment, pool) -> None:
    gateway, worker = build_gateway_pod(deployment()), build_worker_pod(pool(), 0)
    assert gateway["spec"]["securityContext"] == worker["spec"]["securityContext"]
    assert container(gateway)["securityContext"] == container(worker)["securityContext"]


def test_a_cluster_runs_two_gateways_by_default_and_one_more_during_a_rollout(deployment) -> None:
    spec = build_gateway_deployment(deployment())["spec"]
    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert build_gateway_deployment(deployment(gateway={"replicas": 5}))["spec"]["replicas"] == 5


def test_in_a_cluster_it_is_the_same_pod_that_leaves_politely(deployment) -> None:
    alone = container(build_gateway_pod(deployment()))
    behind = container(build_gateway_deployment(deployment())["spec"]["template"])
    *shared, flag, hosts = alone["command"]
    assert (flag, hosts) == ("--allowed-hosts", "localhost"), "only there its clients are browsers"
    assert behind["command"] == [*shared, "--shutdown-delay", str(SHUTDOWN_DELAY_S)]
    assert [port["containerPort"] for port in behind["ports"]] == [8080, 8081]
    assert behind["livenessProbe"]["httpGet"] == {"path": "/livez", "port": 8081}


def test_each_process_of_a_pod_has_room_of_its_own(deployment) -> None:
    one, four = (container(build_gateway_pod(deployment(gateway={"processes": n}))) for n in (1, 4))
    assert "--processes" not in one["command"]
    assert option(four["command"], "--processes") == "4"
    assert one["resources"]["requests"] == {
        "cpu": "500m", "memory": "128Mi", "ephemeral-storage": "128Mi"
    }  # fmt: skip
    assert four["resources"]["requests"] == {
        "cpu": "2000m", "memory": "512Mi", "ephemeral-storage": "512Mi"
    }  # fmt: skip


def test_a_gateway_is_not_killed_before_its_streams_have_ended(deployment) -> None:
    chat = deployment(template={"drainTimeoutS": 1000})
    spec = build_gateway_deployment(chat)["spec"]["template"]["spec"]
    assert option(spec["containers"][0]["command"], "--drain-timeout") == "1000"
    assert spec["terminationGracePeriodSeconds"] > 1000 + SHUTDOWN_DELAY_S


def test_the_service_has_the_deployments_name_and_finds_the_gateways(deployment) -> None:
    service, gateways = (
        build_gateway_service(deployment()),
        build_gateway_deployment(deployment())["spec"],
    )
    assert (service["metadata"]["name"], service["metadata"]["namespace"]) == ("chat", "llm")
    (port,) = service["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (80, "http")
    labels = gateways["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert gateways["selector"]["matchLabels"].items() <= labels.items()
    assert build_url(deployment()) == "http://chat.llm.svc/v1"


def test_keys_come_from_a_secret(deployment) -> None:
    pod = build_gateway_pod(deployment(gateway={"keysSecret": "chat-keys"}))
    path = option(container(pod)["command"], "--api-keys")
    assert pod["spec"]["volumes"][-1]["secret"]["secretName"] == "chat-keys"
    mount = container(pod)["volumeMounts"][-1]
    assert (path, mount["readOnly"]) == (f"{mount['mountPath']}/keys", True)
    assert "--api-keys" not in container(build_gateway_pod(deployment()))["command"]


def test_with_a_certificate_everything_outside_is_https(deployment) -> None:
    chat = deployment(gateway={"tlsSecret": "chat-tls"})
    template = build_gateway_deployment(chat)["spec"]["template"]
    gateway = container(template)
    mount = gateway["volumeMounts"][-1]
    assert template["spec"]["volumes"][-1]["secret"]["secretName"] == "chat-tls"
    for flag, file in (("--tls-cert", "tls.crt"), ("--tls-key", "tls.key")):
        assert option(gateway["command"], flag) == f"{mount['mountPath']}/{file}"
    assert gateway["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert "scheme" not in gateway["livenessProbe"]["httpGet"], "the internal port stays plain"
    (port,) = build_gateway_service(chat)["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (443, gateway["ports"][0]["name"])
    assert build_url(chat) == "https://chat.llm.svc/v1"


def test_origins_of_pages_are_given_to_the_gateway(deployment) -> None:
    origins = ["https://chat.example.com", "http://localhost:3000"]
    pod = build_gateway_pod(deployment(gateway={"cors": {"allowedOrigins": origins}}))
    command = container(pod)["command"]
    assert option(command, "--allowed-origins") == ",".join(origins)
    assert "--allowed-origins" not in container(build_gateway_pod(deployment()))["command"]


def test_traces_and_the_access_log_are_enabled(deployment) -> None:
    collector = "http://collector:4317"
    chat = deployment(gateway={"tracing": {"endpoint": collector}, "accessLog": True})
    line = container(build_gateway_pod(chat))["command"]
    assert option(line, "--otlp-endpoint") == collector
    assert option(line, "--trace-share") == "0.01"
    assert "--access-log" in line
    plain = container(build_gateway_pod(deployment()))["command"]
    assert not {"--otlp-endpoint", "--trace-share", "--access-log"} & {*plain}


def test_an_endpoint_picker_is_a_second_port_of_the_service(deployment) -> None:
    chat = deployment(gateway={"endpointPicker": True})
    gateway = container(build_gateway_deployment(chat)["spec"]["template"])
    assert option(gateway["command"], "--endpoint-picker-port") == "9002"
    ports = {port["name"]: port["containerPort"] for port in gateway["ports"]}
    _, port = build_gateway_service(chat)["spec"]["ports"]
    assert (port["port"], ports[port["targetPort"]]) == (9002, 9002)
    plain = container(build_gateway_deployment(deployment())["spec"]["template"])
    assert "--endpoint-picker-port" not in plain["command"]


@pytest.mark.parametrize(
    ("spec", "flags", "spoken"),
    [
        ({}, [], "http2"),
        ({"endpointPickerPlain": True}, ["--endpoint-picker-plain"], "kubernetes.io/h2c"),
        (
            {"endpointPickerTlsSecret": "picker"},
            ["--endpoint-picker-cert", "{}/tls.crt", "--endpoint-picker-key", "{}/tls.key"],
            "http2",
        ),
    ],
    ids=["its own certificate", "without TLS", "a Secret's"],
)
def test_an_endpoint_picker_uses_tls_by_default(deployment, spec, flags, spoken) -> None:
    chat = deployment(gateway={"endpointPicker": True, **spec})
    template = build_gateway_deployment(chat)["spec"]["template"]
    mounted = container(template)["volumeMounts"][-1]["mountPath"]
    given = container(template)["command"]
    after = given[given.index("--endpoint-picker-port") + 2 :]
    assert after == [flag.format(mounted) for flag in flags]
    assert build_gateway_service(chat)["spec"]["ports"][-1]["appProtocol"] == spoken
    if "endpointPickerTlsSecret" in spec:
        assert template["spec"]["volumes"][-1]["secret"]["secretName"] == "picker"


def test_a_router_serves_callers_with_a_certificate_on_a_port_of_the_service(deployment) -> None:
    chat = deployment(gateway={"routerTlsSecret": "router"})
    template = build_gateway_deployment(chat)["spec"]["template"]
    assert template["spec"]["volumes"][-1]["secret"]["secretName"] == "router"
    gateway = container(template)
    mounted = gateway["volumeMounts"][-1]["mountPath"]
    flags = {"port": "9003", "cert": f"{mounted}/tls.crt", "key": f"{mounted}/tls.key"}
    for flag, value in {**flags, "client-ca": f"{mounted}/ca.crt"}.items():
        assert option(gateway["command"], f"--router-{flag}") == value
    ports = {port["name"]: port["containerPort"] for port in gateway["ports"]}
    _, port = build_gateway_service(chat)["spec"]["ports"]
    assert (port["port"], ports[port["targetPort"]]) == (9003, 9003)


def test_an_endpoint_picker_names_gateways_that_speak_plain_http(deployment) -> None:
    with pytest.raises(ManifestError, match="plain HTTP"):
        deployment(gateway={"endpointPicker": True, "tlsSecret": "chat-tls"})


def test_the_image_is_the_specified_one_or_the_operators_default(deployment) -> None:
    def image(**gateway: str) -> str:
        template = build_gateway_deployment(
            deployment(gateway=gateway), images=Images("registry.example/")
        )
        return container(template["spec"]["template"])["image"]

    assert image(image="mine:1") == "mine:1"
    assert image().startswith("registry.example/cleave-gateway:")


def test_gateways_are_pulled_as_workers_are_and_have_the_usual_labels(deployment) -> None:
    manifest = build_gateway_deployment(deployment(template={"imagePullSecrets": ["registry"]}))
    template = manifest["spec"]["template"]
    assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    usual = build_gateway_deployment(deployment())["spec"]["template"]
    assert "imagePullSecrets" not in usual["spec"]
    assert template["metadata"]["labels"]["app.kubernetes.io/component"] == "gateway"
    selector = manifest["spec"]["selector"]["matchLabels"]
    assert not any(name.startswith("app.kubernetes.io") for name in selector), "it is immutable"


def test_the_gateway_gets_the_prompt_limit_of_decode_instances(deployment) -> None:
    plan = SelectedPlan(revision="r", reason="planned", gpus=2, whole_below_tokens=256)
    alone = container(build_gateway_pod(deployment(), plan=plan))["command"]
    assert ("--short-prompt-tokens", "256") in pairwise(alone)
    assert "--short-prompt-tokens" not in container(build_gateway_pod(deployment()))["command"]


def test_a_plan_changes_no_gateway_in_a_cluster(deployment) -> None:
    """Its thresholds come with the workers' Service: a flag would start the pods again."""
    chat = deployment(engine={"connector": "Cleave", "transfer": "Auto"})
    plan = SelectedPlan(revision="r", reason="planned", gpus=2, whole_below_tokens=256)
    planned = chat.model_copy(update={"status": LLMDeploymentStatus(plan=plan)})
    assert build_gateway_deployment(planned) == build_gateway_deployment(chat)


def test_the_gateway_gets_the_prompt_limit_of_overlapped_prefill(deployment) -> None:
    plan = SelectedPlan(revision="r", reason="planned", gpus=2, ahead_from_tokens=512)
    engine = {"connector": "Cleave", "transfer": "Auto"}
    command = container(build_gateway_pod(deployment(engine=engine), plan=plan))["command"]
    assert ("--overlap-min-tokens", "512") in pairwise(command)
    assert get_thresholds(deployment(engine=engine), plan) == PlanThresholds(0, 512)
    assert get_thresholds(deployment(), plan) == PlanThresholds()
    for others in (
        build_gateway_pod(deployment(engine=engine)),
        build_gateway_pod(deployment(engine=engine | {"transfer": "PerLayer"}), plan=plan),
    ):
        assert "--overlap-min-tokens" not in container(others)["command"]


def test_requests_wait_for_instances_where_these_may_all_be_gone(deployment) -> None:
    def line(**scaling: int) -> list[str]:
        pod = build_gateway_deployment(deployment(scaling=scaling))["spec"]["template"]
        return container(pod)["command"]

    assert option(line(idleS=60), "--wake-timeout") == "600"
    assert option(line(idleS=60, wakeTimeoutS=9), "--wake-timeout") == "9"
    assert "--wake-timeout" not in line()
