"""Worker pods, as the API server and the kubelets read them."""

import itertools
import json

import pytest

from cleave.api.engine import RESERVED_ENV
from cleave.api.scheduling import Scheduling
from cleave.distribution import get_version
from cleave.manifests.container import Images
from cleave.manifests.labels import AGENT_PORT
from cleave.manifests.worker import build_agent_command, build_scheduling_args, build_worker_pod
from cleave.policy.adapters import AdapterSource, parse_adapters
from cleave.policy.admission import Admission
from cleave.policy.prompt_order import PrefillOrder
from cleave.rpc.v1 import agent_pb2
from cleave_worker.scheduling.config import RoleSchedulingConfig, parse

from tests.support.built_pools import build_pools

DECLARED = {
    "order": "ShortestFirst",
    "sortedPrompts": 8,
    "longPromptTokens": 512,
    "admission": "ReserveDynamic",
    "preemptionLimit": 2,
    "limits": [{"role": "prefill", "maxNumBatchedTokens": 4096}],
}


def container(pod):
    (only,) = pod["spec"]["containers"]
    return only


def option(line: list[str], name: str) -> str:
    """The value of an option of the agent, not of the engine."""
    own = list(itertools.takewhile(lambda word: word != "--", line))
    return own[own.index(name) + 1]


def engine_args(line: list[str]) -> list[str]:
    return line[line.index("--") + 1 :] if "--" in line else []


def test_a_connector_is_named_where_it_is_not_vllms_own(pool) -> None:
    line = build_agent_command(pool(engine={"connector": "Cleave"}), "x")
    assert option(line, "--connector") == "cleave"
    assert "--transfer" not in line


def test_the_transfer_mode_is_given_when_it_is_not_the_default(pool) -> None:
    line = build_agent_command(pool(engine={"connector": "Cleave", "transfer": "PerLayer"}), "x")
    assert option(line, "--transfer") == "perlayer"


def test_names_count_up_from_the_pools_name(pool) -> None:
    names = [build_worker_pod(pool(), ordinal)["metadata"]["name"] for ordinal in range(3)]
    assert names == ["chat-decode-0", "chat-decode-1", "chat-decode-2"]


def test_a_pod_takes_the_name_that_it_is_given(pool) -> None:
    pod = build_worker_pod(pool(), "chat-decode-x7k2p")
    assert pod["metadata"]["name"] == "chat-decode-x7k2p"
    assert option(container(pod)["command"], "--name") == "chat-decode-x7k2p"


def test_labels_say_to_whom_a_worker_belongs(pool) -> None:
    labels = build_worker_pod(pool(), 0)["metadata"]["labels"]
    assert {name: value for name, value in labels.items() if "kubernetes.io" not in name} == {
        "cleave.dev/deployment": "chat",
        "cleave.dev/pool": "chat-decode",
        "cleave.dev/role": "decode",
        "cleave.dev/component": "worker",
        "cleave.dev/revision": pool().spec.revision,
        "cleave.dev/instance": "chat-decode-0",
    }


def test_the_command_line_is_the_agents(pool) -> None:
    assert build_agent_command(pool(), "chat-decode-0") == [
        *("python", "-m", "cleave_worker.agent.main"),
        *("--name", "chat-decode-0", "--deployment", "chat"),
        *("--revision", pool().spec.revision, "--role", "$(CLEAVE_ROLE)"),
        *("--model", "org/model", "--served-model-name", "org/model"),
        *("--tensor-parallel-size", "1", "--pipeline-parallel-size", "1"),
        *("--connector", "cleave"),
        *(
            "--engine",
            "vllm",
            "--start-timeout",
            "3600",
            "--host",
            "$(POD_IP)",
            "--port",
            "9000",
            "--engine-port",
            "9001",
        ),
        *("--drain-timeout", "600"),
    ]


def test_the_agent_gets_the_cell_of_its_pod(pool) -> None:
    assert option(container(build_worker_pod(pool(), 0, cell=0))["command"], "--cell") == "0"
    assert "--cell" not in container(build_worker_pod(pool(), 0))["command"]


def test_a_model_with_all_its_settings_reaches_agent_and_engine(pool) -> None:
    model = {
        "source": "hf://org/model",
        "revision": "v2",
        "dtype": "bfloat16",
        "maxModelLen": 4096,
        "servedName": "chat",
    }
    line = build_agent_command(pool(model=model, engine={"args": ["--seed", "1"]}), "x")
    assert option(line, "--model") == "org/model"
    assert option(line, "--served-model-name") == "chat"
    assert option(line, "--max-model-len") == "4096"
    assert engine_args(line) == ["--dtype", "bfloat16", "--revision", "v2", "--seed", "1"]


def test_the_emulated_engine_gets_its_timing_and_no_weights(pool) -> None:
    line = build_agent_command(
        pool(
            model={"source": "org/model", "revision": "v2"},
            engine={
                "type": "Emulated",
                "emulated": {"latency": "vllm/opt-13b/tp1", "timeScale": 0.1},
            },
        ),
        "x",
    )
    assert option(line, "--engine") == "emulated"
    assert engine_args(line) == ["--latency", "vllm/opt-13b/tp1", "--time-scale", "0.1"]


def test_the_emulated_engine_has_default_timing(pool) -> None:
    line = build_agent_command(pool(engine={"type": "Emulated"}), "x")
    assert engine_args(line) == ["--latency", "distserve/opt-13b/tp1", "--time-scale", "1"]


def test_parallelism_reaches_the_agent(pool) -> None:
    manual = [{"role": "decode", "parallelism": {"tensor": 4, "pipeline": 2}}]
    line = build_agent_command(pool(placement={"manual": manual}), "x")
    assert option(line, "--tensor-parallel-size") == "4"
    assert option(line, "--pipeline-parallel-size") == "2"


def test_pods_learn_their_address_and_where_the_agents_are(pool) -> None:
    spec = pool(engine={"env": [{"name": "A", "value": "b"}]})
    assert container(build_worker_pod(spec, 0))["env"] == [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "CLEAVE_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "CLEAVE_AGENTS", "value": "endpoints:llm/chat-workers:9000"},
        {
            "name": "CLEAVE_ROLE",
            "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['cleave.dev/role']"}},
        },
        {"name": "A", "value": "b"},
    ]


def test_a_worker_starts_with_the_adapters_of_its_pool(pool) -> None:
    adapters = [{"name": "sql", "source": "/data/sql"}]
    spec = pool(adapters=adapters, engine={"args": ["--enable-lora"]})
    env = {each["name"]: each.get("value") for each in container(build_worker_pod(spec, 0))["env"]}
    assert parse_adapters(env["CLEAVE_ADAPTERS"]) == (AdapterSource("sql", "/data/sql"),)
    assert "CLEAVE_ADAPTERS" in RESERVED_ENV


def test_the_environment_set_by_cleave_cannot_be_overridden(pool) -> None:
    found = container(build_worker_pod(pool(), 0))["env"]
    assert {each["name"] for each in found} <= set(RESERVED_ENV)


def test_readiness_is_the_engines_and_liveness_the_agents(pool) -> None:
    worker = container(build_worker_pod(pool(), 0))
    assert worker["readinessProbe"]["grpc"] == {"port": AGENT_PORT, "service": "ready"}
    assert worker["livenessProbe"]["grpc"] == {"port": AGENT_PORT}


@pytest.mark.parametrize("timeout_s", [0, 30, 600])
def test_a_drain_ends_before_kubernetes_kills(pool, timeout_s) -> None:
    pod = build_worker_pod(pool(template={"drainTimeoutS": timeout_s}), 0)
    assert pod["spec"]["terminationGracePeriodSeconds"] >= timeout_s + 11
    assert option(container(pod)["command"], "--drain-timeout") == str(timeout_s)


def test_pods_meet_the_restricted_security_standard(pool) -> None:
    pod = build_worker_pod(pool(), 0)
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["securityContext"]["runAsUser"] > 0
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(pod)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def test_pods_have_a_token_to_look_for_agents(pool) -> None:
    spec = build_worker_pod(pool(), 0)["spec"]
    assert spec["automountServiceAccountToken"] is True


def test_workers_with_rdma_have_no_capability_either(pool) -> None:
    template = {"resources": {"limits": {"rdma/ib": 1}}}
    worker = container(build_worker_pod(pool(template=template), 0))
    assert worker["resources"]["limits"]["rdma/ib"] == "1"
    assert worker["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize(
    ("spec", "device", "seconds"),
    [
        ({"engine": {"startTimeoutS": 60}}, "gpu", "60"),
        ({"model": "meta-llama/Llama-3.1-70B-Instruct"}, "gpu", "2311"),
        ({}, "gpu", "3600"),
        ({}, "cpu", None),
        ({"engine": {"type": "Emulated"}}, "gpu", None),
    ],
)
def test_an_engine_may_start_for_as_long_as_its_weights_take(pool, spec, device, seconds) -> None:
    line = container(build_worker_pod(pool(**spec), 0, device=device))["command"]
    assert (option(line, "--start-timeout") if "--start-timeout" in line else None) == seconds


TEMPLATE = {
    "labels": {"kueue.x-k8s.io/queue-name": "llm"},
    "annotations": {"k8s.v1.cni.cncf.io/networks": "roce-0"},
    "resourceClaims": [{"name": "imex", "resourceClaimTemplateName": "domain-channel"}],
    "volumes": [{"name": "certificates", "configMap": {"name": "ca"}}],
    "volumeMounts": [{"name": "certificates", "mountPath": "/etc/ssl/own"}],
    "imagePullSecrets": ["registry"],
    "priorityClassName": "serving",
    "schedulerName": "volcano",
    "hostNetwork": True,
    "runtimeClassName": "nvidia",
}


def test_the_template_reaches_every_part_of_a_pod(pool) -> None:
    pod = build_worker_pod(pool(template=TEMPLATE), 0)
    spec, worker = pod["spec"], container(pod)
    assert pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "llm"
    assert pod["metadata"]["annotations"] == TEMPLATE["annotations"]
    for name in ("resourceClaims", "priorityClassName", "schedulerName", "hostNetwork"):
        assert spec[name] == TEMPLATE[name]
    assert spec["runtimeClassName"] == "nvidia"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert worker["resources"]["claims"] == [{"name": "imex"}]
    assert TEMPLATE["volumes"][0] in spec["volumes"]
    assert TEMPLATE["volumeMounts"][0] in worker["volumeMounts"]


def test_an_empty_template_adds_no_field(pool) -> None:
    pod = build_worker_pod(pool(), 0)
    assert "annotations" not in pod["metadata"]
    assert not pod["spec"].keys() & {*TEMPLATE, "dnsPolicy"} - {"volumes"}


def test_compiled_kernels_stay_beside_the_downloads_for_each_kind_of_gpu(pool) -> None:
    model = {"source": "org/model", "cache": {"persistentVolumeClaim": {"claimName": "models"}}}
    manual = [{"role": "decode", "gpu": "NVIDIA-H100-80GB-HBM3"}]
    pod = build_worker_pod(pool(model=model, placement={"manual": manual}), 0)
    env = {each["name"]: each.get("value") for each in container(pod)["env"]}
    folder = f"/var/cache/cleave/compiled/{get_version()}/nvidia-h100-80gb-hbm3"
    assert env["VLLM_CACHE_ROOT"] == f"{folder}/vllm"
    assert env["TRITON_CACHE_DIR"] == f"{folder}/triton"


@pytest.mark.parametrize(
    ("cache", "device", "are_kept"),
    [
        ({"hostPath": {"path": "/models"}}, "gpu", True),
        ({"hostPath": {"path": "/models"}}, "cpu", False),
        ({"persistentVolumeClaim": {"claimName": "models"}}, "gpu", False),
        ({"image": {"reference": "models:1"}}, "gpu", False),
        (None, "gpu", False),
    ],
)
def test_kernels_of_unknown_gpus_are_kept_on_their_node_only(pool, cache, device, are_kept) -> None:
    model = {"source": "org/model", **({"cache": cache} if cache else {})}
    found = container(build_worker_pod(pool(model=model), 0, device=device))["env"]
    assert any(each["name"] == "VLLM_CACHE_ROOT" for each in found) is are_kept


def test_a_service_named_vllm_does_not_reach_the_engines_environment(pool) -> None:
    assert build_worker_pod(pool(), 0)["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize(
    ("engine", "device", "image"),
    [
        ({}, "gpu", "cleave-worker-cuda:"),
        ({}, "cpu", "cleave-worker-cpu:"),
        ({"type": "Emulated"}, "gpu", "cleave-worker-emulated:"),
        ({"image": "registry.example/x:1"}, "gpu", "registry.example/x:1"),
    ],
)
def test_the_image_fits_engine_and_device(pool, engine, device, image) -> None:
    assert container(build_worker_pod(pool(engine=engine), 0, device=device))["image"].startswith(
        image
    )


def test_pods_share_no_parts_that_one_could_change_for_all(pool) -> None:
    first, second = build_worker_pod(pool(), 0), build_worker_pod(pool(), 0)
    before = json.dumps(second)
    first["spec"]["topologySpreadConstraints"][0].clear()
    first["spec"]["securityContext"].clear()
    container(first)["securityContext"].clear()
    container(first)["env"][0].clear()
    assert json.dumps(second) == before


def test_the_image_is_the_operators_default_unless_given(pool) -> None:
    images = Images("registry.example/team/", {"worker-cpu": "mirror/cpu@sha256:ab"})
    own = container(build_worker_pod(pool(), 0, images=images))["image"]
    assert own.startswith("registry.example/team/cleave-worker-cuda:")
    on_cpu = build_worker_pod(pool(), 0, device="cpu", images=images)
    assert container(on_cpu)["image"] == "mirror/cpu@sha256:ab"
    declared = pool(engine={"image": "vllm:1"})
    assert container(build_worker_pod(declared, 0, images=images))["image"] == "vllm:1"


def test_pods_have_the_usual_labels_which_the_template_may_replace(pool) -> None:
    def labels(**template: object) -> dict[str, str]:
        return build_worker_pod(pool(template=template), 0)["metadata"]["labels"]

    assert labels()["app.kubernetes.io/component"] == "worker"
    assert labels()["app.kubernetes.io/instance"] == labels()["cleave.dev/deployment"]
    own = {"app.kubernetes.io/part-of": "shop"}
    assert labels(labels=own) == labels() | own


@pytest.mark.parametrize("own", [{}, {"optional": True}])
def test_a_key_comes_from_a_secret_which_may_be_optional(pool, own) -> None:
    env = [{"name": "S3_KEY", "valueFrom": {"secretKeyRef": {"name": "s3", "key": "key", **own}}}]
    assert container(build_worker_pod(pool(engine={"env": env}), 0))["env"][-1] == env[0]


@pytest.mark.parametrize("own", [{}, {"optional": True}])
def test_the_token_of_hugging_face_is_a_file(pool, own) -> None:
    reference = {"name": "hub", "key": "t.txt", **own}
    env = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}}]
    pod = build_worker_pod(pool(engine={"env": env}), 0)
    found = {each["name"]: each.get("value") for each in container(pod)["env"]}
    assert "HF_TOKEN" not in found
    volume = next(each for each in pod["spec"]["volumes"] if each["name"] == "cleave-hub-token")
    assert volume["secret"] == {
        "secretName": "hub",
        "items": [{"key": "t.txt", "path": "token"}],
        "defaultMode": 0o440,
        **own,
    }
    mount = next(m for m in container(pod)["volumeMounts"] if m["name"] == "cleave-hub-token")
    assert found["HF_TOKEN_PATH"] == f"{mount['mountPath']}/token"
    assert mount["readOnly"]
    plain = build_worker_pod(pool(engine={"env": [{"name": "HF_TOKEN", "value": "x"}]}), 0)
    assert container(plain)["env"][-1] == {"name": "HF_TOKEN", "value": "x"}


def test_each_role_gets_the_settings_of_its_phases() -> None:
    parsed = parse(json.dumps(build_scheduling_args(Scheduling.model_validate(DECLARED))))
    prompts = RoleSchedulingConfig(PrefillOrder.SJF, 8, long_prefill_token_threshold=512)
    assert parsed == {
        agent_pb2.ROLE_PREFILL: RoleSchedulingConfig(
            PrefillOrder.SJF, 8, max_num_batched_tokens=4096, long_prefill_token_threshold=512
        ),
        agent_pb2.ROLE_DECODE: RoleSchedulingConfig(
            admission=Admission.RESERVE_DYNAMIC, preemption_limit=2
        ),
        agent_pb2.ROLE_MIXED: RoleSchedulingConfig(
            prompts.order,
            prompts.prefill_sched_batch,
            long_prefill_token_threshold=512,
            admission=Admission.RESERVE_DYNAMIC,
            preemption_limit=2,
        ),
    }


def test_requests_in_time_are_first_in_every_role() -> None:
    scheduling = Scheduling.model_validate({"order": "InTimeFirst", "admission": "WithinTpot"})
    parsed = parse(json.dumps(build_scheduling_args(scheduling)))
    assert {config.order for config in parsed.values()} == {PrefillOrder.IN_TIME}
    assert [role for role in parsed if parsed[role].admission is Admission.WITHIN_TPOT] == [
        agent_pb2.ROLE_DECODE,
        agent_pb2.ROLE_MIXED,
    ]


def test_omitted_fields_follow_the_engines_defaults() -> None:
    assert set(parse(json.dumps(build_scheduling_args(Scheduling()))).values()) == {
        RoleSchedulingConfig()
    }


def test_workers_get_the_flag_only_when_the_field_is_set(deployment) -> None:
    plain, chat = deployment(), deployment(engine={"scheduling": DECLARED})
    for given, is_passed in ((plain, False), (chat, True)):
        pool = build_pools(given)[0]
        line = build_agent_command(pool, "w-0")
        assert ("--scheduling" in line) is is_passed
    assert json.loads(line[line.index("--scheduling") + 1]) == build_scheduling_args(
        chat.spec.engine.scheduling
    )
