"""What a deployment configures is what its plans simulate, or they say what they leave out."""

from typing import Any

import pytest
from pydantic import BaseModel

from cleave.api.deployment import GatewaySpec, LLMDeploymentSpec, PoolsSpec, Routing
from cleave.api.engine import TransferMode
from cleave.api.enums import DispatchPolicy, FlippingMode, LateRequestPolicy
from cleave.api.manifest import validate
from cleave.api.role import Parallelism, Role
from cleave.api.scheduling import DecodeAdmission, PromptOrder, Scheduling
from cleave.planner import left_out, problem_from_profile
from cleave.planner.plan import PlannedPool
from cleave.planner.pool_simulation import build_fleet
from cleave.policy.role_flipping import build_thresholds
from cleave.simulator.fleet import SimulatedFleet

PAIR = (
    PlannedPool(Role.PREFILL, 2, Parallelism()),
    PlannedPool(Role.DECODE, 2, Parallelism()),
)

CHANGED = {
    "routing.policy": list(DispatchPolicy),
    "routing.sessionHeader": [None, "x-session"],
    "routing.late": list(LateRequestPolicy),
    "routing.queueLimit": [1024, 8],
    "pools.flipping": [FlippingMode.AUTO, FlippingMode.OFF],
    "pools.minPrefill": [1, 2],
    "pools.minDecode": [1, 0],
    "gateway.replicas": [1, 2, 3],
    "gateway.processes": [1, 4],
    "engine.scheduling.order": list(PromptOrder),
    "engine.scheduling.sortedPrompts": [16, 4],
    "engine.scheduling.longPromptTokens": [None, 512],
    "engine.scheduling.admission": list(DecodeAdmission),
    "engine.scheduling.preemptionLimit": [None, 2],
    "engine.scheduling.limits": [[], [{"role": "decode", "maxNumSeqs": 8}]],
    "engine.args": [[], ["--max-num-seqs=8"], ["--max-num-batched-tokens=512"]],
}
"""Fields that change latencies, with values that must all differ in what plans simulate or say."""

WITHOUT_EFFECT = {
    # Matters when instances are lost, which no plan simulates (`cleave plan --explain`).
    "routing.fallback",
    # What clients and operators see of gateways, not which engines requests get.
    "gateway.image",
    "gateway.modelAliases",
    "gateway.keysSecret",
    "gateway.tlsSecret",
    "gateway.cors",
    "gateway.tracing",
    "gateway.accessLog",
    "gateway.endpointPicker",
    "gateway.endpointPickerTlsSecret",
    "gateway.endpointPickerPlain",
    "gateway.routerTlsSecret",
}


def build(**spec: Any) -> tuple[SimulatedFleet, tuple[str, ...]]:
    """What is simulated, and what is said about it."""
    deployment = validate(
        {
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "chat"},
            "spec": {
                "model": "facebook/opt-13b",
                "slo": {"ttftMs": 400, "tpotMs": 40},
                "workload": {
                    "rate": 4,
                    "promptTokens": {"mean": 300},
                    "outputTokens": {"mean": 60},
                },
                **spec,
                "engine": {"type": "Emulated", **spec.get("engine", {})},
            },
        }
    )
    problem = problem_from_profile.build_problem(deployment)
    return build_fleet(problem, PAIR), problem.notes


def nest(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("path", CHANGED)
def test_each_value_changes_what_is_simulated_or_what_the_plan_says(path: str) -> None:
    found = [build(**nest(path, value)) for value in CHANGED[path] if value is not None]
    found += [build()] if None in CHANGED[path] else []
    assert all(one != other for i, one in enumerate(found) for other in found[:i])


def list_fields(kind: type[BaseModel], path: str) -> set[str]:
    return {f"{path}.{field.alias or name}" for name, field in kind.model_fields.items()}


def test_every_field_of_routing_pools_gateways_and_scheduling_is_known_here() -> None:
    assert set(CHANGED) | WITHOUT_EFFECT == {
        *list_fields(Routing, "routing"),
        *list_fields(PoolsSpec, "pools"),
        *list_fields(GatewaySpec, "gateway"),
        *list_fields(Scheduling, "engine.scheduling"),
        "engine.args",
    }


@pytest.mark.parametrize("policy", DispatchPolicy)
def test_the_fleet_has_the_policy_of_the_gateways(policy: DispatchPolicy) -> None:
    fleet, _ = build(routing={"policy": policy})
    assert fleet.dispatch is policy
    assert (fleet.best_fit is not None) is (policy is DispatchPolicy.BEST_FIT)


def test_best_fit_fills_instances_up_to_the_targets() -> None:
    fleet, _ = build(routing={"policy": "BestFit"})
    assert (fleet.best_fit.ttft_ms, fleet.best_fit.tpot_ms) == (400, 40)
    timing, learned = fleet.prefill[0].engine.timing, fleet.best_fit.coefficients
    assert learned.predict_prefill_ms(512) == pytest.approx(
        timing.predict_prefill_ms([512]), rel=0.1
    )


def test_nothing_is_left_out_of_one_gateway() -> None:
    assert build(gateway={"replicas": 1})[1] == ()


def test_roles_flip_from_the_thresholds_of_the_gateways() -> None:
    fleet, _ = build(pools={"minDecode": 2})
    assert fleet.flipping == build_thresholds(400, min_decode=2)
    assert build(pools={"flipping": "Advisory"})[0].flipping is None


def test_limits_of_one_role_are_left_out_and_those_of_all_engines_are_not() -> None:
    spec = LLMDeploymentSpec.model_validate(
        {
            "model": "facebook/opt-13b",
            "slo": {"ttftMs": 400, "tpotMs": 40},
            "gateway": {"replicas": 1},
            "engine": {
                "scheduling": {"limits": [{"role": "decode", "maxNumSeqs": 8}]},
                "args": ["--max-num-seqs=8", "--long-prefill-token-threshold=64"],
            },
        }
    )
    assert left_out.describe(spec) == (
        "not simulated: engine.args --long-prefill-token-threshold; your limits of iterations "
        "(scheduling.limits); the search chooses its own"
    )
    assert left_out.describe_manual(spec) == (
        "not simulated: engine.args --long-prefill-token-threshold; your limits of iterations "
        "(scheduling.limits)"
    )


def test_kv_that_is_not_pulled_is_left_out() -> None:
    specs = (
        LLMDeploymentSpec.model_validate(
            {
                "model": "facebook/opt-13b",
                "slo": {"ttftMs": 400, "tpotMs": 40},
                "engine": {"transfer": mode},
            }
        )
        for mode in TransferMode
    )
    for mode, text in zip(TransferMode, map(left_out.describe, specs), strict=True):
        assert (f"engine.transfer {mode}" in (text or "")) is (mode is not TransferMode.PULL)
