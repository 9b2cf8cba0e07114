"""What engines are given by role, and in which fields a fault is."""

import json
from typing import Any

import pytest

from cleave.api.engine import DeploymentEngine
from cleave.api.manifest import validate
from cleave.planner.argument_checks import list_argument_faults, list_argument_warnings
from cleave.planner.resolved_deployment import resolve_in_cluster

from tests.support.fake_cluster import chat


def find(**engine: Any) -> list[str]:
    return list(list_argument_faults(DeploymentEngine.model_validate(engine)))


def test_arguments_of_a_role_are_checked_as_those_of_all() -> None:
    faults = find(roles={"decode": {"args": ["--zzz"]}, "mixed": {"args": ["--seed", "x"]}})
    assert faults == [
        "spec.engine.roles.decode.args: --zzz: vLLM 0.32.0 has no such flag; remove it",
        "spec.engine.roles.mixed.args: --seed: must be a whole number (got 'x')",
    ]
    with pytest.raises(ValueError, match="Cleave sets itself"):
        find(roles={"prefill": {"args": ["--port", "1"]}})
    with pytest.raises(ValueError, match="Cleave sets itself"):
        find(roles={"prefill": {"env": [{"name": "CLEAVE_ROLE"}]}})


@pytest.mark.parametrize(
    "args", [["--kv-cache-dtype=fp8"], ["--no-trust-remote-code"], ["--block_size", "32"]]
)
def test_what_decides_kv_weights_or_answers_is_the_same_for_all_roles(args: list[str]) -> None:
    (fault,) = find(roles={"prefill": {"args": args}})
    assert fault.endswith("must be the same for all roles; write it into spec.engine.args")


def test_a_role_may_draft_another_number_of_tokens_in_the_same_way() -> None:
    def find_own(**changes: object) -> list[str]:
        args = ["--speculative-config", json.dumps(shared | changes)]
        return find(args=given, roles={"prefill": {"args": args}})

    shared = {"method": "eagle3", "model": "org/draft", "num_speculative_tokens": 3}
    given = ["--speculative-config", json.dumps(shared)]
    assert not find_own(num_speculative_tokens=1)
    for changes in ({"model": "org/other"}, {"method": "mtp"}, {"num_speculative_tokens": None}):
        (fault,) = find_own(**changes)
        assert "--speculative-config: must be the same for all roles" in fault
    given = []
    assert find_own()


def test_scheduling_and_a_roles_scheduler_exclude_each_other() -> None:
    roles = {"mixed": {"args": ["--scheduling-policy", "priority"]}}
    (fault,) = find(scheduling={}, roles=roles)
    assert "spec.engine.scheduling sets it" in fault
    assert not find(roles=roles)


def test_tools_that_models_call_need_a_parser() -> None:
    (fault,) = find(args=["--enable-auto-tool-choice"])
    assert fault == (
        "spec.engine.args: --enable-auto-tool-choice: vLLM needs --tool-call-parser with it"
    )
    assert not find(args=["--enable-auto-tool-choice", "--tool-call-parser", "hermes"])


def test_arguments_of_a_role_fit_into_its_pool() -> None:
    (fault,) = find(
        args=["--enforce-eager"] * 100, roles={"decode": {"args": ["--enable-dbo"] * 21}}
    )
    assert fault == "spec.engine.roles.decode.args: at most 120 with those of all roles (got 121)"


def test_flags_of_an_image_of_the_user_are_warnings_of_the_same_fields() -> None:
    engine = {"image": "example/vllm:1", "roles": {"prefill": {"args": ["--zzz"]}}}
    assert not find(**engine)
    (warning,) = list_argument_warnings(DeploymentEngine.model_validate(engine))
    assert warning.startswith("spec.engine.roles.prefill.args: --zzz: ")


def test_what_a_pool_states_is_checked_where_it_is_written() -> None:
    placement = {"manual": [{"role": "decode", "args": ["--zzz", "--seed=x"]}, {"role": "prefill"}]}
    engine = {"type": "vLLM"}
    faults = resolve_in_cluster(validate(chat(placement=placement, engine=engine))).start_faults
    assert [line.split(": ")[:2] for line in faults] == [
        ["spec.placement.manual[0].args", "--zzz"],
        ["spec.placement.manual[0].args", "--seed"],
    ]
