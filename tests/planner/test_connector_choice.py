"""The KV connector where the spec names none: by the model."""

from typing import Any

import pytest

from cleave.api.deployment import LLMDeployment
from cleave.api.engine import Connector
from cleave.api.manifest import validate
from cleave.manifests.pool import build_pools, build_selected_plan
from cleave.planner.placement import PlanError
from cleave.planner.resolved_deployment import resolve_in_cluster

from tests.support.built_pools import choose_placement, hash_revision
from tests.support.model_configs import HYBRID, INDEXED

WINDOWS, PLAIN = "openai/gpt-oss-20b", "Qwen/Qwen3-30B-A3B"


def deployment(
    model: str, *pools: dict[str, Any], config: Any = None, **spec: Any
) -> LLMDeployment:
    placement = {"placement": {"manual": list(pools)}} if pools else {}
    return validate(
        {
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "chat"},
            "spec": {
                "model": {"source": model, **({"config": {"inline": config}} if config else {})},
                "slo": {"ttftMs": 400, "tpotMs": 40},
                **placement,
                **spec,
            },
        }
    )


def cell() -> list[dict[str, Any]]:
    return [{"role": role, "perCell": 1} for role in ("prefill", "decode")]


def choose(model: str, *pools: dict[str, Any], **spec: Any) -> Connector:
    return resolve_in_cluster(deployment(model, *pools, **spec)).choice.connector


def test_models_with_windows_get_nixl_and_others_cleaves_connector() -> None:
    assert choose(WINDOWS) is Connector.NIXL
    assert choose(PLAIN) is Connector.CLEAVE
    assert choose("org/unknown") is Connector.CLEAVE


@pytest.mark.parametrize(
    ("config", "why"),
    [(HYBRID, "layers with states"), (INDEXED, "an indexer with own keys")],
)
def test_models_with_several_kinds_of_caches_get_nixl(config: dict[str, Any], why: str) -> None:
    chosen = resolve_in_cluster(deployment("org/new", config=config)).choice
    assert chosen.connector is Connector.NIXL
    assert chosen.reason == f"new has {why}, which Cleave's connector does not move"
    named = deployment("org/new", config=config, engine={"connector": "Cleave"})
    assert resolve_in_cluster(named).choice.fault == (
        f"spec.engine.connector: {chosen.reason}; set it to Nixl, or remove it"
    )


def test_emulated_engines_keep_theirs_and_arguments_replace_the_choice() -> None:
    emulated = deployment(WINDOWS, engine={"type": "Emulated"})
    assert resolve_in_cluster(emulated).choice.reason is None
    args = ['--kv-transfer-config={"kv_connector": "LMCacheConnectorV1"}']
    replaced = deployment(WINDOWS, engine={"args": args})
    assert resolve_in_cluster(replaced).deployment == replaced


@pytest.mark.parametrize("model", [WINDOWS, PLAIN])
@pytest.mark.parametrize("connector", ["Nixl", "Cleave"])
def test_a_named_connector_stays(model: str, connector: str) -> None:
    assert choose(model, *cell(), engine={"connector": connector}) == connector


def test_cells_keep_the_default() -> None:
    assert choose(PLAIN, *cell()) is Connector.CLEAVE


def test_the_choice_is_that_of_a_spec_that_names_it_and_it_is_explained() -> None:
    chosen, named = deployment(WINDOWS), deployment(WINDOWS, engine={"connector": "Nixl"})
    assert hash_revision(chosen) == hash_revision(named)
    placement = choose_placement(chosen)
    pools = build_pools(resolve_in_cluster(chosen), placement)
    assert {pool.spec.engine.connector for pool in pools} == {Connector.NIXL}
    assert (
        "connector Nixl is used: gpt-oss-20b has"
        in build_selected_plan(resolve_in_cluster(chosen), placement).reason
    )
    (warning,) = resolve_in_cluster(chosen).warnings
    assert warning.startswith("spec.engine.connector: connector Nixl is used: gpt-oss-20b has")
    assert not resolve_in_cluster(named).warnings
    assert "connector" not in build_selected_plan(resolve_in_cluster(named), placement).reason


def test_sizes_that_nixl_cannot_pair_are_not_blamed_on_the_choice_where_there_is_no_other() -> None:
    pools = [
        {"role": "prefill", "parallelism": {"tensor": 8}},
        {"role": "decode", "parallelism": {"tensor": 4}},
    ]
    assert not resolve_in_cluster(deployment(WINDOWS, *pools)).parallelism_faults
    pools[0]["parallelism"] = {"tensor": 2}
    pools[1]["parallelism"] = {"tensor": 3}
    faults = resolve_in_cluster(deployment(WINDOWS, *pools)).parallelism_faults
    assert any("must be a multiple" in fault for fault in faults)
    assert not any("spec.engine.connector" in fault for fault in faults)


@pytest.mark.parametrize(
    ("speculation", "method"),
    [
        ('{"method": "eagle3", "model": "org/head"}', "eagle3"),
        ('{"method": "mtp"}', "mtp"),
        ('{"method": "qwen3_next_mtp"}', "qwen3_next_mtp"),
        ('{"model": "org/small"}', "a draft model"),
        ('{"method": "ngram"}', None),
        ('{"method": "suffix"}', None),
        ("{", None),
        ("[]", None),
        ("[" * 4_000, None),
    ],
)
def test_drafting_layers_with_kv_get_nixl(speculation: str, method: str | None) -> None:
    args = ["--speculative-config", speculation]
    chosen = resolve_in_cluster(deployment(PLAIN, engine={"args": args})).choice
    named = deployment(PLAIN, engine={"args": args, "connector": "Cleave"})
    early = deployment(PLAIN, engine={"args": args, "transfer": "PerLayer"})
    faults = [resolve_in_cluster(each).choice.fault for each in (named, early)]
    if method is None:
        assert (chosen.connector, faults) == (Connector.CLEAVE, [None, None])
        return
    assert chosen.connector is Connector.NIXL
    why = (
        f"--speculative-config in spec.engine.args asks for {method}, whose layers have KV of "
        "their own, which Cleave's connector does not move"
    )
    assert chosen.reason == why
    assert faults == [
        f"spec.engine.connector: {why}; set it to Nixl, or remove it",
        f"spec.engine.transfer: {why}, and Nixl transfers by Pull only; remove it",
    ]
    with pytest.raises(PlanError):
        choose_placement(named)
