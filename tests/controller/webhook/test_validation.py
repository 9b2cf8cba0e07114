"""Faults are independent of nodes; warnings concern the current nodes."""

import json

import pytest

from cleave.api.cluster import Cluster, NodeGroup
from cleave.api.manifest import validate
from cleave.api.pool import InstancePool
from cleave.controller.webhook.validation import ValidationFindings, check_deployment, check_pool
from cleave.perf.model.known_models import CONFIGS
from cleave.planner import deployment_checks

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
WORKLOAD = {"rate": 2, "promptTokens": {"mean": 500}, "outputTokens": {"mean": 100}}
A100 = Cluster(nodes=[NodeGroup(count=2, gpu="A100-SXM-80GB", gpus_per_node=8)])
SMALL = Cluster(nodes=[NodeGroup(count=1, gpu="A10G", gpus_per_node=1)])


def find(cluster=None, **spec) -> ValidationFindings:
    whole = {"model": LLAMA, "slo": {"ttftMs": 400, "tpotMs": 40}, **spec}
    document = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat"},
        "spec": whole,
    }
    return check_deployment(validate(document), cluster)


def manual(*pools):
    return {"manual": list(pools)}


def parallel(role, tensor=1, pipeline=1, **more):
    return {"role": role, "parallelism": {"tensor": tensor, "pipeline": pipeline}, **more}


def ranks(role, **sizes):
    return {"role": role, "parallelism": sizes}


def test_the_smallest_deployment_is_possible_anywhere() -> None:
    assert find() == find(A100) == find(SMALL) == ValidationFindings()


def test_heads_that_cannot_be_shared_are_a_fault() -> None:
    found = find(placement=manual(parallel("mixed", tensor=3)))
    (said,) = found.faults
    assert said == (
        "spec.placement.manual[0].parallelism: llama-3.1-8b: "
        "32 attention heads cannot be shared by 3 GPUs"
    )


def test_ranks_of_a_model_without_experts_are_a_fault() -> None:
    (fault,) = find(placement=manual(ranks("mixed", data=2))).faults
    assert fault == (
        "spec.placement.manual[0].parallelism: llama-3.1-8b: it has no experts, and without them "
        "data-parallel ranks are separate instances"
    )


def test_ranks_beyond_the_largest_node_wait() -> None:
    pools = manual(ranks("mixed", data=8, expert=True))
    assert find(A100, model="Qwen/Qwen3-30B-A3B", placement=pools) == ValidationFindings()
    pools = manual(ranks("mixed", tensor=2, data=8, expert=True))
    assert find(A100, model="Qwen/Qwen3-30B-A3B", placement=pools) == ValidationFindings()
    pools = manual(ranks("mixed", tensor=4, pipeline=4, data=2, expert=True))
    four = Cluster(nodes=[NodeGroup(count=4, gpu="A100-SXM-80GB", gpus_per_node=8)])
    found = find(four, model="Qwen/Qwen3-30B-A3B", placement=pools)
    assert found.faults == ()
    (said,) = found.warnings
    assert said == (
        "spec.placement.manual[0].parallelism: a data-parallel rank takes 16 GPUs of one node, the "
        "largest node has 8 x A100-SXM-80GB now; instances will wait: use a smaller tensor or "
        "pipeline size"
    )


def test_more_stages_than_layers_are_a_fault() -> None:
    (fault,) = find(placement=manual(parallel("mixed", pipeline=33))).faults
    assert "32 layers cannot fill 33 pipeline stages" in fault


def test_roles_whose_sizes_the_connector_cannot_match_are_a_fault() -> None:
    found = find(
        model="facebook/opt-13b",
        placement=manual(parallel("prefill", tensor=4), parallel("decode", tensor=10)),
        engine={"connector": "Nixl"},
    )
    (said,) = found.faults
    assert said == (
        "spec.placement.manual[1].parallelism.tensor: 10 cannot take KV from prefill instances "
        "with 4: one must be a multiple of the other, or spec.engine.connector Cleave"
    )


def test_the_default_connector_matches_any_two_sizes_that_the_model_takes() -> None:
    pools = manual(
        parallel("prefill", tensor=4, pipeline=2), parallel("decode", tensor=10, pipeline=5)
    )
    assert find(model="facebook/opt-13b", placement=pools) == ValidationFindings()
    pools = manual(parallel("prefill", tensor=3), parallel("decode"))
    (fault,) = find(placement=pools).faults
    assert "32 attention heads cannot be shared by 3 GPUs" in fault


@pytest.mark.parametrize(("prefill", "decode"), [(1, 4), (4, 1), (2, 2), (2, 8)])
def test_sizes_of_which_one_is_a_multiple_of_the_other_pass(prefill, decode) -> None:
    pools = manual(parallel("prefill", tensor=prefill), parallel("decode", tensor=decode))
    assert find(placement=pools, engine={"connector": "Nixl"}) == ValidationFindings()


def test_fewer_gpus_that_would_read_copies_of_kv_heads_are_a_fault() -> None:
    # Qwen3-30B-A3B has 4 KV heads: 8 GPUs keep two copies of each.
    pools = manual(parallel("prefill", tensor=8), parallel("decode", tensor=4))
    nixl = {"connector": "Nixl"}
    (said,) = find(model="Qwen/Qwen3-30B-A3B", placement=pools, engine=nixl).faults
    assert said == (
        "spec.placement.manual[1].parallelism.tensor: 4 cannot take KV from prefill instances "
        "with 8, which keep copies of the model's 4 KV heads: state at least 8, or at most 4 for "
        "prefill, or spec.engine.connector Cleave"
    )
    assert find(model="Qwen/Qwen3-30B-A3B", placement=pools) == ValidationFindings()
    # MLA keeps its latent whole on every GPU.
    assert (
        find(model="deepseek-ai/DeepSeek-V3", placement=pools, engine=nixl) == ValidationFindings()
    )


def test_of_a_model_of_unknown_size_the_same_is_a_warning() -> None:
    pools = manual(parallel("prefill", tensor=8), parallel("decode", tensor=4))
    nixl = {"connector": "Nixl"}
    found = find(model="somebody/something-new", placement=pools, engine=nixl)
    assert found.faults == ()
    (said,) = found.warnings
    assert said.startswith(
        "spec.placement.manual[1].parallelism.tensor: it is not in Cleave's model table"
    )
    assert "fewer than 8 KV heads" in said
    turned = manual(parallel("prefill", tensor=4), parallel("decode", tensor=8))
    assert (
        find(model="somebody/something-new", placement=turned, engine=nixl) == ValidationFindings()
    )


def test_a_model_of_unknown_size_is_valid_and_its_defaults_are_reported() -> None:
    unknown = "somebody/something-new"
    for cluster in (None, A100):
        found = find(cluster, model=unknown, workload=WORKLOAD)
        assert found.faults == ()
        said, remedy = found.warnings
        assert said.startswith("spec.model.source: it is not in Cleave's model table")
        assert "one prefill and one decode instance of one GPU each" in said
        assert remedy.startswith("spec.model.config: ")
        assert "spec.placement.manual" in remedy
    assert find(model=unknown) == ValidationFindings()
    manual_placement = manual(parallel("mixed", tensor=3))
    assert (
        find(model=unknown, workload=WORKLOAD, placement=manual_placement) == ValidationFindings()
    )


def test_a_folder_of_the_nodes_is_not_looked_for_here(tmp_path) -> None:
    (tmp_path / "config.json").write_text("not JSON")
    found = find(A100, model=str(tmp_path), workload=WORKLOAD)
    assert found.faults == ()
    assert found.warnings[0].startswith(
        "spec.model.source: it is a folder, which the operator does not read: "
    )
    assert (
        find(model=str(tmp_path), placement=manual(parallel("mixed", tensor=3)))
        == ValidationFindings()
    )


def test_arguments_that_the_engine_does_not_take_are_faults() -> None:
    (said,) = find(engine={"args": ["--kv-cache-dtyp", "fp8"]}).faults
    assert said == (
        "spec.engine.args: --kv-cache-dtyp: vLLM 0.32.0 has no such flag; did you mean "
        "--kv-cache-dtype?"
    )
    (said,) = find(engine={"args": ["--kv-transfer-config", "{'a': 1}"]}).faults
    assert said.startswith("spec.engine.args: --kv-transfer-config: is not JSON: ")
    fine = ["--kv_cache_dtype", "fp8", "--kv-cache-dtype-skip-layers=0", "--enforce-eager"]
    assert find(engine={"args": fine}) == ValidationFindings()


def test_flags_that_an_image_of_the_user_may_have_are_a_warning() -> None:
    found = find(engine={"args": ["--disable-log-requests"], "image": "example/vllm:1"})
    assert found.faults == ()
    (said,) = found.warnings
    assert said.startswith("spec.engine.args: --disable-log-requests: vLLM 0.32.0 has no such flag")


@pytest.mark.parametrize("flag", ["--uds=/data/x", "--config=/data/x", "--ssl_keyfile=x"])
def test_flags_that_take_from_cleave_what_it_manages_are_faults(flag: str) -> None:
    (said,) = find(engine={"args": [flag]}).faults
    assert said.startswith(f"spec.engine.args: {flag.split('=')[0].replace('_', '-')}: ")


def test_a_pool_is_checked_as_a_deployment_is() -> None:
    spec = {"deployment": "chat", "role": "mixed", "revision": "r1", "model": LLAMA}
    wrong = {"engine": {"args": ["--zzz"]}, "template": {"resources": {"limits": {"a/b": "1m"}}}}
    document = {"metadata": {"name": "chat-mixed"}, "spec": {**spec, **wrong}}
    found = check_pool(InstancePool.model_validate_json(json.dumps(document)), None)
    assert [fault.split(":")[0] for fault in found.faults] == [
        "spec.template.resources.limits",
        "spec.engine.args",
    ]


def test_conversations_of_which_nothing_can_repeat_are_a_warning() -> None:
    reuse = {"turns": 4, "turnIntervalS": 40, "newTokens": 250, "sharedTokens": 100}
    short = WORKLOAD | {"promptTokens": {"mean": 250}, "reuse": reuse}
    (said,) = find(workload=short).warnings
    assert said.startswith("spec.workload.reuse: newTokens 250 leave nothing of a mean prompt of")
    whole = short | {"promptTokens": {"mean": 300}}
    assert find(workload=whole).warnings == ()
    args = ["--no_enable_prefix_caching"]
    (said,) = find(workload=whole, engine={"args": args}).warnings
    assert said.startswith("spec.workload.reuse: has no effect with --no-enable-prefix-caching")


def test_gpus_beside_those_of_the_parallelism_are_a_warning_as_stored_resources_have_them() -> None:
    amd = {"gpuResource": "amd.com/gpu", "resources": {"limits": {"amd.com/gpu": 1}}}
    for template, name in (
        ({"resources": {"limits": {"nvidia.com/gpu": "1"}}}, "nvidia.com/gpu"),
        (amd, "amd.com/gpu"),
    ):
        found = find(template=template)
        assert found.faults == ()
        (said,) = found.warnings
        assert said.startswith(f"spec.template.resources: {name} replaces the number")


def test_an_instance_of_several_mig_devices_is_a_fault() -> None:
    template = {"gpuResource": "nvidia.com/mig-3g.40gb"}
    (said,) = find(template=template, placement=manual(parallel("mixed", tensor=2))).faults
    assert said.startswith(
        "spec.placement.manual[0].parallelism: an instance cannot be distributed over "
        "nvidia.com/mig-3g.40gb"
    )
    assert find(template=template, placement=manual(parallel("mixed"))) == ValidationFindings()


def test_targets_that_look_like_seconds_are_a_warning() -> None:
    found = find(slo={"ttftMs": 0.4, "tpotMs": 40})
    assert found.faults == ()
    (said,) = found.warnings
    assert said.startswith("spec.slo.ttftMs: 0.4 is 0.4 milliseconds; are these seconds?")
    assert find(slo={"ttftMs": 10, "tpotMs": 1}) == ValidationFindings()
    emulated = find(slo={"ttftMs": 400, "tpotMs": 0.04}, engine={"type": "Emulated"})
    assert len(emulated.warnings) == 1


def test_the_operator_opens_no_file_that_a_deployment_names(tmp_path) -> None:
    secret = tmp_path / "token"
    secret.write_text("hush\nhush\n")
    (fault,) = find(A100, workload={"rate": 1, "trace": {"path": str(secret)}}).faults
    assert fault.startswith("spec.workload.trace.path: no file is read in a cluster; state rate")
    secret = secret.rename(tmp_path / "token.yaml")
    engine = {"type": "Emulated", "emulated": {"latency": str(secret)}}
    (fault,) = find(engine=engine, workload=WORKLOAD).faults
    assert fault.startswith("spec.engine.emulated.latency: no file is read in a cluster")
    assert "hush" not in fault


def test_an_emulated_engine_asks_for_a_latency_profile_and_nothing_else() -> None:
    engine = {"type": "Emulated", "emulated": {"latency": "distserve/opt-13b/tp9"}}
    (fault,) = find(engine=engine).faults
    assert fault.startswith("spec.engine.emulated.latency: no latency profile")
    fine = {"type": "Emulated"}
    odd = manual(parallel("mixed", tensor=3, gpu="H100-SXM-80GB"))
    assert find(SMALL, model="x/y", engine=fine, placement=odd) == ValidationFindings()


def test_a_profile_in_a_file_may_be_in_the_workers_image_only() -> None:
    engine = {"type": "Emulated", "emulated": {"latency": "/profiles/mine.yaml"}}
    assert find(engine=engine) == ValidationFindings()


def test_an_instance_larger_than_all_nodes_is_a_warning() -> None:
    found = find(A100, placement=manual(parallel("mixed", tensor=32)))
    assert found.faults == ()
    (said,) = found.warnings
    assert said == (
        "spec.placement.manual[0].parallelism: an instance takes 32 GPUs, all nodes together have "
        "16 x A100-SXM-80GB now; instances will wait"
    )


def test_an_instance_over_several_nodes_is_none() -> None:
    assert find(A100, placement=manual(parallel("mixed", tensor=16))) == ValidationFindings()


def test_nodes_of_the_requested_kind_count() -> None:
    mixed = Cluster(nodes=[*A100.nodes, NodeGroup(gpu="H100-SXM-80GB", gpus_per_node=4)])
    placement = manual(parallel("mixed", tensor=8, gpu="H100-SXM-80GB"))
    (warning,) = find(mixed, placement=placement).warnings
    assert "takes 8 GPUs, all nodes together have 4 x H100-SXM-80GB now" in warning


def test_a_gpu_may_be_named_as_its_nodes_are_labelled() -> None:
    labelled = Cluster(nodes=[NodeGroup(gpu="NVIDIA-A100-SXM4-80GB", gpus_per_node=8)])
    assert (
        find(labelled, placement=manual(parallel("mixed", gpu="A100-SXM-80GB")))
        == ValidationFindings()
    )


def test_a_model_too_large_for_the_nodes_is_a_warning_with_the_reason() -> None:
    found = find(SMALL, model="meta-llama/Llama-3.1-70B-Instruct", workload=WORKLOAD)
    (warning,) = found.warnings
    assert warning.startswith("spec.model.source: no instance fits the nodes there are now (A10G: ")


def test_kinds_that_the_cluster_lacks_are_a_warning() -> None:
    (warning,) = find(
        A100, workload=WORKLOAD, planning={"gpus": [{"type": "H100-SXM-80GB"}]}
    ).warnings
    assert "the cluster has no H100-SXM-80GB" in warning


def test_what_fits_is_not_spoken_of() -> None:
    assert find(A100, workload=WORKLOAD) == ValidationFindings()


def test_a_pool_by_hand_is_held_to_the_same_rules() -> None:
    document = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "InstancePool",
        "metadata": {"name": "mine"},
        "spec": {
            "deployment": "chat",
            "role": "mixed",
            "revision": "r1",
            "model": LLAMA,
            "parallelism": {"tensor": 5},
            "gpu": "H100-SXM-80GB",
            "template": {"resources": {"limits": {"nvidia.com/gpu": "5"}}},
        },
    }
    pool = InstancePool.model_validate_json(json.dumps(document), by_alias=True, by_name=False)
    found = check_pool(pool, A100)
    assert found.faults == (
        "spec.parallelism: llama-3.1-8b: 32 attention heads cannot be shared by 5 GPUs",
    )
    assert len(found.warnings) == 2
    assert found.warnings == (
        *deployment_checks.list_gpu_overrides(pool.spec.template),
        (
            "spec.gpu: no node has H100-SXM-80GB now, there is A100-SXM-80GB; instances will wait, "
            "unless plans leave out nodes with this label"
        ),
    )


@pytest.mark.parametrize(
    "source",
    [
        {"source": "org/new"},
        {"source": "/models/new"},
        {"source": "/models/new", "cache": {"hostPath": {"path": "/models"}}},
        {"source": "/cache/new", "cache": {"persistentVolumeClaim": {"claimName": "weights"}}},
        {"source": "org/new", "cache": {"image": {"reference": "registry/new"}}},
    ],
)
def test_with_a_config_any_source_is_checked_and_planned(source) -> None:
    model = {**source, "config": {"inline": dict(CONFIGS["qwen3-32b"])}}
    for cluster in (None, A100):
        assert find(cluster, model=model, workload=WORKLOAD) == ValidationFindings()
    (said,) = find(model=model, placement=manual(parallel("mixed", tensor=3))).faults
    assert "64 attention heads cannot be shared by 3 GPUs" in said
    (said,) = find(SMALL, model=model, workload=WORKLOAD).warnings
    assert said.startswith("spec.model.source: no instance fits the nodes there are now")


def test_what_is_wrong_with_a_config_is_a_fault_of_its_field() -> None:
    inline = {**CONFIGS["qwen3-8b"], "num_attention_heads": 7}
    model = {"source": "org/new", "config": {"inline": inline}}
    for spec in ({"workload": WORKLOAD}, {}, {"engine": {"type": "Emulated"}}):
        (said,) = find(A100, model=model, **spec).faults
        assert said.startswith("spec.model.config.inline: new: ")
    pool = InstancePool.model_validate_json(
        json.dumps(
            {
                "apiVersion": "cleave.dev/v1alpha1",
                "kind": "InstancePool",
                "metadata": {"name": "p"},
                "spec": {"deployment": "chat", "role": "mixed", "revision": "r", "model": model},
            }
        ),
        by_alias=True,
    )
    (said,) = check_pool(pool, None).faults
    assert said.startswith("spec.model.config.inline: new: ")


def test_a_config_map_may_come_later() -> None:
    model = {"source": "org/new", "config": {"configMapKeyRef": {"name": "new"}}}
    found = find(A100, model=model, workload=WORKLOAD)
    assert found == ValidationFindings()


@pytest.mark.parametrize(
    ("method", "args", "is_refused"),
    [
        ("awq", [], True),
        ("fp8", [], True),
        ("compressed-tensors", [], False),
        ("", ["--quantization", "fp8"], True),
        ("", [], False),
    ],
)
def test_float32_is_refused_where_vllm_does_not_compute_the_weights_with_it(
    method: str, args: list[str], is_refused: bool
) -> None:
    config: dict = {**CONFIGS["llama-3.1-8b"]}
    if method == "compressed-tensors":
        weights = {"num_bits": 8, "type": "int"}
        group = {"targets": ["Linear"], "weights": weights}
        config["quantization_config"] = {"quant_method": method, "config_groups": {"g": group}}
    elif method:
        config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 128}
    model = {"source": "o/m", "dtype": "float32", "config": {"inline": config}}
    faults = find(model=model, engine={"args": args}).faults
    named = f"spec.model.dtype: vLLM does not compute {method or 'fp8'} weights with float32"
    assert any(fault.startswith(named) for fault in faults) == is_refused
    assert not find(model={**model, "dtype": "float16"}, engine={"args": args}).faults


@pytest.mark.parametrize("kind", ["vLLM", "Emulated"])
def test_an_adapter_with_the_name_of_its_model_could_never_be_requested(kind: str) -> None:
    engine = {"type": kind, "args": ["--enable-lora"]}
    model = {"source": "facebook/opt-13b", "servedName": "sql"}
    adapters = [{"name": "law", "source": "/data/law"}, {"name": "sql", "source": "/data/sql"}]
    faults = find(model=model, engine=engine, adapters=adapters).faults
    taken = "spec.adapters: sql is the name of the model itself; choose another name"
    assert taken in faults
    assert not find(model=model, engine=engine, adapters=adapters[:1]).faults
    aliased = {"adapters": adapters, "gateway": {"modelAliases": ["a/b", "sql"]}}
    assert taken in find(model="facebook/opt-13b", engine=engine, **aliased).faults


@pytest.mark.parametrize("aliases", [["chat"], ["a", "b", "a"]])
def test_a_name_of_the_model_is_there_once(aliases: list[str]) -> None:
    model = {"source": "facebook/opt-13b", "servedName": "chat"}
    fault = f"spec.gateway.modelAliases: {aliases[0]} names the model already; remove it"
    assert find(model=model, gateway={"modelAliases": aliases}).faults == (fault,)
    assert not find(model=model, gateway={"modelAliases": ["a", "facebook/opt-13b"]}).faults
