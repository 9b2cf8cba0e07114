"""The planner's desk: one question at a time, bounded, in a process of its own."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cleave.api.cluster import Cluster
from cleave.api.deployment import LLMDeployment
from cleave.api.manifest import ManifestError, validate
from cleave.api.replan_status import FittedPlanInputs
from cleave.api.workload import Workload
from cleave.controller.cluster.actions import PlanJob, PlanReview
from cleave.controller.cluster.inventory import PlanMachines
from cleave.controller.replan import planner_process
from cleave.controller.replan.inputs import read_placement
from cleave.controller.replan.planner_process import (
    PlannerClient,
    PlanPutOffError,
    run_planner,
)
from cleave.manifests.pool import build_pools
from cleave.planner.replan.revision import ReplanSettings
from cleave.planner.resolved_deployment import resolve_in_cluster
from cleave.traffic.workload import build_from_spec

from tests.support.fake_cluster import chat
from tests.support.traffic_windows import draw

WORKLOAD = {"rate": 1, "promptTokens": {"mean": 100}, "outputTokens": {"mean": 10}}
QUESTION = PlanJob("digest", "numbers")
NO_GPUS = PlanMachines(None, "numbers")


def find_none() -> PlanMachines:
    return NO_GPUS


def text(**spec: Any) -> str:
    return validate(chat(**spec)).model_dump_json(exclude_none=True)


def test_a_question_without_gpus_is_answered_with_what_is_missing() -> None:
    said = run_planner(text(workload=WORKLOAD, engine={"type": "vLLM"}), NO_GPUS, QUESTION)
    assert said.plan is None
    assert said.faults == ("no node has GPUs (nvidia.com/gpu, with nvidia.com/gpu.product)",)
    assert (said.inputs_hash, said.node_counts_hash) == ("digest", "numbers")


def test_a_plan_says_how_it_grows_where_instances_are_to_follow_the_rate() -> None:
    spec = {"workload": WORKLOAD, "planning": {"maxGPUs": 4}}
    alone = run_planner(text(**spec), NO_GPUS, QUESTION)
    assert alone.plan is not None
    assert "growth" not in alone.plan
    roles = [{"role": pool["role"], "maxReplicas": 9} for pool in alone.plan["pools"]]
    said = run_planner(text(**spec, scaling={"roles": roles}), NO_GPUS, QUESTION)
    assert said.plan is not None
    assert said.plan["growth"]["workers"] >= 1


async def test_a_deployment_that_cannot_be_handed_over_is_answered_with_the_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finished = asyncio.Event()
    planner: PlannerClient[str] = PlannerClient(lambda _: finished.set(), lambda _: "default")
    deployment = validate(chat(workload=WORKLOAD))

    def fail(*_: object, **__: object) -> str:
        raise ValueError("surrogates not allowed")

    monkeypatch.setattr(type(deployment), "model_dump_json", fail)
    try:
        planner.submit("chat", deployment, find_none, QUESTION)
        await asyncio.wait_for(finished.wait(), 60)
        result = planner.get_result("chat")
        assert result is not None
        assert result.faults
        assert planner.get_pending("chat") is None
    finally:
        await planner.close()


SLOW = Cluster.model_validate(
    {
        "nodes": [{"gpu": "H100-SXM-80GB", "count": 2}],
        "network": {"kind": "Ethernet", "bandwidthGbps": 25, "cellBandwidthGbps": 2880},
    }
)
LONG_PROMPTS = {
    "model": {"source": "meta-llama/Llama-3.1-8B"},
    "slo": {"ttftMs": 400, "tpotMs": 7},
    "workload": {"rate": 12, "promptTokens": {"mean": 4000}, "outputTokens": {"mean": 300}},
}


def test_a_plan_has_cells_where_their_link_was_seen_and_a_review_keeps_the_revision() -> None:
    engine = {"type": "vLLM"}
    chosen = run_planner(text(engine=engine, **LONG_PROMPTS), PlanMachines(SLOW), QUESTION).plan
    assert chosen is not None
    assert all("perCell" in pool for pool in chosen["pools"])
    assert chosen["predicted"]["kvLink"]["kind"] == "NVLink"
    # Traffic has doubled.
    pools = read_placement(chosen).pools
    rate = LONG_PROMPTS["workload"]["rate"] * 2
    observed = Workload.model_validate({**LONG_PROMPTS["workload"], "rate": rate})
    windows = tuple(draw(build_from_spec(observed, Path()), 40, 0.0))
    settings = ReplanSettings(settle_s=0.0)
    look = PlanReview(600.0, pools, chosen["algorithm"], windows, settings)
    question = PlanJob("digest", "numbers", FittedPlanInputs(workload=observed, of="x"), look)
    enlarged = run_planner(text(engine=engine, **LONG_PROMPTS), PlanMachines(SLOW), question)
    assert enlarged.faults == ()
    assert enlarged.plan is not None
    assert all("perCell" in pool for pool in enlarged.plan["pools"])
    assert enlarged.plan["revision"] == chosen["revision"]


def test_a_limit_of_requests_stays_as_long_as_the_plan_and_its_revisions() -> None:
    small = Cluster.model_validate({"nodes": [{"gpu": "L4", "count": 4, "gpusPerNode": 1}]})
    traffic = {"rate": 1, "promptTokens": {"mean": 500}, "outputTokens": {"mean": 50}}
    spec = {
        "model": {"source": "meta-llama/Llama-3.1-8B"},
        "slo": {"ttftMs": 2000, "tpotMs": 100},
        "workload": traffic,
        "engine": {"type": "vLLM"},
    }
    chosen = run_planner(text(**spec), PlanMachines(small), QUESTION).plan
    assert chosen is not None
    limit = chosen["maxModelLen"]
    assert f"model.maxModelLen {limit:,} is set" in chosen["reason"]
    deployment = LLMDeployment.model_validate_json(text(**spec))
    placement = read_placement(chosen)
    for pool in build_pools(resolve_in_cluster(deployment), placement):
        assert pool.spec.model.max_model_len == limit
        assert pool.spec.revision == chosen["revision"]
    # With more memory, and where no limit was set: what runs would not start with another one.
    more = Cluster.model_validate({"nodes": [{"gpu": "H100", "count": 1}]})
    again = PlanJob("digest", "numbers", is_replan=True, max_model_len=limit)
    kept = run_planner(text(**spec), PlanMachines(more), again).plan
    assert kept is not None
    assert (kept["maxModelLen"], kept["revision"]) == (limit, chosen["revision"])
    unbounded = run_planner(text(**spec), PlanMachines(more), QUESTION).plan
    assert unbounded is not None
    assert "maxModelLen" not in unbounded
    windows = tuple(draw(build_from_spec(Workload.model_validate(traffic), Path()), 40, 0.0))
    look = PlanReview(
        600.0, placement.pools, chosen["algorithm"], windows, ReplanSettings(settle_s=0.0),
        max_model_len=limit,
    )  # fmt: skip
    observed = Workload.model_validate({**traffic, "rate": 3})
    question = PlanJob("digest", "numbers", FittedPlanInputs(workload=observed, of="x"), look)
    reviewed = run_planner(text(**spec), PlanMachines(small), question)
    assert reviewed.faults == ()
    assert reviewed.plan is None or reviewed.plan["revision"] == chosen["revision"]


@pytest.mark.parametrize("engine", [{"type": "vLLM"}, {"type": "Emulated"}])
def test_no_file_is_opened_that_a_deployment_names(
    engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = open

    def watched(path: Any, *args: Any, **options: Any) -> Any:
        opened.append(str(path))
        return real(path, *args, **options)

    monkeypatch.setattr("builtins.open", watched)
    spec = {"model": "/run/secrets", "workload": {**WORKLOAD, "trace": None}, "engine": engine}
    run_planner(text(**spec), NO_GPUS, QUESTION)
    assert not [path for path in opened if path.startswith("/run/secrets")]


class Answers:
    """Stands in for the process."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.questions: list[str] = []

    async def __call__(
        self, _deployment: Any, _cluster: Any, question: PlanJob, _group: str
    ) -> PlanJob:
        self.questions.append(question.inputs_hash)
        await self.release.wait()
        return replace(question, infeasible="no")


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_same_question_is_submitted_once_and_another_one_replaces_it() -> None:
    answered: list[str] = []
    client: PlannerClient[str] = PlannerClient(answered.append, str)
    answers = Answers()
    client._run_in_process = answers  # type: ignore[method-assign]
    desired = validate(chat(workload=WORKLOAD))
    for inputs in ("one", "one", "two"):
        client.submit("chat", desired, find_none, PlanJob(inputs))
        await settle()
    assert answers.questions == ["one", "two"]
    answers.release.set()
    await settle()
    assert answered == ["chat"]
    last = client.get_result("chat")
    assert last is not None
    assert last.inputs_hash == "two"
    client.forget("chat")
    assert client.get_result("chat") is None
    await client.close()


async def test_a_plan_waits_for_one_look_at_what_runs_and_not_for_many() -> None:
    client: PlannerClient[str] = PlannerClient(lambda _: None, str)
    answers = Answers()
    client._run_in_process = answers  # type: ignore[method-assign]
    desired = validate(chat(workload=WORKLOAD))
    review = PlanReview(0.0, (), "", (), ReplanSettings())
    for number in range(3):
        look = replace(QUESTION, inputs_hash=f"look {number}", review=review)
        client.submit(f"chat-{number}", desired, find_none, look)
    await settle()
    client.submit("new", desired, find_none, QUESTION)
    await settle()
    answers.release.set()
    await settle()
    assert answers.questions[:2] == ["look 0", "digest"]
    await client.close()


async def test_a_planner_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = asyncio.Event()
    client: PlannerClient[str] = PlannerClient(lambda _: answered.set(), str, timeout_s=0.2)
    monkeypatch.setattr(planner_process, "run_planner", sleeps)
    # The planner's process imports `sleeps` from here.
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    client.submit("chat", validate(chat(workload=WORKLOAD)), find_none, QUESTION)
    await asyncio.wait_for(answered.wait(), 30)
    last = client.get_result("chat")
    assert last is not None
    assert last.faults == ("the planner has not finished within 0 s",)
    await client.close()


def sleeps(_text: str, _cluster: object, question: PlanJob) -> PlanJob:
    import time

    time.sleep(60)
    return question


async def test_a_plan_that_takes_too_much_memory_ends_its_process_and_not_the_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = asyncio.Event()
    client: PlannerClient[str] = PlannerClient(
        lambda _: answered.set(), str, memory_bytes=128 << 20
    )
    monkeypatch.setattr(planner_process, "run_planner", allocates)
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    client.submit("chat", validate(chat(workload=WORKLOAD)), find_none, QUESTION)
    await asyncio.wait_for(answered.wait(), 30)
    last = client.get_result("chat")
    assert last is not None
    assert "it may allocate 128 MiB" in last.faults[0]
    await client.close()


def allocates(_text: str, _cluster: object, question: PlanJob) -> PlanJob:
    return replace(question, infeasible=str(len(b"x" * (1 << 30))))


async def test_a_plan_makes_way_for_another_namespace_once_and_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner_process, "CONTENDED_TIMEOUT_S", 0.05)
    monkeypatch.setattr(planner_process, "_CHECK_S", 0.01)
    client: PlannerClient[str] = PlannerClient(lambda _: None, str)
    never: asyncio.Future[PlanJob] = asyncio.Future()
    async with client._process_lock.acquire("a"):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client._wait_for_result(never, "a"), 0.3)
        waiting = asyncio.create_task(client._process_lock.acquire("b").__aenter__())
        with pytest.raises(PlanPutOffError):
            await client._wait_for_result(never, "a")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client._wait_for_result(never, None), 0.3)
    await waiting


async def test_a_plan_that_made_way_is_made_afterwards() -> None:
    client: PlannerClient[str] = PlannerClient(lambda _: None, str)
    groups: list[str | None] = []

    async def make_way(
        _desired: object, _cluster: object, job: PlanJob, group: str | None
    ) -> PlanJob:
        groups.append(group)
        if group is not None:
            raise PlanPutOffError
        return job

    client._run_in_process = make_way  # type: ignore[method-assign]
    client.submit("chat", validate(chat(workload=WORKLOAD)), find_none, QUESTION)
    await settle()
    assert groups == ["chat", None]
    assert client.get_result("chat") == QUESTION
    await client.close()


@pytest.mark.parametrize("planning", [{"maxGPUs": 100_001}, {"gpus": [{"type": "A", "max": 1e9}]}])
def test_the_number_of_gpus_is_bounded(planning: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match="must be"):
        validate(chat(workload=WORKLOAD, planning=planning))


async def test_machines_are_those_of_the_moment_when_the_plans_before_are_known() -> None:
    """Two requests at the same moment must not count the same GPUs."""
    promised: list[str] = []
    client: PlannerClient[str] = PlannerClient(promised.append, str)
    answers = Answers()
    client._run_in_process = answers  # type: ignore[method-assign]
    desired = validate(chat(workload=WORKLOAD))

    def find_machines() -> PlanMachines:
        return PlanMachines(None, f"without {promised}")

    for name in ("one", "two"):
        client.submit(name, desired, find_machines, replace(QUESTION, inputs_hash=name))
    await settle()
    assert answers.questions == ["one"]
    answers.release.set()
    await settle()
    results = [client.get_result(name) for name in ("one", "two")]
    assert [each and each.node_counts_hash for each in results] == ["without []", "without ['one']"]
    await client.close()


async def test_a_request_that_runs_is_not_stopped_by_other_machines() -> None:
    client: PlannerClient[str] = PlannerClient(lambda _: None, str)
    answers = Answers()
    client._run_in_process = answers  # type: ignore[method-assign]
    desired = validate(chat(workload=WORKLOAD))
    for numbers in ("one", "two"):
        client.submit("chat", desired, find_none, PlanJob("same", numbers))
        await settle()
    assert answers.questions == ["same"]
    await client.close()


@pytest.mark.parametrize(("own", "left"), [({}, 1), ({"maxGPUs": 2}, 1), ({"maxGPUs": 1}, 2)])
def test_a_plan_keeps_to_what_the_quota_leaves(own: dict[str, int], left: int) -> None:
    nodes = Cluster.model_validate({"nodes": [{"gpu": "H100-SXM-80GB", "gpusPerNode": 8}]})
    spec = text(engine={"type": "vLLM"}, planning=own, **LONG_PROMPTS)
    found = run_planner(spec, PlanMachines(nodes, "", "the quota", left), QUESTION)
    assert "1 GPU" in found.infeasible
    assert found.infeasible.endswith("; the quota")


def test_a_plan_that_fails_says_what_other_deployments_have() -> None:
    spec = text(engine={"type": "vLLM"}, **LONG_PROMPTS)
    taken = "other deployments have 15 of 16 GPUs"
    none = run_planner(spec, PlanMachines(None, "", taken), QUESTION)
    assert none.faults == (taken,)
    one = Cluster.model_validate({"nodes": [{"gpu": "H100-SXM-80GB", "gpusPerNode": 1}]})
    few = run_planner(spec, PlanMachines(one, "", taken), QUESTION)
    assert few.infeasible.endswith(f"; {taken}")
