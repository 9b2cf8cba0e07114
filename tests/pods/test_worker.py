"""Worker pods, as the API server and the kubelets read them."""

import itertools
import json

import pytest

from cleave.pods.labels import AGENT_PORT
from cleave.pods.worker import DRAIN_TIMEOUT_S, command, worker_pod


def container(pod):
    (only,) = pod["spec"]["containers"]
    return only


def option(line: list[str], name: str) -> str:
    """The value of an option of the agent, not of the engine."""
    own = list(itertools.takewhile(lambda word: word != "--", line))
    return own[own.index(name) + 1]


def engine_args(line: list[str]) -> list[str]:
    return line[line.index("--") + 1 :] if "--" in line else []


def test_names_count_up_from_the_pools_name(pool) -> None:
    names = [worker_pod(pool(), ordinal)["metadata"]["name"] for ordinal in range(3)]
    assert names == ["chat-decode-0", "chat-decode-1", "chat-decode-2"]


def test_labels_say_to_whom_a_worker_belongs(pool) -> None:
    assert worker_pod(pool(), 0)["metadata"]["labels"] == {
        "cleave.dev/deployment": "chat",
        "cleave.dev/pool": "chat-decode",
        "cleave.dev/role": "decode",
        "cleave.dev/component": "worker",
    }


def test_the_command_line_is_the_agents(pool) -> None:
    assert command(pool(), "chat-decode-0") == [
        *("python", "-m", "cleave_worker.agent.main"),
        *("--name", "chat-decode-0", "--deployment", "chat"),
        *("--revision", pool().spec.revision, "--role", "decode"),
        *("--model", "org/model", "--served-model-name", "org/model", "--engine", "vllm"),
        *("--host", "$(POD_IP)", "--port", "9000"),
        *("--tensor-parallel-size", "1", "--pipeline-parallel-size", "1"),
        *("--drain-timeout", "30"),
    ]


def test_a_model_with_all_its_settings_reaches_agent_and_engine(pool) -> None:
    model = {
        "source": "hf://org/model",
        "revision": "v2",
        "dtype": "bfloat16",
        "maxModelLen": 4096,
        "servedName": "chat",
    }
    line = command(pool(model=model, engine={"args": ["--seed", "1"]}), "x")
    assert option(line, "--model") == "org/model"
    assert option(line, "--served-model-name") == "chat"
    assert option(line, "--max-model-len") == "4096"
    assert engine_args(line) == ["--dtype", "bfloat16", "--revision", "v2", "--seed", "1"]


def test_the_emulated_engine_gets_its_timing_and_no_weights(pool) -> None:
    line = command(
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
    line = command(pool(engine={"type": "Emulated"}), "x")
    assert engine_args(line) == ["--latency", "distserve/opt-13b/tp1", "--time-scale", "1"]


def test_parallelism_reaches_the_agent(pool) -> None:
    manual = [{"role": "decode", "parallelism": {"tensor": 4, "pipeline": 2}}]
    line = command(pool(placement={"manual": manual}), "x")
    assert option(line, "--tensor-parallel-size") == "4"
    assert option(line, "--pipeline-parallel-size") == "2"


def test_pods_learn_their_address_and_where_the_agents_are(pool) -> None:
    spec = pool(engine={"env": [{"name": "A", "value": "b"}]})
    assert container(worker_pod(spec, 0))["env"] == [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "CLEAVE_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "CLEAVE_AGENTS", "value": "dns:chat-workers.llm.svc:9000"},
        {"name": "A", "value": "b"},
    ]


def test_readiness_is_the_engines_and_liveness_the_agents(pool) -> None:
    worker = container(worker_pod(pool(), 0))
    assert worker["readinessProbe"]["grpc"] == {"port": AGENT_PORT, "service": "ready"}
    assert worker["livenessProbe"]["grpc"] == {"port": AGENT_PORT}


def test_a_drain_ends_before_kubernetes_kills(pool) -> None:
    pod = worker_pod(pool(), 0)
    assert pod["spec"]["terminationGracePeriodSeconds"] >= DRAIN_TIMEOUT_S + 11
    assert option(container(pod)["command"], "--drain-timeout") == str(DRAIN_TIMEOUT_S)


def test_pods_meet_the_restricted_security_standard(pool) -> None:
    pod = worker_pod(pool(), 0)
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["securityContext"]["runAsUser"] > 0
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(pod)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert pod["spec"]["automountServiceAccountToken"] is False


def test_a_service_named_vllm_does_not_reach_the_engines_environment(pool) -> None:
    assert worker_pod(pool(), 0)["spec"]["enableServiceLinks"] is False


def test_every_mount_has_its_volume(pool) -> None:
    for model in ("org/model", "/models/llama"):
        pod = worker_pod(pool(model=model), 0)
        mounts = [mount["name"] for mount in container(pod)["volumeMounts"]]
        assert mounts == [volume["name"] for volume in pod["spec"]["volumes"]]


def test_a_model_in_a_folder_is_mounted_where_it_lies(pool) -> None:
    pod = worker_pod(pool(model="/models/llama"), 0)
    volume, mount = pod["spec"]["volumes"][-1], container(pod)["volumeMounts"][-1]
    assert volume["hostPath"] == {"path": "/models/llama", "type": "Directory"}
    assert mount == {"name": "model", "mountPath": "/models/llama", "readOnly": True}
    assert option(container(pod)["command"], "--model") == "/models/llama"


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
    assert container(worker_pod(pool(engine=engine), 0, device=device))["image"].startswith(image)


def test_pods_go_only_where_the_template_says(pool) -> None:
    spec = worker_pod(
        pool(
            template={
                "nodeSelector": {"gpu": "h100"},
                "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
            }
        ),
        0,
    )["spec"]
    assert spec["nodeSelector"] == {"gpu": "h100"}
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_without_a_template_pods_go_anywhere(pool) -> None:
    assert not {"nodeSelector", "tolerations"} & worker_pod(pool(), 0)["spec"].keys()


def test_pods_share_no_parts_that_one_could_change_for_all(pool) -> None:
    first, second = worker_pod(pool(), 0), worker_pod(pool(), 0)
    before = json.dumps(second)
    first["spec"]["securityContext"].clear()
    container(first)["securityContext"].clear()
    container(first)["env"][0].clear()
    assert json.dumps(second) == before


@pytest.mark.parametrize(
    ("gpu", "label"),
    [("A100-SXM-80GB", "NVIDIA-A100-SXM4-80GB"), ("our-own-gpu", "our-own-gpu")],
)
def test_a_kind_of_gpu_asks_for_nodes_with_its_label(pool, gpu, label) -> None:
    stated = pool(placement={"manual": [{"role": "decode", "gpu": gpu}]})
    on_gpus, on_cores = (worker_pod(stated, 0, device=device) for device in ("gpu", "cpu"))
    assert on_gpus["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": label}
    assert "nodeSelector" not in on_cores["spec"]


def test_a_selector_by_hand_comes_before_the_kind_of_gpu(pool) -> None:
    stated = pool(
        placement={"manual": [{"role": "decode", "gpu": "H100"}]},
        template={"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED"}},
    )
    assert worker_pod(stated, 0)["spec"]["nodeSelector"] == {
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED"
    }


def test_emulated_engines_run_on_any_node(pool) -> None:
    stated = pool(
        placement={"manual": [{"role": "decode", "gpu": "H100"}]}, engine={"type": "Emulated"}
    )
    assert "nodeSelector" not in worker_pod(stated, 0)["spec"]
