"""Which placement comes up on this machine."""

from dataclasses import replace
from pathlib import Path

import pytest

from cleave import distribution
from cleave.api.deployment import LLMDeployment
from cleave.api.manifest import validate
from cleave.local.errors import DeploymentStartError
from cleave.local.kubelet.node import GpuDevice, LocalNode
from cleave.local.launch_plan import LaunchPlan
from cleave.local.planning import build_launch_plan, decide_placement
from cleave.planner import plan_search
from cleave.planner.placement import PlanError

WORKLOAD = {"rate": 4, "promptTokens": {"mean": 300}, "outputTokens": {"mean": 60}}


def deployment(**spec) -> LLMDeployment:
    return validate(
        {
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "chat"},
            "spec": {
                "model": "facebook/opt-13b",
                "slo": {"ttftMs": 400, "tpotMs": 40},
                "engine": {"type": "Emulated"},
                **spec,
            },
        }
    )


@pytest.fixture
def unplanned(monkeypatch) -> None:
    def refuse(*_):
        raise AssertionError("nothing is to be searched for")

    monkeypatch.setattr(plan_search, "plan", refuse)


def test_a_manual_placement_starts_without_a_search(unplanned) -> None:
    placement = decide_placement(
        deployment(workload=WORKLOAD, placement={"manual": [{"role": "mixed"}]})
    )
    assert (placement.gpus, placement.result) == (1, None)


@pytest.mark.parametrize("spec", [{}, {"workload": WORKLOAD, "engine": {"type": "vLLM"}}])
def test_without_a_workload_or_machines_it_is_the_smallest_pair(unplanned, spec) -> None:
    placement = decide_placement(deployment(**spec))
    assert [(str(pool.role), pool.replicas) for pool in placement.pools] == [
        ("prefill", 1),
        ("decode", 1),
    ]


def test_a_workload_is_planned_and_the_job_reports_it(monkeypatch, answer, node: LocalNode) -> None:
    monkeypatch.setattr(plan_search, "plan", lambda *_: answer)
    chat = deployment(workload=WORKLOAD)
    placement = decide_placement(chat)
    assert placement.pools == answer.selected.pools
    job = build_launch_plan(chat, placement, node, 8080, allow_shared_cores=True)
    assert job.plan["verdict"] == "Disaggregate"
    assert len(job.plan["alternatives"]) == 3
    assert [pod["metadata"]["name"] for pod in job.pods] == [
        "chat-prefill-0",
        "chat-prefill-1",
        "chat-decode-0",
        "chat-gateway",
    ]
    command = job.pods[0]["spec"]["containers"][0]["command"]
    assert command[command.index("--max-num-batched-tokens") + 1] == "8192"


def test_what_cannot_hold_is_refused_with_the_nearest_slo(monkeypatch, infeasible) -> None:
    monkeypatch.setattr(plan_search, "plan", lambda *_: infeasible)
    with pytest.raises(DeploymentStartError) as refused:
        decide_placement(deployment(workload=WORKLOAD))
    (line,) = refused.value.faults
    assert line.startswith(f"{infeasible.reason}; ")


def test_a_missing_trace_is_reported_at_its_field(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"^spec.workload: "):
        decide_placement(deployment(workload={"trace": {"path": "gone.csv"}}), tmp_path)


def test_planning_without_the_planner_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(distribution, "find_missing_extras", list)
    with pytest.raises(distribution.MissingExtraError) as refused:
        decide_placement(deployment(workload=WORKLOAD))
    assert refused.value.extras == ["planner"]
    assert decide_placement(deployment()).gpus == 2


@pytest.mark.parametrize(
    ("gpus", "spec", "why"),
    [
        ((), {}, "do not fit the 6.0 GiB of a pod, as this machine has no GPU (prefill)"),
        ((GpuDevice(0, "L4", 10 << 30),), {}, "do not fit the 10.0 GiB of each GPU (prefill)"),
        ((), {"template": {"resources": {"limits": {"memory": "32Gi"}}}}, None),
        ((GpuDevice(0, "L4", 22 << 30),), {}, None),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_anything_starts(
    node: LocalNode, gpus: tuple[GpuDevice, ...], spec: dict[str, object], why: str | None
) -> None:
    chat = deployment(model="meta-llama/Llama-3.1-8B", engine={"type": "vLLM"}, **spec)
    machine = replace(node, gpus=gpus)

    def build() -> LaunchPlan:
        return build_launch_plan(
            chat, decide_placement(chat), machine, 8080, allow_shared_cores=True
        )

    if why is None:
        assert len(build().pods) == 3
        return
    with pytest.raises(DeploymentStartError) as refused:
        build()
    assert refused.value.faults[0].startswith(
        f"spec.model.source: llama-3.1-8b has 15.0 GiB of weights, which {why}; use a "
    )
