"""What one worker asks of its node."""

import pytest

from cleave.api.pods.worker_template import Resources, WorkerTemplate
from cleave.local.kubelet.pod_spec import parse_pod
from cleave.manifests.resources import (
    add_rdma_device,
    find_rdma_device,
    has_rdma_devices,
    needs_whole_cards,
)
from cleave.manifests.worker import build_worker_pod
from cleave.perf.model.known_models import CONFIGS


def resources(pool, device: str = "cpu"):
    return build_worker_pod(pool, 0, device=device)["spec"]["containers"][0]["resources"]


def test_vllm_on_cpu_has_a_core_to_itself(pool) -> None:
    assert resources(pool()) == {
        "requests": {"cpu": "1", "memory": "6Gi", "ephemeral-storage": "10Gi"},
        "limits": {"cpu": "1", "memory": "6Gi"},
    }


def test_vllm_on_cpu_has_a_core_per_rank(pool) -> None:
    manual = [{"role": "decode", "parallelism": {"tensor": 2}}]
    found = resources(pool(placement={"manual": manual}))
    assert found["limits"] == {"cpu": "2", "memory": "12Gi"}


def test_vllm_on_gpus_asks_for_the_product_of_its_parallelism(pool) -> None:
    manual = [{"role": "decode", "parallelism": {"tensor": 4, "pipeline": 2}}]
    found = resources(pool(placement={"manual": manual}), "gpu")
    assert found["limits"] == {"nvidia.com/gpu": "8", "memory": "72Gi"}
    assert found["requests"]["cpu"] == "28"


@pytest.mark.parametrize("ranks", [1, 2])
def test_kv_in_host_memory_is_requested_in_addition(pool, ranks: int) -> None:
    placement = {"manual": [{"role": "decode", "parallelism": {"data": ranks}}]}
    plain = pool(placement=placement)
    with_copies = pool(placement=placement, engine={"kvOffloadingGib": 100})
    container = build_worker_pod(with_copies, 0, device="gpu")["spec"]["containers"][0]
    before = resources(plain, "gpu")
    for kind in ("requests", "limits"):
        grown = int(container["resources"][kind]["memory"].removesuffix("Gi"))
        assert grown == int(before[kind]["memory"].removesuffix("Gi")) + 100 * ranks
    # vLLM maps it from there.
    assert find_shm_gib(with_copies) == find_shm_gib(plain) + 100 * ranks
    assert "--kv-offloading-size" in container["command"]


def find_shm_gib(pool) -> int:
    volumes = build_worker_pod(pool, 0, device="gpu")["spec"]["volumes"]
    shm = next(each for each in volumes if each["name"] == "shm")
    return int(shm["emptyDir"]["sizeLimit"].removesuffix("Gi"))


def test_a_pod_of_an_instance_over_two_nodes_asks_for_half_of_its_gpus(pool) -> None:
    manual = [{"role": "decode", "parallelism": {"tensor": 4, "pipeline": 2}}]
    whole = pool(placement={"manual": manual})
    halved = whole.model_copy(update={"spec": whole.spec.model_copy(update={"nodes": 2})})
    assert resources(halved, "gpu")["limits"]["nvidia.com/gpu"] == "4"


def test_no_limit_throttles_the_polling_threads_of_vllm_on_gpus(pool) -> None:
    found = resources(pool(), "gpu")
    assert found["requests"]["cpu"] == "7"
    assert "cpu" not in found["limits"]


def test_cores_as_limit_are_cores_of_its_own_with_the_static_cpu_policy(pool) -> None:
    found = resources(
        pool(template={"resources": {"limits": {"cpu": 16, "memory": "64Gi"}}}), "gpu"
    )
    for name in ("cpu", "memory"):
        assert found["requests"][name] == found["limits"][name]


def test_a_known_models_weights_fit_its_memory_and_the_disk_that_they_are_downloaded_to(
    pool,
) -> None:
    model = "meta-llama/Llama-3.1-70B-Instruct"  # 131.4 GiB
    manual = [{"role": "decode", "parallelism": {"tensor": 4}}]
    found = resources(pool(model=model, placement={"manual": manual}), "gpu")
    assert found["requests"]["memory"] == "40Gi"
    assert found["limits"]["memory"] == "172Gi"
    assert found["requests"]["ephemeral-storage"] == "142Gi"


def test_a_model_in_a_cache_takes_no_disk_of_the_pod(pool) -> None:
    model = {"source": "org/model", "cache": {"hostPath": {"path": "/models"}}}
    assert resources(pool(model=model), "gpu")["requests"]["ephemeral-storage"] == "10Gi"


@pytest.mark.parametrize("name", ["nvidia.com/mig-3g.40gb", "amd.com/gpu"])
def test_gpus_are_requested_by_the_templates_resource(pool, name) -> None:
    found = resources(pool(template={"gpuResource": name}), "gpu")
    assert found["limits"][name] == "1"
    assert "nvidia.com/gpu" not in found["limits"]


def test_a_claim_may_allocate_the_gpus(pool) -> None:
    claims = [{"name": "gpus", "resourceClaimTemplateName": "one-gpu"}]
    found = resources(pool(template={"gpuResource": "", "resourceClaims": claims}), "gpu")
    assert found["claims"] == [{"name": "gpus"}]
    assert found["limits"].keys() == {"memory"}


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_emulated_engine_takes_no_core_and_no_gpu(pool, device) -> None:
    found = resources(pool(engine={"type": "Emulated"}), device)
    assert "nvidia.com/gpu" not in found["limits"]
    assert "cpu" not in found["limits"]


def test_an_override_replaces_the_default_of_that_resource_only(pool) -> None:
    override = {"resources": {"limits": {"cpu": 2}}}
    assert resources(pool(template=override)) == {
        "requests": {"cpu": "2", "memory": "6Gi", "ephemeral-storage": "10Gi"},
        "limits": {"cpu": "2", "memory": "6Gi"},
    }


def test_a_request_alone_takes_the_default_limit_away(pool) -> None:
    # Otherwise the request could be above the limit, which the API server refuses.
    override = {"resources": {"requests": {"cpu": 2}}}
    found = resources(pool(template=override))
    assert found["requests"]["cpu"] == "2"
    assert "cpu" not in found["limits"]


@pytest.mark.parametrize(
    ("spec", "cores"),
    [
        ({}, 1),
        ({"template": {"resources": {"limits": {"cpu": 3}}}}, 3),
        ({"template": {"resources": {"limits": {"cpu": "1500m"}}}}, 0),
        ({"engine": {"type": "Emulated"}}, 0),
    ],
)
def test_the_process_kubelet_reads_exclusive_cores_from_them(pool, spec, cores) -> None:
    assert parse_pod(build_worker_pod(pool(**spec), 0, device="cpu")).exclusive_cores == cores


@pytest.mark.parametrize(
    ("allocatable", "found"),
    [
        # As the API server writes 1000.
        ({"rdma/hca": "1k", "cpu": "96"}, "rdma/hca"),
        ({"rdma/ib_b": "63", "rdma/ib_a": "63"}, "rdma/ib_a"),
        ({"nvidia.com/hostdev": "8"}, "nvidia.com/hostdev"),
        # Two cards for eight GPUs: pods that require one would leave six GPUs unused.
        ({"nvidia.com/hostdev": "2"}, ""),
        # What the kubelet reports while the device plugin restarts.
        ({"rdma/hca": "0"}, ""),
        ({"vpc.amazonaws.com/efa": "32"}, ""),
    ],
)
def test_a_node_has_an_rdma_device_where_there_is_one_for_each_gpu(allocatable, found) -> None:
    assert find_rdma_device(allocatable, num_gpus=8) == found


@pytest.mark.parametrize(
    ("status", "is_offered"),
    [
        ({"capacity": {"rdma/hca": "63"}, "allocatable": {"rdma/hca": "0"}}, True),
        ({"allocatable": {"rdma/hca": "0"}}, True),
        ({"capacity": {"nvidia.com/hostdev": "2"}, "allocatable": {}}, False),
        ({"capacity": {"cpu": "96"}}, False),
        ({}, False),
    ],
)
def test_a_node_offers_rdma_also_while_the_plug_in_is_away(status, is_offered) -> None:
    assert has_rdma_devices(status, num_gpus=8) is is_offered


def rdma_units(spec, device: str) -> str | None:
    return add_rdma_device(spec, device).template.resources.limits.get(device)


def test_an_instance_requests_a_shared_device_once_and_a_card_for_each_gpu(pool) -> None:
    manual = [{"role": "decode", "parallelism": {"tensor": 4}}]
    networks = {"annotations": {"k8s.v1.cni.cncf.io/networks": "ib"}}
    spec = pool(placement={"manual": manual}, template=networks).spec
    assert rdma_units(spec, "rdma/hca") == "1"
    assert rdma_units(spec, "nvidia.com/hostdev") == "4"
    assert rdma_units(spec.model_copy(update={"nodes": 2}), "nvidia.com/hostdev") == "2"


def test_whole_cards_need_a_network_in_the_template(pool) -> None:
    spec = pool().spec
    assert add_rdma_device(spec, "nvidia.com/hostdev") == spec
    assert rdma_units(spec, "rdma/hca") == "1"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ({}, False),
        ({"annotations": {"k8s.v1.cni.cncf.io/networks": "ib"}}, True),
        ({"resources": {"limits": {"nvidia.com/hostdev": 1}}}, True),
        (
            {
                "annotations": {"k8s.v1.cni.cncf.io/networks": "ib"},
                "resources": {"limits": {"nvidia.com/hostdev": 0}},
            },
            False,
        ),
    ],
)
def test_pods_get_whole_cards_by_a_network_or_by_name(template, expected) -> None:
    assert needs_whole_cards(WorkerTemplate.model_validate(template)) is expected


def test_the_template_decides_about_rdma_and_emulated_engines_have_none(pool) -> None:
    for named in ("rdma/ib", "rdma/hca"):
        own = pool(template={"resources": {"limits": {named: 0}}}).spec
        assert add_rdma_device(own, "rdma/hca") == own
    emulated = pool(engine={"type": "Emulated"}).spec
    assert add_rdma_device(emulated, "rdma/hca") == emulated
    assert pool().spec.template.resources == Resources()


def test_a_config_gives_the_weights_of_any_model(pool) -> None:
    config = {"inline": dict(CONFIGS["llama-3.1-70b"])}
    manual = [{"role": "decode", "parallelism": {"tensor": 4}}]
    placed = {"model": {"source": "org/new", "config": config}, "placement": {"manual": manual}}
    assert resources(pool(**placed), "gpu")["limits"]["memory"] == "172Gi"
