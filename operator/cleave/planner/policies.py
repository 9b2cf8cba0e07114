"""Converts a deployment's scheduling settings to the `Policies` of the simulator and the workers.

Predictions know every output length; engines reserve KV by estimates and preempt a little more.
"""

from cleave.api.engine import EngineSpec
from cleave.api.scheduling import DecodeAdmission, PromptOrder
from cleave.planner.problem import Policies
from cleave.policy.admission import Admission
from cleave.policy.prompt_order import PrefillOrder

ORDERS = {
    PromptOrder.ARRIVAL: PrefillOrder.FCFS,
    PromptOrder.SHORTEST_FIRST: PrefillOrder.SJF,
    PromptOrder.LONGEST_FIRST: PrefillOrder.LJF,
}
ADMISSIONS = {
    DecodeAdmission.GREEDY: Admission.GREEDY,
    DecodeAdmission.RESERVE_STATIC: Admission.RESERVE_STATIC,
    DecodeAdmission.RESERVE_DYNAMIC: Admission.RESERVE_DYNAMIC,
}


def build_policies(engine: EngineSpec) -> Policies:
    """The policies of spec.engine.scheduling, else vLLM's defaults."""
    scheduling = engine.scheduling
    if scheduling is None:
        return Policies(connector=engine.connector)
    return Policies(
        connector=engine.connector,
        order=ORDERS[scheduling.order],
        prefill_sched_batch=scheduling.sorted_prompts,
        admission=ADMISSIONS[scheduling.admission],
    )
