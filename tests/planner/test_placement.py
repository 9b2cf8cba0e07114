"""Placements of this version: by hand, or the smallest disaggregated one."""

from pathlib import Path

import pytest

from cleave.api.deployment import (
    LLMDeployment,
    LLMDeploymentSpec,
    ManualPlacement,
    Slo,
)
from cleave.api.engine import (
    Connector,
    DeploymentEngine,
    Emulation,
    EngineType,
    TransferMode,
)
from cleave.api.model import ModelSpec
from cleave.api.plan import ManualPool
from cleave.api.resource import Metadata
from cleave.api.role import Parallelism, Role
from cleave.planner.placement import PlanError, choose_placement, resolve_paths
from cleave.planner.plan import PlannedPool
from cleave.planner.resolved_deployment import resolve, resolve_in_cluster

from tests.support.fake_cluster import chat


def deployment(
    *manual: ManualPool, engine: DeploymentEngine | None = None, model: str = "org/model"
) -> LLMDeployment:
    return LLMDeployment(
        metadata=Metadata(name="chat"),
        spec=LLMDeploymentSpec(
            model=ModelSpec(source=model),
            slo=Slo(ttft_ms=400, tpot_ms=40),
            placement=ManualPlacement(manual=list(manual)) if manual else None,
            engine=engine or DeploymentEngine(),
        ),
    )


def emulated_by(profile: str) -> DeploymentEngine:
    return DeploymentEngine(type=EngineType.EMULATED, emulated=Emulation(latency=profile))


def test_without_a_word_on_placement_there_is_one_instance_per_phase_and_the_reason_is_honest() -> (
    None
):
    placement = choose_placement(resolve(deployment()))
    assert placement.pools == (PlannedPool(Role.PREFILL, 1), PlannedPool(Role.DECODE, 1))
    assert placement.reason == (
        "default placement (1 prefill + 1 decode): "
        "no spec.workload to plan from and no spec.placement.manual"
    )


def test_a_model_with_windows_is_refused_with_the_connector_that_moves_one_kind_of_kv() -> None:
    own_connector = DeploymentEngine(connector=Connector.CLEAVE)
    for model in ("openai/gpt-oss-120b", "openai/gpt-oss-20b"):
        with pytest.raises(PlanError, match=r"spec\.engine\.connector: .* set it to Nixl"):
            choose_placement(resolve(deployment(model=model, engine=own_connector)))
        layers = DeploymentEngine(transfer=TransferMode.PER_LAYER)
        with pytest.raises(PlanError, match=r"spec\.engine\.transfer: .* remove it"):
            choose_placement(resolve(deployment(model=model, engine=layers)))
        choose_placement(resolve(deployment(model=model)))
        choose_placement(
            resolve(deployment(model=model, engine=DeploymentEngine(connector=Connector.NIXL)))
        )
        own = DeploymentEngine(args=['--kv-transfer-config={"kv_connector": "LMCacheConnectorV1"}'])
        choose_placement(resolve(deployment(model=model, engine=own)))


def test_a_manual_placement_is_used_unchanged_in_the_order_of_roles() -> None:
    placement = choose_placement(
        resolve(
            deployment(
                ManualPool(role=Role.MIXED),
                ManualPool(role=Role.DECODE, replicas=3, parallelism=Parallelism(tensor=2)),
                ManualPool(role=Role.PREFILL, replicas=2),
            )
        )
    )
    assert placement.pools == (
        PlannedPool(Role.PREFILL, 2),
        PlannedPool(Role.DECODE, 3, Parallelism(tensor=2)),
        PlannedPool(Role.MIXED, 1),
    )
    assert "spec.placement.manual" in placement.reason


def test_parallel_sizes_that_the_model_does_not_take_are_faults() -> None:
    wide = ManualPool(role=Role.PREFILL, parallelism=Parallelism(tensor=8))
    narrow = ManualPool(role=Role.DECODE)
    nixl = DeploymentEngine(connector=Connector.NIXL)
    assert (
        choose_placement(resolve(deployment(wide, narrow, model="org/unknown", engine=nixl))).gpus
        == 9
    )
    with pytest.raises(PlanError, match="1 cannot take KV from prefill instances with 8"):
        choose_placement(resolve(deployment(wide, narrow, model="Qwen/Qwen3-30B-A3B", engine=nixl)))
    assert choose_placement(resolve(deployment(wide, narrow, model="Qwen/Qwen3-30B-A3B"))).gpus == 9
    odd = ManualPool(role=Role.DECODE, parallelism=Parallelism(tensor=3))
    with pytest.raises(PlanError, match="40 attention heads cannot be shared by 3 GPUs"):
        choose_placement(resolve(deployment(odd, model="facebook/opt-13b")))


def test_gpus_and_replicas_are_counted_over_all_pools() -> None:
    placement = choose_placement(
        resolve(
            deployment(
                ManualPool(role=Role.PREFILL, replicas=2),
                ManualPool(
                    role=Role.DECODE, replicas=3, parallelism=Parallelism(tensor=4, pipeline=2)
                ),
            )
        )
    )
    assert placement.gpus == 2 + 3 * 8
    assert placement.count_replicas(Role.DECODE) == 3
    assert placement.count_replicas(Role.MIXED) == 0


def test_an_unknown_latency_profile_is_one_fault_that_names_its_field_and_those_there_are() -> None:
    unknown = DeploymentEngine(
        type=EngineType.EMULATED, emulated=Emulation(latency="distserve/opt-13b/tp3")
    )
    with pytest.raises(PlanError) as raised:
        choose_placement(resolve(deployment(engine=unknown)))
    (fault,) = raised.value.faults
    assert fault.startswith("spec.engine.emulated.latency: no latency profile 'distserve/opt-13b/")
    assert "distserve/opt-13b/tp1" in fault


def test_a_profile_in_a_file_is_looked_for_beside_the_manifest() -> None:
    declared = deployment(engine=emulated_by("own.yaml"))
    moved = resolve_paths(declared, Path("/manifests"))
    assert moved.spec.engine.emulation.latency == "/manifests/own.yaml"
    assert resolve_paths(moved, Path("/elsewhere")) == moved
    named = deployment(engine=emulated_by("vllm/opt-13b/tp1"))
    assert resolve_paths(named, Path("/manifests")) == named


def test_a_profile_that_only_the_workers_have_is_not_opened_where_that_is_said() -> None:
    elsewhere = deployment(engine=emulated_by("/profiles/own.yaml"))
    assert choose_placement(resolve_in_cluster(elsewhere)).count_replicas(Role.DECODE) == 1
    with pytest.raises(PlanError):
        choose_placement(resolve(elsewhere))
    unknown = deployment(engine=emulated_by("distserve/opt-13b/tp3"))
    with pytest.raises(PlanError):
        choose_placement(resolve(unknown))


def test_the_operator_waits_for_an_engines_report_and_one_machine_does_not() -> None:
    workload = {"rate": 1, "promptTokens": {"mean": 100}, "outputTokens": {"mean": 10}}
    engine = {"type": "vLLM"}
    document = chat(model="org/unknown-1", workload=workload, engine=engine)
    unknown = LLMDeployment.model_validate(document)
    for resolved, waits in ((resolve_in_cluster(unknown), True), (resolve(unknown), False)):
        reason = choose_placement(resolved).reason
        warnings = " ".join(resolved.warnings)
        for text in (reason, warnings):
            assert ("until the first engine has reported the model" in text) is waits
