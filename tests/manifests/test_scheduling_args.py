"""Scheduling arguments of workers."""

import json

from cleave.api.scheduling import Scheduling
from cleave.manifests.pool import build_pools
from cleave.manifests.scheduling_args import build_scheduling_args
from cleave.manifests.worker import build_agent_command
from cleave.planner.placement import choose_placement
from cleave.policy.admission import Admission
from cleave.policy.prompt_order import PrefillOrder
from cleave.rpc.v1 import agent_pb2
from cleave_worker.scheduling.config import RoleSchedulingConfig, parse

DECLARED = {
    "order": "ShortestFirst",
    "sortedPrompts": 8,
    "longPromptTokens": 512,
    "admission": "ReserveDynamic",
    "preemptionLimit": 2,
    "limits": [{"role": "prefill", "maxNumBatchedTokens": 4096}],
}


def test_each_role_gets_the_settings_of_its_phases() -> None:
    parsed = parse(json.dumps(build_scheduling_args(Scheduling.model_validate(DECLARED))))
    prompts = RoleSchedulingConfig(PrefillOrder.SJF, 8, long_prefill_token_threshold=512)
    assert parsed == {
        agent_pb2.ROLE_PREFILL: RoleSchedulingConfig(
            PrefillOrder.SJF, 8, max_num_batched_tokens=4096, long_prefill_token_threshold=512
        ),
        agent_pb2.ROLE_DECODE: RoleSchedulingConfig(
            admission=Admission.RESERVE_DYNAMIC, preemption_limit=2
        ),
        agent_pb2.ROLE_MIXED: RoleSchedulingConfig(
            prompts.order,
            prompts.prefill_sched_batch,
            long_prefill_token_threshold=512,
            admission=Admission.RESERVE_DYNAMIC,
            preemption_limit=2,
        ),
    }


def test_omitted_fields_follow_the_engines_defaults() -> None:
    assert set(parse(json.dumps(build_scheduling_args(Scheduling()))).values()) == {
        RoleSchedulingConfig()
    }


def test_workers_get_the_flag_only_when_the_field_is_set(deployment) -> None:
    plain, chat = deployment(), deployment(engine={"scheduling": DECLARED})
    for given, is_passed in ((plain, False), (chat, True)):
        pool = build_pools(given, choose_placement(given))[0]
        line = build_agent_command(pool, "w-0")
        assert ("--scheduling" in line) is is_passed
    assert json.loads(line[line.index("--scheduling") + 1]) == build_scheduling_args(
        chat.spec.engine.scheduling
    )
