"""From a deployment and a cluster file to a question, or to faults with their paths."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from cleave.api.cluster import Cluster
from cleave.api.deployment import LLMDeployment
from cleave.api.manifest import ManifestError, validate
from cleave.perf.hardware.link import LinkKind
from cleave.planner import plan_search, problem_from_cluster
from cleave.planner.placement import PlanError
from cleave.planner.problem import Policies, Problem
from cleave.planner.search import candidate_placement as drafts
from cleave.planner.search.candidates import build_decode, build_prefill, list_candidates
from cleave.policy.role_flipping import build_thresholds
from cleave.simulator.fleet import Admission, PrefillOrder

from tests.support import known_problems, wide_problems
from tests.support.model_configs import HYBRID
from tests.support.node_terms import REQUIRED

SMALL = "Qwen/Qwen2.5-7B"
WORKLOAD = {"rate": 4, "promptTokens": {"mean": 512}, "outputTokens": {"mean": 64}}


def deployment(**spec: object) -> LLMDeployment:
    return validate(
        {
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "chat"},
            "spec": {
                "model": "facebook/opt-13b",
                "slo": {"ttftMs": 400, "tpotMs": 40},
                "workload": WORKLOAD,
                **spec,
            },
        }
    )


def cluster(text: str = "nodes: [{count: 4, gpu: A100-SXM-80GB}]") -> Cluster:
    return Cluster.model_validate(yaml.safe_load(text))


def test_the_question_carries_traffic_targets_and_machines() -> None:
    problem = problem_from_cluster.build_problem(deployment(), cluster(), seed=3)
    (supply,) = problem.supplies
    assert (supply.gpu, supply.num_nodes, supply.gpus_per_node) == ("A100-SXM-80GB", 4, 8)
    assert problem.max_gpus == 32
    assert problem.rate == 4
    assert problem.seed == 3
    assert problem.shape.name == "opt-13b"
    assert problem.demand.max_model_len == 2048


@pytest.mark.parametrize(
    ("operator", "products", "kept"),
    [
        ("In", ["NVIDIA-H100-80GB-HBM3", "NVIDIA-H200"], {"H100-SXM-80GB"}),
        ("NotIn", ["NVIDIA-H100-80GB-HBM3"], {"A100-SXM-80GB", "L4"}),
        ("In", ["NVIDIA-B200"], set()),
    ],
)
def test_the_templates_affinity_leaves_the_kinds_that_it_selects(
    operator: str, products: list[str], kept: set[str]
) -> None:
    rule = {"key": "nvidia.com/gpu.product", "operator": operator, "values": products}
    terms = [{"matchExpressions": [rule]}]
    template = {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}}}
    chat = deployment(template=template)
    machines = cluster("nodes: [{gpu: A100-SXM-80GB}, {gpu: H100}, {gpu: NVIDIA-L4}]")
    if kept:
        found = problem_from_cluster.build_problem(chat, machines).supplies
        assert {supply.gpu for supply in found} == kept
    else:
        with pytest.raises(
            PlanError, match=r"spec\.template\.affinity selects none of NVIDIA-A100"
        ):
            problem_from_cluster.build_problem(chat, machines)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), "all-to-all by allgather_reducescatter, busiest experts 2 x the mean"),
        (wide_problems.WIDE_ARGS, "all-to-all by deepep_v2, busiest experts 1.2 x the mean"),
    ],
)
def test_arguments_say_how_ranks_exchange_tokens(args: tuple[str, ...], text: str) -> None:
    problem = wide_problems.deepseek(args=args)
    found = problem.estimator.estimate("H200-SXM-141GB", 1, 1, 16, expert=True)
    assert found.confidence.source.endswith(text)
    assert found.confidence.serving is None


@pytest.mark.parametrize(
    ("config", "args", "is_said"),
    [
        ({"model_type": "qwen3_5_moe", "text_config": HYBRID}, [], True),
        ({"model_type": "qwen3_5_moe", "text_config": HYBRID}, ["--language-model-only"], False),
        (HYBRID, [], False),
    ],
)
def test_encoders_that_are_not_counted_are_named(
    config: dict[str, object], args: list[str], is_said: bool
) -> None:
    model = {"source": "org/model", "config": {"inline": config}}
    chat = deployment(model=model, engine={"args": args})
    notes = problem_from_cluster.build_problem(chat, cluster()).notes
    assert any("model's encoders (pictures, sound)" in note for note in notes) is is_said


def test_a_kernel_without_known_times_is_named() -> None:
    (note,) = (
        note
        for note in wide_problems.deepseek(args=["--all2all-backend=moonep"]).notes
        if "all2all" in note
    )
    assert note.startswith("spec.engine.args: --all2all-backend moonep: times are known of ")
    assert not any("all2all" in note for note in wide_problems.deepseek().notes)


def test_nvlink_over_nodes_speeds_up_ranks_over_nodes() -> None:
    apart, joined = (
        wide_problems.deepseek(nodes=8, gpu="GB200", gpusPerNode=4, **more).estimator.estimate(
            "GB200-NVL", 1, 1, 32, expert=True
        )
        for more in ({}, {"nvlinkGPUs": 72})
    )
    assert joined.timing.predict_decode_ms(128, 250_000) < 0.8 * apart.timing.predict_decode_ms(
        128, 250_000
    )


def test_it_can_be_answered() -> None:
    small = cluster("nodes: [{gpu: A100-SXM-80GB}]")
    answer = plan_search.plan(problem_from_cluster.build_problem(deployment(), small))
    assert answer.selected is not None
    assert answer.selected.prediction.attainment >= 0.9


def test_equal_groups_are_one_and_labels_are_names() -> None:
    problem = problem_from_cluster.build_problem(
        deployment(),
        cluster(
            "nodes: [{gpu: A100-SXM-80GB}, {gpu: NVIDIA-A100-SXM4-80GB, count: 2}, "
            "{gpu: A100-SXM-80GB, gpusPerNode: 4}]"
        ),
    )
    assert [(s.num_nodes, s.gpus_per_node) for s in problem.supplies] == [(3, 8), (1, 4)]


def test_a_limit_on_a_kind_is_spent_over_its_groups_in_order() -> None:
    choices = {"gpus": [{"type": "A100-SXM-80GB", "max": 10}]}
    problem = problem_from_cluster.build_problem(
        deployment(planning=choices),
        cluster(
            "nodes: [{gpu: A100-SXM-80GB}, {gpu: A100-SXM-80GB, gpusPerNode: 4}, "
            "{gpu: H100-SXM-80GB}]"
        ),
    )
    assert [supply.max_gpus for supply in problem.supplies] == [8, 2]


def test_a_model_length_below_the_models_own_cuts_requests_and_is_reported() -> None:
    model = {"source": "facebook/opt-13b", "maxModelLen": 540}
    lengths = {**WORKLOAD, "promptTokens": {"mean": 400, "p90": 800}}
    problem = problem_from_cluster.build_problem(
        deployment(model=model, workload=lengths), cluster()
    )
    assert problem.demand.max_model_len == 540
    assert any("longer than the model's 540 tokens" in note for note in problem.notes)


@pytest.mark.parametrize("gpu", ["GB200", "V100-32GB", "MI300X"])
def test_gpus_that_the_images_do_not_run_on_are_named(gpu: str) -> None:
    problem = problem_from_cluster.build_problem(
        deployment(), cluster(f"nodes: [{{gpu: {gpu}}}, {{gpu: H100}}]")
    )
    assert next(note for note in problem.notes if "images" in note).startswith(gpu[:5])
    assert not any(note.startswith("H100") for note in problem.notes)


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ({"model": "org/unheard-of"}, "spec.model.source: 'org/unheard-of'"),
        ({"workload": None}, "spec.workload: required for planning"),
        ({"workload": {"trace": {"path": "gone.csv"}}}, "spec.workload: "),
    ],
)
def test_what_is_wrong_in_the_deployment_is_one_line_with_its_path(
    spec: dict[str, object], fault: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError) as raised:
        problem_from_cluster.build_problem(deployment(**spec), cluster(), tmp_path)
    (line,) = raised.value.faults
    assert line.startswith(fault)
    assert "\n" not in line


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("nodes: [{gpu: Z9000}]", "nodes[0].gpu: "),
        ("{nodes: [{gpu: A100-SXM-80GB}], profiles: [gone.yaml]}", "profiles[0]: "),
    ],
)
def test_what_is_wrong_in_the_cluster_is_one_line_with_its_path(
    text: str, fault: str, tmp_path: Path
) -> None:
    with pytest.raises((PlanError, ManifestError)) as raised:
        problem_from_cluster.build_problem(deployment(), cluster(text), tmp_path)
    (line,) = raised.value.faults
    assert line.startswith(fault)


def test_a_model_that_fits_on_no_gpu_says_by_how_much() -> None:
    problem = problem_from_cluster.build_problem(
        deployment(model="meta-llama/Llama-3.1-405B"), cluster("nodes: [{gpu: A10G}]")
    )
    with pytest.raises(PlanError, match=r"^spec.model: .*does not fit: .* GiB of weights"):
        plan_search.plan(problem)


@pytest.mark.parametrize(
    ("gpu", "prefill", "seen", "kind", "gb_per_s"),
    [
        ("A100-SXM-80GB", 1, ", cellBandwidthGbps: 206.4", LinkKind.NVLINK, 25.8),
        # More than its NVLink can.
        ("A100-SXM-80GB", 1, ", cellBandwidthGbps: 9999", LinkKind.NVLINK, 0.8 * 300),
        ("A100-SXM-80GB", 1, "", LinkKind.ETHERNET, 0.36 * 25 / 8),
        # Nine GPUs do not fit a node with eight.
        ("A100-SXM-80GB", 8, ", cellBandwidthGbps: 206.4", LinkKind.ETHERNET, 0.36 * 25 / 8),
        # Nobody has seen two GPUs without NVLink reach each other.
        ("L40S", 1, ", cellBandwidthGbps: 206.4", LinkKind.ETHERNET, 0.36 * 25 / 8),
    ],
)
def test_kv_within_a_cell_that_is_one_pod_takes_nvlink_where_that_was_seen(
    gpu: str, prefill: int, seen: str, kind: LinkKind, gb_per_s: float
) -> None:
    slow = f"network: {{kind: Ethernet, bandwidthGbps: 25{seen}}}"
    problem = problem_from_cluster.build_problem(
        deployment(), cluster(f"{{nodes: [{{gpu: {gpu}}}], {slow}}}")
    )
    one = next(each for each in list_candidates(problem) if each.gpus == 1)
    cell = replace(known_problems.split(problem, one, prefill, one, 1), is_in_node=True)
    link = drafts.select_link(cell.with_copies(3))
    assert link.kind is kind
    assert link.effective_gb_per_s == pytest.approx(gb_per_s)
    says_so = any("never seen to take NVLink" in note for note in problem.notes)
    assert says_so is (gpu != "L40S" and not seen)


def test_kv_between_pods_of_one_node_takes_the_network_and_not_nvlink() -> None:
    slow = "network: {kind: Ethernet, bandwidthGbps: 25}"
    problem = problem_from_cluster.build_problem(
        deployment(), cluster(f"{{nodes: [{{gpu: A100-SXM-80GB}}], {slow}}}")
    )
    one = next(each for each in list_candidates(problem) if each.gpus == 1)
    pair = known_problems.split(problem, one, 1, one, 1)
    # 25 Gbit/s, of which TCP gets 36 %; NVLink of an A100 would be 300 GB/s.
    assert drafts.select_link(pair).effective_gb_per_s == pytest.approx(25 / 8 * 0.36)
    # 512 tokens of OPT-13B are 419 MB.
    moved = drafts.build_transfer(problem, pair)
    assert moved.latency_ms + 512 * moved.token_ms == pytest.approx(373, rel=0.01)


@pytest.mark.parametrize(
    ("gpu", "spec", "has_link"),
    [
        ("A100-SXM-80GB", {}, True),
        ("L40S", {}, False),
        ("A100-SXM-80GB", {"engine": {"connector": "Nixl"}}, True),
        ("A100-SXM-80GB", {"engine": {"transfer": "PerLayer"}}, True),
        ("A100-SXM-80GB", {"template": {"gpuResource": "nvidia.com/mig-3g.40gb"}}, False),
    ],
)
def test_cells_of_whole_gpus_have_a_link_where_it_was_seen(
    gpu: str, spec: dict[str, object], has_link: bool
) -> None:
    seen = cluster(f"{{nodes: [{{gpu: {gpu}}}], network: {{cellBandwidthGbps: 2400}}}}")
    problem = problem_from_cluster.build_problem(deployment(**spec), seen)
    assert (problem.supplies[0].cell_link is not None) is has_link
    unseen = problem_from_cluster.build_problem(
        deployment(**spec), cluster(f"{{nodes: [{{gpu: {gpu}}}]}}")
    )
    assert unseen.supplies[0].cell_link is None


def test_declared_scheduling_is_simulated() -> None:
    declared = {"order": "ShortestFirst", "sortedPrompts": 4, "admission": "ReserveDynamic"}
    problem = problem_from_cluster.build_problem(
        deployment(engine={"scheduling": declared}), cluster()
    )
    (candidate, *_) = list_candidates(problem)
    for instance in (
        build_prefill(problem, candidate),
        build_decode(problem, candidate),
    ):
        engine = instance.engine
        assert (engine.order, engine.prefill_sched_batch) == (PrefillOrder.SJF, 4)
        assert engine.admission is Admission.RESERVE_DYNAMIC
    default = Policies(flipping=build_thresholds(problem.slo.ttft_ms))
    assert problem_from_cluster.build_problem(deployment(), cluster()).policies == default


def test_engines_are_simulated_with_the_deployments_targets() -> None:
    declared = {"order": "InTimeFirst", "admission": "WithinTpot"}
    declared_deployment = deployment(engine={"scheduling": declared})
    problem = problem_from_cluster.build_problem(declared_deployment, cluster())
    (candidate, *_) = list_candidates(problem)
    engine = build_decode(problem, candidate).engine
    assert (engine.order, engine.admission) == (PrefillOrder.IN_TIME, Admission.WITHIN_TPOT)
    assert (engine.ttft_ms, engine.tpot_ms) == (problem.slo.ttft_ms, problem.slo.tpot_ms)


def test_kv_of_8_bits_halves_the_transfer_and_doubles_the_room() -> None:
    def build(*args: str) -> Problem:
        engine = {"args": list(args)}
        given = deployment(model="meta-llama/Llama-3.1-8B", engine=engine)
        return problem_from_cluster.build_problem(given, cluster("nodes: [{gpu: H200}]"))

    wide, narrow = build(), build("--kv-cache-dtype", "fp8")
    assert 2 * narrow.shape.kv_bytes_per_token == wide.shape.kv_bytes_per_token
    few, many = (each.estimator.estimate("H200-SXM-141GB", 1, 1) for each in (wide, narrow))
    assert few is not None
    assert many is not None
    assert many.kv_capacity_tokens == pytest.approx(2 * few.kv_capacity_tokens, abs=2)
    assert many.timing.predict_decode_ms(64, 64 * 8192) < few.timing.predict_decode_ms(
        64, 64 * 8192
    )
    with pytest.raises(PlanError, match=r"spec\.engine\.args: --kv-cache-dtype nvfp4: cannot"):
        build("--kv-cache-dtype=nvfp4")


@pytest.mark.parametrize("args", [["--quantization", "fp8"], ["--quantization=fp8"]])
def test_weights_of_8_bits_leave_room_for_kv_and_compute_faster(args: list[str]) -> None:
    def build(*args: str) -> Problem:
        engine = {"args": list(args)}
        given = deployment(model="meta-llama/Llama-3.1-8B", engine=engine)
        return problem_from_cluster.build_problem(given, cluster("nodes: [{gpu: H100}]"))

    wide, narrow = (
        each.estimator.estimate("H100-SXM-80GB", 1, 1) for each in (build(), build(*args))
    )
    assert wide is not None
    assert narrow is not None
    assert narrow.kv_capacity_tokens > 1.1 * wide.kv_capacity_tokens
    assert narrow.timing.predict_decode_ms(8, 8 * 1024) < 0.8 * wide.timing.predict_decode_ms(
        8, 8 * 1024
    )


def test_weights_that_planning_does_not_know_are_a_note_and_the_checkpoints_own_are_planned() -> (
    None
):
    def build(*args: str) -> Problem:
        engine = {"args": list(args)}
        given = deployment(model="meta-llama/Llama-3.1-8B", engine=engine)
        return problem_from_cluster.build_problem(given, cluster("nodes: [{gpu: H100}]"))

    usual, found = build(), build("--quantization", "bitsandbytes")
    assert found.shape == usual.shape
    (note,) = set(found.notes) - set(usual.notes)
    assert note.startswith(
        "spec.engine.args: --quantization bitsandbytes: plans count with weights of 16 bits"
    )
    assert build("--quantization=fp8").notes == usual.notes


def test_a_plan_for_parts_of_gpus_says_that_it_counts_whole_ones() -> None:
    template = {"gpuResource": "nvidia.com/mig-3g.40gb"}
    notes = problem_from_cluster.build_problem(deployment(template=template), cluster()).notes
    assert notes[0].startswith(
        "spec.template.gpuResource nvidia.com/mig-3g.40gb: the plan is for whole"
    )


def test_times_from_kernels_have_a_front_end_and_an_asynchronous_scheduler() -> None:
    given = deployment(model="meta-llama/Llama-3.1-8B")
    problem = problem_from_cluster.build_problem(given, cluster("nodes: [{gpu: H200}]"))
    found = problem.estimator.estimate("H200-SXM-141GB", 1, 1)
    assert found is not None
    assert found.front_end_ms == 17
    assert found.timing.schedules_ahead
    assert "17 ms of front end per request" in found.confidence.source


@pytest.mark.parametrize(
    ("transports", "is_smaller"), [(["nccl", "gloo"], True), (["gloo"], False), (None, False)]
)
def test_kv_over_nccl_leaves_less_memory_on_small_gpus(
    transports: list[str] | None, is_smaller: bool
) -> None:
    extra = {} if transports is None else {"kv_connector_extra_config": {"transports": transports}}
    args = [f"--kv-transfer-config={json.dumps(extra)}"]
    machines = cluster("nodes: [{gpu: L4}]")
    own, chosen = (
        problem_from_cluster.build_problem(
            deployment(model=SMALL, **spec), machines
        ).estimator.estimate("L4", 1, 1)
        for spec in ({}, {"engine": {"args": args}})
    )
    assert own is not None
    assert chosen is not None
    assert (chosen.kv_capacity_tokens < own.kv_capacity_tokens) is is_smaller


def test_a_model_of_the_resources_config_is_planned_with_room_for_its_mean_request() -> None:
    model = {"source": "/models/new", "config": {"inline": HYBRID}}
    h100 = cluster("nodes: [{count: 2, gpu: H100-SXM}]")
    rooms = []
    for prompt in (512, 32_768):
        workload = {"rate": 1, "promptTokens": {"mean": prompt}, "outputTokens": {"mean": 64}}
        problem = problem_from_cluster.build_problem(
            deployment(model=model, workload=workload), h100
        )
        assert problem.shape.name == "new"
        estimate = problem.estimator.estimate("H100-SXM-80GB", 4, 1)
        assert estimate is not None
        rooms.append(estimate.kv_capacity_tokens)
    assert rooms[1] > 2 * rooms[0]


def test_multi_token_prediction_takes_memory_and_the_plan_says_what_it_leaves_out() -> None:
    config = {"inline": {**HYBRID, "num_nextn_predict_layers": 1}}
    model = {"source": "org/new", "config": config}
    h100 = cluster("nodes: [{count: 2, gpu: H100-SXM}]")
    engine = {"args": ["--speculative-config", '{"method": "mtp"}']}
    plain, drafting = (
        problem_from_cluster.build_problem(deployment(model=model, engine=each), h100)
        for each in ({}, engine)
    )
    assert drafting.shape.weight_bytes > plain.shape.weight_bytes
    (note,) = (note for note in drafting.notes if "--speculative-config" in note)
    assert "no accepted tokens" in note
    engine = {"args": ['--speculative-config={"method": "mtp"}']}
    with pytest.raises(PlanError) as raised:
        problem_from_cluster.build_problem(deployment(engine=engine), h100)
    (fault,) = raised.value.faults
    assert fault.startswith("spec.engine.args: --speculative-config mtp: opt-13b states no ")


def test_accepted_drafts_shorten_the_mean_time_of_a_token() -> None:
    h100 = cluster("nodes: [{count: 2, gpu: H100-SXM}]")
    config = '{"method": "eagle3", "model": "org/eagle", "num_speculative_tokens": 2}'
    engine = {"args": ["--speculative-config", config]}
    plain, drafting = (
        problem_from_cluster.build_problem(
            deployment(engine=engine, planning=planning), h100
        ).estimator.estimate("H100-SXM-80GB", 1, 1)
        for planning in ({}, {"acceptanceLength": 2.2})
    )
    assert plain is not None
    assert drafting is not None
    ratio = plain.timing.predict_decode_ms(8, 4000) / drafting.timing.predict_decode_ms(8, 4000)
    assert 1.6 < ratio < 2.2


def test_deepseeks_own_layer_of_multi_token_prediction_is_known() -> None:
    h200 = cluster("nodes: [{count: 2, gpu: H200, gpusPerNode: 8}]")
    engine = {"args": ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}']}
    question = deployment(
        model="deepseek-ai/DeepSeek-V3", engine=engine, planning={"acceptanceLength": 1.87}
    )
    problem = problem_from_cluster.build_problem(question, h200)
    assert problem.shape.mtp_layers == 1
    estimate = problem.estimator.estimate("H200-SXM-141GB", 8, 1)
    assert estimate is not None
    assert "1.87 emitted an iteration" in estimate.confidence.source
