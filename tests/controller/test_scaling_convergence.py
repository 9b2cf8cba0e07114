"""The operator scales with the load of gateways: up, down, to zero and back, in memory."""

import asyncio
from dataclasses import replace

from cleave.controller.cluster.actions import Emit
from cleave.manifests.labels import Manifest

from tests.controller.test_convergence import ControlPlane, condition, control_plane, ready
from tests.support.fake_cluster import manual_placement


class Gateways:
    """What all gateways of a control plane report."""

    def __init__(self, here: ControlPlane) -> None:
        self.here = here
        self.requests = 0
        self.waiting = 0
        here.controller.traffic_poller.scraper._fetch = self.fetch
        here.controller.traffic_poller._activator._fetch = self.fetch_health
        here.controller.cache.list_gateways = lambda _key: ("10.0.0.9",)  # type: ignore[method-assign]

    async def fetch(self, _url: str) -> str:
        return (
            f'cleave_gateway_requests_total{{model="m",outcome="ok"}} {self.requests}\n'
            f"cleave_gateway_requests_in_flight {self.waiting}\n"
            "process_start_time_seconds 7\n"
        )

    async def fetch_health(self, _url: str) -> bytes:
        return b'{"requests_in_flight": %d}' % self.waiting

    def pass_time(self, seconds: int, rate: float = 0.0) -> None:
        """At so many requests per second, looked at as often as the operator does."""
        controller = self.here.controller
        keys = [key for key in controller.cache.list_resources() if key.kind == "LLMDeployment"]

        async def look() -> None:
            for key in keys:
                await controller.traffic_poller.poll_traffic(key)
                await controller.traffic_poller.poll_scaled_to_zero(key)

        for _ in range(seconds // 15):
            self.here.cluster.now_s += 15
            self.requests += round(15 * rate)
            asyncio.run(look())
            self.settle()

    def settle(self) -> None:
        """Let the operator and Kubernetes do what there is to do; time stands still."""
        here = self.here
        for _ in range(12):
            here.cluster.settle()
            here.deliver()
            here.turn()


IDLE = {"scaling": {"idleS": 60}, "placement": manual_placement(prefill=1, decode=2)}


def reasons(here: ControlPlane) -> list[str]:
    return [each.reason for each in here.cluster.events if isinstance(each, Emit)]


def test_all_instances_go_without_requests_and_the_gateway_stays() -> None:
    here = control_plane(**IDLE)
    here.converge()
    gateways = Gateways(here)
    gateways.pass_time(45)
    assert ready(here.cluster) == {"prefill": 1, "decode": 2}
    gateways.pass_time(60)
    assert ready(here.cluster) == {"prefill": 0, "decode": 0}
    assert not here.cluster.pods()
    assert here.cluster.get("Deployment", "chat-gateway")
    reported = condition(here.cluster, "Ready")
    assert (reported["status"], reported["reason"]) == ("True", "ScaledToZero")
    assert "Scaled" in reasons(here)


def test_a_request_that_waits_brings_the_plan_back_and_keeps_it() -> None:
    here = control_plane(**IDLE)
    here.converge()
    gateways = Gateways(here)
    gateways.pass_time(120)
    assert ready(here.cluster) == {"prefill": 0, "decode": 0}
    gateways.waiting = 1
    gateways.pass_time(15)
    assert ready(here.cluster) == {"prefill": 1, "decode": 2}
    gateways.waiting = 0
    gateways.pass_time(45)
    assert ready(here.cluster) == {"prefill": 1, "decode": 2}


def test_slowly_started_instances_stay_for_a_second_attempt() -> None:
    here = control_plane(**IDLE)
    here.converge()
    gateways = Gateways(here)
    gateways.pass_time(120)
    gateways.waiting = 1
    here.cluster.room = 0
    gateways.pass_time(120)
    # The clients have given up; nothing is ready yet.
    gateways.waiting = 0
    gateways.pass_time(120)
    assert here.cluster.pods()
    here.cluster.room = 9
    gateways.pass_time(45)
    assert all(ready(here.cluster).values())
    gateways.pass_time(75)
    assert not here.cluster.pods()


def test_requests_keep_instances_however_few_they_are() -> None:
    here = control_plane(**IDLE)
    here.converge()
    gateways = Gateways(here)
    for _ in range(10):
        gateways.requests += 1
        gateways.pass_time(45)
    assert ready(here.cluster) == {"prefill": 1, "decode": 2}


def test_a_new_operator_lets_them_sleep() -> None:
    here = control_plane(**IDLE)
    here.converge()
    Gateways(here).pass_time(120)
    other_plane = ControlPlane(here.cluster)
    other_plane.deliver()
    other_plane.resync()
    other_plane.turn()
    gateways = Gateways(other_plane)
    gateways.pass_time(120)
    assert not here.cluster.pods()
    gateways.waiting = 1
    gateways.pass_time(15)
    assert ready(here.cluster) == {"prefill": 1, "decode": 2}


def planned(**scaling: int) -> tuple[ControlPlane, Gateways]:
    """A deployment with a plan for 4 req/s that grows by a worker for each 4 req/s."""
    workload = {
        "rate": 4,
        "promptTokens": {"mean": 500, "p90": 900},
        "outputTokens": {"mean": 200, "p90": 400},
    }
    roles = [{"role": role, "maxReplicas": 8} for role in ("prefill", "decode")]
    here = control_plane(workload=workload, scaling={"roles": roles, "calmS": 120, **scaling})
    here.deliver()
    here.turn()
    (question,) = here.plan_jobs
    here.controller.planner.get_result = lambda _: replace(
        question, plan=plan(question.inputs_hash)
    )  # type: ignore[method-assign]
    here.converge()
    return here, Gateways(here)


def plan(inputs: str) -> Manifest:
    latencies: Manifest = {"ttftMs": {}, "tpotMs": {}}
    predicted = {
        "goodput": 4.0, "goodputLow": 4.0, "goodputHigh": 4.0, "goodputPerGpu": 1.0,
        "attainment": 1.0, "costPerHour": 0.0, "powerWatts": 0.0, "trust": "", **latencies,
    }  # fmt: skip
    return {
        "revision": "a",
        "reason": "so",
        "gpus": 3,
        "pools": [{"role": "prefill", "replicas": 1}, {"role": "decode", "replicas": 2}],
        "inputs": inputs,
        "predicted": predicted,
        "growth": {"workers": 1, "perRate": 0.25, "base": 0.0, "lowestRate": 0.0},
    }


def test_a_deployment_wakes_while_the_planner_is_at_work() -> None:
    here, gateways = planned(idleS=60)
    gateways.pass_time(180)
    assert ready(here.cluster) == {"prefill": 0, "decode": 0}
    # Another planner request, without an answer.
    here.cluster.edit("LLMDeployment", "chat", slo={"ttftMs": 300, "tpotMs": 40})
    gateways.pass_time(15)
    assert condition(here.cluster, "PlanReady")["reason"] == "Planning"
    gateways.waiting = 1
    gateways.pass_time(15)
    assert all(ready(here.cluster).values())


def test_instances_come_at_once_and_go_when_it_has_been_calm() -> None:
    here, gateways = planned()
    assert ready(here.cluster) == {"prefill": 1, "decode": 2}
    gateways.pass_time(90, rate=12)
    assert ready(here.cluster) == {"prefill": 3, "decode": 6}
    gateways.pass_time(60, rate=4)
    assert ready(here.cluster) == {"prefill": 3, "decode": 6}
    gateways.pass_time(240, rate=4)
    assert ready(here.cluster) == {"prefill": 1, "decode": 2}
    assert reasons(here).count("Scaled") <= 4
    assert "ReplicasSetBack" not in reasons(here)


def test_a_pause_of_what_traffic_would_scale_stays_ready() -> None:
    here, gateways = planned()
    gateways.pass_time(30, rate=4)
    here.cluster.edit("LLMDeployment", "chat", paused=True)
    gateways.requests += 40 * 15
    gateways.pass_time(90, rate=12)
    assert ready(here.cluster) == {"prefill": 1, "decode": 2}
    reported = condition(here.cluster, "Ready")
    assert (reported["status"], reported["reason"]) == ("True", "Serving")
    here.cluster.edit("LLMDeployment", "chat", paused=False)
    gateways.pass_time(60, rate=12)
    assert ready(here.cluster)["decode"] == 6


def test_a_wave_as_long_as_the_calm_never_makes_instances_come_and_go() -> None:
    here, gateways = planned()
    gateways.pass_time(90, rate=12)
    reported = reasons(here).count("Scaled")
    for _ in range(6):
        gateways.pass_time(45, rate=2)
        gateways.pass_time(60, rate=11)
    assert ready(here.cluster) == {"prefill": 3, "decode": 6}
    assert reasons(here).count("Scaled") == reported


def test_traffic_that_differs_from_the_plan_is_reported() -> None:
    here, gateways = planned()
    gateways.pass_time(300, rate=4)
    assert "PlanDrifted" not in reasons(here)
    gateways.pass_time(300, rate=12)
    assert "PlanDrifted" in reasons(here)
    assert condition(here.cluster, "PlanDrifted")["reason"] == "TrafficChanged"
