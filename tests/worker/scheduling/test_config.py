"""Terms by role, as the agent's command line states them."""

import pytest

from cleave.policy.admission import Admission
from cleave.policy.prompt_order import PrefillOrder
from cleave.rpc.v1 import agent_pb2
from cleave_worker.scheduling.config import RoleSchedulingConfig, SchedulingConfigError, parse


def test_each_role_has_its_own() -> None:
    text = (
        '{"prefill": {"order": "sjf", "max_num_batched_tokens": 2048},'
        ' "decode": {"admission": "reserve-dynamic", "preemption_limit": 3}}'
    )
    assert parse(text) == {
        agent_pb2.ROLE_PREFILL: RoleSchedulingConfig(PrefillOrder.SJF, max_num_batched_tokens=2048),
        agent_pb2.ROLE_DECODE: RoleSchedulingConfig(
            admission=Admission.RESERVE_DYNAMIC, preemption_limit=3
        ),
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"both": {}}', "both: must be one of prefill, decode, mixed"),
        ('{"mixed": 3}', "mixed: must be one of"),
        ('{"mixed": {"ordre": "sjf"}}', "mixed.ordre: unknown; must be one of admission,"),
        ('{"mixed": {"order": "lifo"}}', "mixed.order: must be one of fcfs, sjf, ljf"),
        ('{"mixed": {"max_num_seqs": 1.5}}', "mixed.max_num_seqs: must be a whole number"),
        ('{"mixed": {"max_num_seqs": -1}}', "mixed.max_num_seqs must be at least 0"),
        ('{"mixed": {"prefill_sched_batch": 0}}', "prefill_sched_batch must be at least 1"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(SchedulingConfigError) as refused:
        parse(text)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
