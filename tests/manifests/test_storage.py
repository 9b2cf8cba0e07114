"""Where a worker's files are."""

import pytest

from cleave.manifests.worker import build_agent_command, build_worker_pod


def build_pod(pool, model):
    pod = build_worker_pod(pool(model=model), 0)
    (worker,) = pod["spec"]["containers"]
    return pod, worker


def model_volume(pod, worker):
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    (mount,) = [each for each in worker["volumeMounts"] if each["name"] == "model"]
    return volumes["model"], mount


def loaded(pool, model) -> str:
    line = build_agent_command(pool(model=model), "x")
    return line[line.index("--model") + 1]


def hub(worker) -> str | None:
    return {each["name"]: each.get("value") for each in worker["env"]}.get("HF_HOME")


@pytest.mark.parametrize(
    "model",
    [
        "org/model",
        "/models/llama",
        {"source": "org/model", "cache": {"image": {"reference": "llama:1"}}},
    ],
)
def test_every_mount_has_its_volume(pool, model) -> None:
    pod, worker = build_pod(pool, model)
    mounts = [mount["name"] for mount in worker["volumeMounts"]]
    assert mounts == [volume["name"] for volume in pod["spec"]["volumes"]]


def test_shared_memory_is_in_memory_and_as_large_as_an_engine_on_gpus_needs(pool) -> None:
    pod, worker = build_pod(pool, "org/model")
    volume = next(each for each in pod["spec"]["volumes"] if each["name"] == "shm")
    mount = next(each for each in worker["volumeMounts"] if each["name"] == "shm")
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    assert mount["mountPath"] == "/dev/shm"


def test_without_a_cache_nothing_outlives_the_pod(pool) -> None:
    pod, worker = build_pod(pool, "org/model")
    assert all("emptyDir" in volume for volume in pod["spec"]["volumes"])
    assert hub(worker) is None


def test_a_model_in_a_folder_is_mounted_where_it_lies(pool) -> None:
    volume, mount = model_volume(*build_pod(pool, "/models/llama"))
    assert volume["hostPath"] == {"path": "/models/llama", "type": "Directory"}
    assert mount == {"name": "model", "mountPath": "/models/llama", "readOnly": True}
    assert loaded(pool, "/models/llama") == "/models/llama"


def test_a_folder_of_the_node_may_lie_elsewhere_than_the_model_says(pool) -> None:
    model = {"source": "/llama", "cache": {"hostPath": {"path": "/mnt/disk/llama"}}}
    volume, mount = model_volume(*build_pod(pool, model))
    assert volume["hostPath"] == {"path": "/mnt/disk/llama", "type": "Directory"}
    assert (mount["mountPath"], loaded(pool, model)) == ("/llama", "/llama")


def test_downloads_are_cached_in_a_folder_of_the_node(pool) -> None:
    model = {"source": "org/model", "cache": {"hostPath": {"path": "/var/models"}}}
    pod, worker = build_pod(pool, model)
    volume, mount = model_volume(pod, worker)
    assert volume["hostPath"] == {"path": "/var/models", "type": "DirectoryOrCreate"}
    assert mount == {"name": "model", "mountPath": "/var/models"}
    assert (hub(worker), loaded(pool, model)) == ("/var/models", "org/model")


def test_downloads_are_cached_in_a_volume(pool) -> None:
    model = {"source": "org/model", "cache": {"persistentVolumeClaim": {"claimName": "models"}}}
    pod, worker = build_pod(pool, model)
    volume, mount = model_volume(pod, worker)
    assert volume["persistentVolumeClaim"] == {"claimName": "models"}
    assert "readOnly" not in mount
    assert hub(worker) == mount["mountPath"]


def test_a_volume_that_is_only_read_is_mounted_so(pool) -> None:
    claim = {"claimName": "models", "readOnly": True}
    model = {"source": "org/model", "cache": {"persistentVolumeClaim": claim}}
    volume, mount = model_volume(*build_pod(pool, model))
    assert volume["persistentVolumeClaim"] == claim
    assert mount["readOnly"] is True


def test_a_folder_may_be_a_volume(pool) -> None:
    model = {"source": "/llama", "cache": {"persistentVolumeClaim": {"claimName": "models"}}}
    pod, worker = build_pod(pool, model)
    _, mount = model_volume(pod, worker)
    assert mount == {"name": "model", "mountPath": "/llama", "readOnly": True}
    assert hub(worker) is None


@pytest.mark.parametrize(("source", "folder"), [("org/model", "/model"), ("/llama", "/llama")])
def test_a_model_in_an_image_is_loaded_from_where_it_is_mounted(pool, source, folder) -> None:
    model = {"source": source, "revision": "v2", "cache": {"image": {"reference": "llama:1"}}}
    volume, mount = model_volume(*build_pod(pool, model))
    assert volume["image"] == {"reference": "llama:1"}
    assert mount == {"name": "model", "mountPath": folder, "readOnly": True}
    assert loaded(pool, model) == folder
    line = build_agent_command(pool(model=model), "x")
    assert "--" not in line, "files have no revision"
    assert line[line.index("--served-model-name") + 1] == source.removeprefix("/")


def test_a_users_own_hub_folder_comes_before_the_caches(pool) -> None:
    cache = {"hostPath": {"path": "/var/models"}}
    declared = pool(
        model={"source": "org/model", "cache": cache},
        engine={"env": [{"name": "HF_HOME", "value": "/mine"}]},
    )
    (worker,) = build_worker_pod(declared, 0)["spec"]["containers"]
    assert [each["value"] for each in worker["env"] if each["name"] == "HF_HOME"] == ["/mine"]


def scratch(pod) -> dict[str, str | None]:
    volumes = pod["spec"]["volumes"]
    return {v["name"]: v["emptyDir"].get("sizeLimit") for v in volumes if "emptyDir" in v}


def test_one_pod_cannot_fill_the_disk_or_the_memory_of_its_node(pool) -> None:
    known = "meta-llama/Llama-3.1-70B-Instruct"  # 131.4 GiB
    four = {"manual": [{"role": "decode", "parallelism": {"tensor": 4}}]}
    cached = {"source": known, "cache": {"hostPath": {"path": "/models"}}}
    on_gpus = {"tmp": "10Gi", "shm": "32Gi"}
    for model, home in ((known, "175Gi"), (cached, "10Gi"), ("some/model", None)):
        pod = build_worker_pod(pool(model=model, placement=four), 0)
        assert scratch(pod) == {**on_gpus, "home": home}
    emulated = build_worker_pod(pool(engine={"type": "Emulated"}), 0)
    assert scratch(emulated) == dict.fromkeys(("tmp", "home", "shm"), "128Mi")


@pytest.mark.parametrize(
    ("resources", "home"),
    [
        ({"requests": {"ephemeral-storage": "60Gi"}}, "60Gi"),
        ({"limits": {"ephemeral-storage": "64.5Gi"}}, "65Gi"),
        ({"requests": {"ephemeral-storage": "5Gi"}}, "10Gi"),
        ({"requests": {"cpu": "4"}}, "10Gi"),
    ],
)
def test_the_home_folder_has_room_for_what_the_template_asks_for(pool, resources, home) -> None:
    cached = {"source": "org/model", "cache": {"hostPath": {"path": "/models"}}}
    pod = build_worker_pod(pool(model=cached, template={"resources": resources}), 0)
    assert scratch(pod)["home"] == home


@pytest.mark.parametrize(("space", "shm"), [(None, "2Gi"), ("4", "5Gi"), ("4.5", "2Gi")])
def test_shared_memory_on_cpu_holds_the_kv_cache(pool, space, shm) -> None:
    env = [{"name": "VLLM_CPU_KVCACHE_SPACE", "value": space}] if space else []
    pod = build_worker_pod(pool(engine={"env": env}), 0, device="cpu")
    assert scratch(pod)["shm"] == shm


def test_volumes_of_the_template_stay_as_they_are(pool) -> None:
    own = {"volumes": [{"name": "data", "emptyDir": {}}]}
    mounts = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    assert scratch(build_worker_pod(pool(template=own | mounts), 0))["data"] is None
