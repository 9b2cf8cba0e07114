"""Planning for engines that emulate a profile."""

from pathlib import Path

import pytest

from cleave.api.deployment import LLMDeployment
from cleave.api.manifest import load_cluster, validate
from cleave.perf import named_profiles
from cleave.planner import problem_from_cluster, problem_from_profile
from cleave.planner.placement import PlanError
from cleave.planner.plan import EMULATED_GPU

WORKLOAD = {"rate": 4, "promptTokens": {"mean": 300}, "outputTokens": {"mean": 60}}


def deployment(workload=WORKLOAD, **spec) -> LLMDeployment:
    return validate(
        {
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "chat"},
            "spec": {
                "model": "facebook/opt-13b",
                "slo": {"ttftMs": 400, "tpotMs": 40},
                "engine": {"type": "Emulated"},
                **({"workload": workload} if workload else {}),
                **spec,
            },
        }
    )


def test_instances_have_the_times_of_the_profile_scaled() -> None:
    engine = {"type": "Emulated", "emulated": {"timeScale": 0.5}}
    estimate = problem_from_profile.build_problem(deployment(engine=engine)).estimator.estimate(
        EMULATED_GPU, 1, 1
    )
    profile = named_profiles.load_profile("distserve/opt-13b/tp1")
    assert estimate.timing.predict_prefill_ms([512]) == pytest.approx(
        0.5 * profile.timing.predict_prefill_ms([512])
    )
    assert estimate.timing.predict_decode_ms(9, 4000) == pytest.approx(
        0.5 * profile.timing.predict_decode_ms(9, 4000)
    )
    assert estimate.kv_capacity_tokens == profile.kv_capacity_tokens


def test_the_hand_off_takes_what_the_engine_makes_it_take() -> None:
    (supply,) = problem_from_profile.build_problem(deployment()).supplies
    assert supply.node_link.start_ms == pytest.approx(1.0)
    assert supply.node_link.effective_gb_per_s == pytest.approx(25.0)


def test_nothing_repeats_for_engines_without_prefix_caches() -> None:
    reuse = {"turns": 4, "turnIntervalS": 20, "newTokens": 100}
    for args, has_reuse in (([], True), (["--no-enable-prefix-caching"], False)):
        engine = {"type": "Emulated", "args": args}
        chats = deployment({**WORKLOAD, "reuse": reuse}, engine=engine)
        assert problem_from_profile.build_problem(chats).demand.has_reuse is has_reuse
        assert problem_from_cluster.build_demand(chats, Path()).has_reuse is has_reuse


def test_instances_are_not_split_and_say_why() -> None:
    estimator = problem_from_profile.build_problem(deployment()).estimator
    assert estimator.estimate(EMULATED_GPU, 2, 1) is None
    assert "without parallelism" in estimator.explain_unsupported(EMULATED_GPU, 2, 1)
    assert estimator.explain_unsupported(EMULATED_GPU, 1, 1) is None


def test_there_are_as_many_instances_as_max_gpus_says() -> None:
    assert problem_from_profile.build_problem(deployment(planning={"maxGPUs": 5})).max_gpus == 5
    assert (
        problem_from_profile.build_problem(deployment()).max_gpus
        == problem_from_profile.MAX_INSTANCES
    )
    six = load_cluster("nodes: [{count: 3, gpu: any, gpusPerNode: 2}]")
    assert problem_from_profile.build_problem(deployment(), cluster=six).max_gpus == 6
    assert (
        problem_from_profile.build_problem(
            deployment(planning={"maxGPUs": 5}), cluster=six
        ).max_gpus
        == 5
    )


def test_requests_are_cut_to_what_the_model_takes() -> None:
    long = {**WORKLOAD, "promptTokens": {"mean": 5000}}
    drawn = problem_from_profile.build_problem(deployment(long)).demand.draw(50, 1.0, 0)
    assert (drawn.prompt_tokens + drawn.output_tokens).max() <= 2048


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ({"workload": None}, "spec.workload: required"),
        ({"workload": {"trace": {"path": "absent.csv"}}}, "spec.workload: "),
        (
            {"engine": {"type": "Emulated", "emulated": {"latency": "nope"}}},
            "spec.engine.emulated.latency: no latency profile",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line_at_its_field(spec, fault, tmp_path) -> None:
    workload = spec.pop("workload", WORKLOAD)
    with pytest.raises(PlanError) as refused:
        problem_from_profile.build_problem(deployment(workload, **spec), tmp_path)
    (line,) = refused.value.faults
    assert line.startswith(fault)
    assert "\n" not in line
