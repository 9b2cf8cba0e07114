"""The whole operator against a cluster in memory: it always gets there, and then does nothing."""

import asyncio
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.controller.cluster.actions import Action, Create, Delete, PlanJob
from cleave.controller.cluster.cache import ResourceKey
from cleave.controller.cluster.client import KubeApiError
from cleave.controller.cluster.gateway_client import GatewayClient
from cleave.controller.controller import Controller
from cleave.controller.metrics import OperatorMetrics
from cleave.controller.settings import OperatorSettings
from cleave.manifests.labels import Manifest

from tests.support.fake_cluster import SmallCluster, chat, manual_placement, node


class ControlPlane:
    """An operator and a cluster. Events wait in `late` until they are delivered."""

    def __init__(
        self, cluster: SmallCluster, gateways: GatewayClient[ResourceKey] | None = None
    ) -> None:
        self.cluster = cluster
        self.late: list[tuple[str, Manifest]] = []
        cluster.watchers.append(lambda kind, each: self.late.append((kind, each)))
        for each in cluster.objects.values():
            self.late.append(("LISTED", each))
        self.controller = Controller(
            OperatorSettings(),
            OperatorMetrics(),
            now=lambda: cluster.now_s,
            clock=lambda: cluster.now_s,
            gateways=gateways or GatewayClient(lambda: cluster.now_s, fetch=no_answers),
            debounce_s=0,
        )
        self.plan_jobs: list[PlanJob] = []
        self.controller.planner.submit = lambda _k, _d, _c, question: self.plan_jobs.append(
            question
        )

    async def carry_out(self, actions: Iterable[Action]) -> None:
        for how, manifest in self.cluster.do(actions):
            (self.controller.on_change if how == "seen" else self.controller.on_delete)(manifest)

    def deliver(self, count: int | None = None) -> None:
        """The oldest events reach the operator."""
        for kind, manifest in self.late[:count]:
            (self.controller.on_delete if kind == "DELETED" else self.controller.on_change)(
                manifest
            )
        del self.late[:count]

    def turn(self) -> None:
        """Look at everything that is due, once."""
        asyncio.run(self._turn())

    async def _turn(self) -> None:
        queue = self.controller.queue
        for _ in range(len(queue)):
            key = await queue.take()
            await self.controller._reconcile(key, self)  # type: ignore[arg-type]
            queue.mark_done(key)

    def resync(self) -> None:
        for key in self.controller.cache.list_resources():
            self.controller.queue.add(key)

    def converge(self, turns: int = 60) -> None:
        """Let time pass until nothing happens any more, not even after the longest pause."""
        idle = 0
        for _ in range(turns):
            before = len(self.cluster.log)
            self.cluster.now_s += 700 if idle else 1
            self.cluster.settle()
            self.deliver()
            self.resync()
            self.turn()
            idle = 0 if self.late or len(self.cluster.log) > before else idle + 1
            if idle == 3:
                return
        pytest.fail(f"still at work: {self.cluster.log[-5:]}")


async def no_answers(_urls: Any, _engine_counts: Any) -> None:
    return None


def control_plane(**spec: Any) -> ControlPlane:
    cluster = SmallCluster()
    cluster.add(node())
    cluster.add(chat(**spec))
    return ControlPlane(cluster)


def ready(cluster: SmallCluster) -> dict[str, int]:
    pools = {
        each["metadata"]["name"]: each["status"]["ready"] for each in cluster.all("InstancePool")
    }
    return {name.removeprefix("chat-"): count for name, count in pools.items()}


def condition(cluster: SmallCluster, kind: str) -> Manifest:
    conditions = cluster.get("LLMDeployment", "chat")["status"]["conditions"]
    return next(each for each in conditions if each["type"] == kind)


def test_the_smallest_deployment_gets_a_pair_and_a_gateway() -> None:
    here = control_plane()
    here.converge()
    assert ready(here.cluster) == {"prefill": 1, "decode": 1}
    assert condition(here.cluster, "Ready")["status"] == "True"
    assert condition(here.cluster, "PlanReady")["reason"] == "NotPlanned"
    kinds = {kind for kind, _, _ in here.cluster.objects}
    assert kinds == {
        "Node", "LLMDeployment", "InstancePool", "Pod", "Deployment", "Service",
        "PodDisruptionBudget", "ServiceAccount", "Role", "RoleBinding",
    }  # fmt: skip


def test_nothing_is_written_when_nothing_has_changed() -> None:
    here = control_plane(placement=manual_placement(prefill=2, decode=3))
    here.converge()
    before = len(here.cluster.log)
    for _ in range(3):
        here.resync()
        here.turn()
    assert len(here.cluster.log) == before


def test_what_is_calm_is_left_alone_for_a_while() -> None:
    here = control_plane(placement=manual_placement(prefill=1, decode=1))
    assert not list(here.controller.list_due())
    here.deliver()
    assert len(list(here.controller.list_due())) == 1
    here.converge()
    assert not list(here.controller.list_due())
    here.cluster.lose(here.cluster.pods()[0])
    here.deliver()
    # A pod concerns its pool and its deployment.
    assert len(list(here.controller.list_due())) == 2
    here.turn()
    here.cluster.now_s += 600
    assert len(list(here.controller.list_due())) == 3


def test_a_second_operator_does_nothing_again() -> None:
    here = control_plane(placement=manual_placement(prefill=2, decode=3))
    here.converge()
    other_plane = ControlPlane(here.cluster)
    other_plane.deliver()
    before = len(here.cluster.log)
    other_plane.resync()
    other_plane.turn()
    # What is not watched is applied once more, which changes nothing.
    again = here.cluster.log[before:]
    assert {each.manifest["kind"] for each in again} <= {"ServiceAccount", "Role", "RoleBinding"}  # type: ignore[union-attr]
    assert not other_plane.late


def test_everything_goes_when_the_deployment_goes() -> None:
    here = control_plane(placement=manual_placement(prefill=2, decode=2))
    here.converge()
    here.cluster.remove("LLMDeployment", "chat")
    here.converge()
    assert {kind for kind, _, _ in here.cluster.objects} == {"Node"}


def test_the_gateway_stays_while_workers_drain() -> None:
    here = control_plane()
    here.converge()
    here.cluster.remove("LLMDeployment", "chat")
    for _ in range(5):
        here.deliver()
        here.resync()
        here.turn()
    assert here.cluster.get("Deployment", "chat-gateway")
    assert all("deletionTimestamp" in pod["metadata"] for pod in here.cluster.pods())


def test_a_new_revision_replaces_every_pod_and_never_has_too_few() -> None:
    here = control_plane(placement=manual_placement(prefill=3, decode=2))
    here.converge()
    old = {pod["metadata"]["labels"]["cleave.dev/revision"] for pod in here.cluster.pods()}
    here.cluster.edit("LLMDeployment", "chat", engine={"type": "Emulated", "args": ["--seed", "1"]})
    for _ in range(60):
        here.cluster.settle()
        here.deliver()
        here.resync()
        here.turn()
        roles = [p["metadata"]["labels"]["cleave.dev/role"] for p in here.cluster.pods()
                 if "deletionTimestamp" not in p["metadata"]]  # fmt: skip
        assert roles.count("prefill") in (3, 4)
        assert roles.count("decode") in (2, 3)
    new = {pod["metadata"]["labels"]["cleave.dev/revision"] for pod in here.cluster.pods()}
    assert len(new) == 1
    assert new != old
    assert ready(here.cluster) == {"prefill": 3, "decode": 2}


def test_a_lost_pod_is_replaced_under_another_or_the_same_name() -> None:
    here = control_plane(placement=manual_placement(prefill=1, decode=2))
    here.converge()
    here.cluster.lose(here.cluster.pods()[0])
    here.cluster.fail(here.cluster.pods()[0])
    here.converge()
    assert ready(here.cluster) == {"prefill": 1, "decode": 2}


def test_unschedulable_pods_are_withdrawn_and_reported_and_return_with_more_nodes() -> None:
    here = control_plane(placement=manual_placement(prefill=1, decode=4))
    here.cluster.room = 3
    for _ in range(150):
        here.cluster.now_s += 1
        here.cluster.settle()
        here.deliver()
        here.resync()
        here.turn()
    assert ready(here.cluster) == {"prefill": 1, "decode": 2}
    assert len(here.cluster.pods()) == 3
    limited = condition(here.cluster, "ScalingLimited")
    assert limited["status"] == "True"
    assert "Insufficient nvidia.com/gpu" in limited["message"]
    here.cluster.room = 100
    here.cluster.add(node("n2"))
    here.converge()
    assert ready(here.cluster) == {"prefill": 1, "decode": 4}
    assert condition(here.cluster, "ScalingLimited")["status"] == "False"


def test_a_pool_that_is_scaled_by_hand_keeps_its_number_only_when_it_says_so() -> None:
    here = control_plane(placement=manual_placement(prefill=1, decode=2))
    here.converge()
    here.cluster.edit("InstancePool", "chat-decode", replicas=4)
    here.converge()
    assert ready(here.cluster)["decode"] == 2
    here.cluster.edit("InstancePool", "chat-decode", replicas=4, owner="Manual")
    here.converge()
    assert ready(here.cluster)["decode"] == 4
    here.cluster.edit("LLMDeployment", "chat", placement=manual_placement(prefill=2, decode=1))
    here.converge()
    assert ready(here.cluster) == {"prefill": 2, "decode": 4}


def test_a_role_that_is_dropped_serves_until_the_others_can() -> None:
    here = control_plane(placement=manual_placement(prefill=2, decode=2))
    here.converge()
    # Else they would take the new role at once.
    here.cluster.refuses_orders = True
    here.cluster.edit("LLMDeployment", "chat", placement=manual_placement(mixed=3))
    here.deliver()
    here.resync()
    here.turn()
    here.turn()
    alive = [p for p in here.cluster.pods() if "deletionTimestamp" not in p["metadata"]]
    roles = [pod["metadata"]["labels"]["cleave.dev/role"] for pod in alive]
    assert (roles.count("prefill"), roles.count("decode")) == (2, 2)
    here.converge()
    assert ready(here.cluster) == {"mixed": 3}


def test_a_paused_deployment_keeps_what_it_has() -> None:
    here = control_plane(placement=manual_placement(prefill=1, decode=2))
    here.converge()
    here.cluster.edit(
        "LLMDeployment", "chat", paused=True, placement=manual_placement(prefill=1, decode=5)
    )
    here.converge()
    assert ready(here.cluster) == {"prefill": 1, "decode": 2}
    assert condition(here.cluster, "Progressing")["reason"] == "Paused"
    here.cluster.lose(here.cluster.pods()[0])
    here.converge()
    assert ready(here.cluster) == {"prefill": 1, "decode": 2}
    here.cluster.edit("LLMDeployment", "chat", paused=False)
    here.converge()
    assert ready(here.cluster) == {"prefill": 1, "decode": 5}


def test_a_plan_stays_until_what_it_rests_on_changes() -> None:
    workload = {"rate": 1, "promptTokens": {"mean": 100}, "outputTokens": {"mean": 10}}
    here = control_plane(workload=workload)
    here.deliver()
    here.turn()
    here.turn()
    question = here.plan_jobs[-1]
    plan = {
        "revision": "a",
        "reason": "it is enough",
        "gpus": 3,
        "pools": [{"role": "mixed", "replicas": 3}],
        "inputs": question.inputs_hash,
    }
    here.controller.planner._results[ResourceKey("LLMDeployment", "default", "chat")] = replace(
        question, plan=plan
    )
    here.converge()
    assert ready(here.cluster) == {"mixed": 3}
    num_jobs = len(here.plan_jobs)
    # More nodes of the same kind are no reason, nor is another operator.
    here.cluster.add(node("n2"))
    here.converge()
    other = ControlPlane(here.cluster)
    other.deliver()
    other.resync()
    other.turn()
    assert len(here.plan_jobs) == num_jobs
    assert not other.plan_jobs
    here.cluster.edit("LLMDeployment", "chat", workload={**workload, "rate": 9})
    here.converge()
    assert len(here.plan_jobs) > num_jobs
    assert ready(here.cluster) == {"mixed": 3}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_it_converges_after_any_sequence_of_events(seed: int) -> None:
    rng = random.Random(seed)
    here = control_plane(
        placement=manual_placement(prefill=rng.randint(1, 3), decode=rng.randint(1, 3))
    )
    for _ in range(rng.randint(5, 40)):
        happen(here, rng)
    desired_replicas = {role: rng.randint(1, 4) for role in ("prefill", "decode")}
    if rng.random() < 0.3:
        desired_replicas = {"mixed": rng.randint(1, 3)}
    here.cluster.room = 1_000
    here.cluster.edit("LLMDeployment", "chat", placement=manual_placement(**desired_replicas))
    here.converge(turns=150)
    assert ready(here.cluster) == desired_replicas, f"seed {seed}"
    before = len(here.cluster.log)
    here.resync()
    here.turn()
    assert len(here.cluster.log) == before, f"seed {seed}"


def happen(here: ControlPlane, rng: random.Random) -> None:
    """Something, as it happens in clusters; events may be late."""
    cluster = here.cluster
    cluster.now_s += rng.choice((0, 1, 30, 130))
    pods = cluster.pods()
    match rng.randint(0, 9):
        case 0 if pods:
            cluster.lose(rng.choice(pods))
        case 1 if pods:
            cluster.fail(rng.choice(pods))
        case 2:
            cluster.room = rng.randint(1, 8)
        case 3:
            args = ["--seed", str(rng.randint(0, 2))]
            cluster.edit("LLMDeployment", "chat", engine={"type": "Emulated", "args": args})
        case 4:
            hand = manual_placement(prefill=rng.randint(1, 4), decode=rng.randint(1, 4))
            cluster.edit("LLMDeployment", "chat", placement=hand)
        case 5:
            here.controller.cache.nodes.clear()
            here.resync()
        case _:
            cluster.schedule()
            for pod in cluster.pods():
                if rng.random() < 0.6:
                    cluster.make_ready(pod)
                if rng.random() < 0.5:
                    cluster.end(pod)
            cluster.run_gateways()
    here.deliver(rng.randint(0, len(here.late)))
    here.turn()


def test_a_failed_creation_is_reported_until_it_succeeds() -> None:
    here = control_plane()
    real, refused = here.cluster.do, KubeApiError(403, "Forbidden", "exceeded quota: 3 pods")

    def refuse(actions: Iterable[Action]) -> Any:
        for action in actions:
            if isinstance(action, Create):
                raise refused
            yield from real([action])

    here.cluster.do = refuse  # type: ignore[method-assign,assignment]
    for _ in range(6):
        here.cluster.now_s += 60
        here.deliver()
        here.resync()
        here.turn()
    degraded = condition(here.cluster, "Degraded")
    assert degraded["reason"] == "Failed"
    assert "exceeded quota" in degraded["message"]
    # Once for each pool, and once for the deployment.
    assert len([each for each in here.cluster.events if each.reason == "Failed"]) == 3
    here.cluster.do = real  # type: ignore[method-assign]
    here.converge()
    assert condition(here.cluster, "Degraded")["status"] == "False"


def test_events_that_are_late_cause_no_second_pods() -> None:
    here = control_plane(placement=manual_placement(prefill=2, decode=2))
    here.deliver()
    for _ in range(6):
        here.resync()
        here.turn()
    created = [each for each in here.cluster.log if isinstance(each, Create)]
    assert len(created) == 4
    assert not any(isinstance(each, Delete) for each in here.cluster.log)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_roll_out_keeps_pairs_for_the_whole_plan(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {"prefill": rng.randint(1, 4), "decode": rng.randint(1, 4)}
    here = control_plane(placement=manual_placement(**sizes))
    here.converge()
    for number in range(1, rng.randint(2, 4)):
        args = ["--seed", str(number)]
        here.cluster.edit("LLMDeployment", "chat", engine={"type": "Emulated", "args": args})
        # Where three revisions meet at a full house, one instance of each role has to yield.
        least = 1 - sum(1 / size for size in sizes.values()) * (number > 1)
        for _ in range(rng.randint(1, 60)):
            here.cluster.schedule()
            for pod in here.cluster.pods():
                if rng.random() < 0.6:
                    here.cluster.make_ready(pod)
                if rng.random() < 0.5:
                    here.cluster.end(pod)
            here.deliver(rng.randint(0, len(here.late)))
            here.turn()
            assert paired(here.cluster, sizes) >= least - 1e-9, f"seed {seed}"
    here.converge(turns=150)
    assert ready(here.cluster) == sizes, f"seed {seed}"


def paired(cluster: SmallCluster, sizes: dict[str, int]) -> float:
    """Share of the plan that serves: of each revision what has partners."""
    counts: dict[str, dict[str, int]] = {}
    for pod in cluster.pods():
        labels = pod["metadata"]["labels"]
        of = counts.setdefault(labels["cleave.dev/revision"], dict.fromkeys(sizes, 0))
        is_ready = "podIP" in pod.get("status", {}) and "deletionTimestamp" not in pod["metadata"]
        of[labels["cleave.dev/role"]] += is_ready
    return sum(min(of[role] / size for role, size in sizes.items()) for of in counts.values())
