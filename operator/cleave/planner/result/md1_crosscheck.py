"""Compares the simulator with the M/D/1 formulas where a plan's prefill instance fits them.

DistServe, section 3.1. Called by the search for the selected plan; a disagreement becomes a warning
of the result. The formulas describe one queue of equal prompts: plans with several prefill
instances, different prompt lengths or other arrivals than Poisson are not checked.
"""

from collections.abc import Iterator

import numpy as np

from cleave.api.role import Role
from cleave.planner.result.prediction import PredictedPlan
from cleave.planner.search import md1
from cleave.planner.search.md1 import QueueingError
from cleave.simulator.fleet import Batching

_TOLERANCE = 0.1
"""Relative difference of the mean TTFT that sampling explains."""


def list_disagreements(finalist: PredictedPlan) -> Iterator[str]:
    """One sentence if formula and simulation differ."""
    expected_ms = compute_expected_prefill_ms(finalist)
    if expected_ms is None:
        return
    outcome, window = finalist.outcome, finalist.span.window
    simulated_ms = float(np.mean((outcome.prefill_end_ms - outcome.arrival_ms)[window]))
    if abs(simulated_ms - expected_ms) > _TOLERANCE * expected_ms:
        yield (
            f"mean time to the end of the prompt is {simulated_ms:.4g} ms simulated and "
            f"{expected_ms:.4g} ms by the M/D/1 formula (DistServe, Eq. 1-3)"
        )


def compute_expected_prefill_ms(finalist: PredictedPlan) -> float | None:
    """Mean time from arrival to the end of the prompt by Eq. 1 and 2; None: they do not apply."""
    groups = [group for group in finalist.placement.groups if group.role is Role.PREFILL]
    if len(groups) != 1 or groups[0].replicas != 1:
        return None
    trace, instance = finalist.trace, groups[0].instance
    prompt = round(float(trace.prompt_tokens.mean()))
    joins = 2 * prompt <= instance.max_num_batched_tokens
    cuts = instance.batching is Batching.VLLM and prompt > instance.max_num_batched_tokens
    if not md1.applies(trace) or joins or cuts:
        return None
    timing = instance.engine.timing
    try:
        return md1.compute_mean_ttft_inter_op_ms(
            trace.rate, timing.predict_prefill_ms([prompt]), timing.stages
        )
    except QueueingError:
        return None
