"""The prompt length up to which a decode instance should compute prompts itself.

Called when a disaggregated plan is predicted; gateways get the number. What is hard: it depends on
how full a decode instance usually is, so the batch size is taken from the plan's own simulation.
"""

import numpy as np

from cleave.api.role import Role
from cleave.planner.problem import Problem
from cleave.planner.search.candidate_placement import CandidatePlacement, build_transfer
from cleave.policy.short_prompts import find_short_prompt_tokens
from cleave.simulator.outcome import SimulationResult
from cleave.simulator.trace import Trace


def compute_whole_below_tokens(
    problem: Problem, placement: CandidatePlacement, outcome: SimulationResult, trace: Trace
) -> int:
    """Tokens, rounded down to a power of two so that small changes do not change it; 0: none.

    `outcome` is that of one cell of `placement` serving `trace`.
    """
    engines = {group.role: group.instance.engine for group in placement.groups}
    if Role.PREFILL not in engines or Role.DECODE not in engines:
        return 0
    mean = outcome.instances.mean_batch[outcome.instances.decode_iterations > 0]
    if not len(mean):
        return 0
    batch = max(round(float(np.mean(mean))), 1)
    context = float(np.mean(trace.prompt_tokens + trace.output_tokens / 2))
    moved = build_transfer(problem, placement)
    tokens = find_short_prompt_tokens(
        engines[Role.PREFILL].timing,
        engines[Role.DECODE].timing,
        moved.latency_ms,
        moved.token_ms,
        batch,
        round(batch * context),
        problem.slo.tpot_ms,
    )
    return 1 << tokens.bit_length() >> 1
