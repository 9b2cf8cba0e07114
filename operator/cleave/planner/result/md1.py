"""Mean TTFT of a prefill instance by formula: a check of the simulator for simple queues.

DistServe, section 3.1, Eq. 1 and 2: Poisson arrivals, prompts of one length, served one at a time
in order of arrival (M/D/1). Times in milliseconds, rates in requests per second. The search
compares the formulas with the simulation of the selected plan; a disagreement becomes a warning of
the result. Plans with several prefill instances, different prompt lengths or other arrivals than
Poisson are not checked.
"""

from collections.abc import Iterator

import numpy as np

from cleave.api.role import Role
from cleave.planner.result.prediction import PredictedPlan
from cleave.simulator.fleet import Batching
from cleave.simulator.trace import Trace

_TOLERANCE = 0.1
"""Relative difference of the mean TTFT that sampling explains."""
_EQUAL_LENGTH_VARIATION = 0.02
"""Largest coefficient of variation of prompt lengths that count as equal."""
_POISSON_VARIATION = (0.9, 1.1)
"""Range of the coefficient of variation of gaps that count as Poisson arrivals."""


class QueueingError(ValueError):
    """The queue grows without bound, or the formula does not apply."""


def compute_mean_ttft_ms(rate: float, prefill_ms: float, stages: int = 1) -> float:
    """Eq. 1, D + R D^2 / (2 (1 - R D)), Eq. 2, D + R D^2 / (4 (2 - R D)), and with s stages
    D + R D^2 / (2 s (s - R D)). A request takes D through all stages; the queue advances at the
    pace of one stage, D / s. Raises QueueingError if R D >= s."""
    return prefill_ms + _compute_wait_ms(rate, prefill_ms / stages)


def applies(trace: Trace) -> bool:
    """Whether prompts have equal lengths, none repeats, and arrivals seem Poisson; False below 100
    requests."""
    if len(trace) < 100 or trace.blocks is not None:
        return False
    prompts, gaps = trace.prompt_tokens, trace.arrival_ms[1:] - trace.arrival_ms[:-1]
    low, high = _POISSON_VARIATION
    is_alike = float(prompts.std()) <= _EQUAL_LENGTH_VARIATION * float(prompts.mean())
    return is_alike and low <= float(gaps.std()) / float(gaps.mean()) <= high


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
            f"{expected_ms:.4g} ms by the M/D/1 formula (DistServe, Eq. 1 and 2)"
        )


def compute_expected_prefill_ms(finalist: PredictedPlan) -> float | None:
    """Mean time from arrival to the end of the prompt by Eq. 1 and 2; None: they do not apply."""
    groups = [group for group in finalist.placement.groups if group.role is Role.PREFILL]
    if len(groups) != 1 or groups[0].replicas * groups[0].instance.engine.ranks != 1:
        return None
    trace, instance = finalist.trace, groups[0].instance
    prompt = round(float(trace.prompt_tokens.mean()))
    bypasses = prompt <= finalist.plan.whole_below_tokens
    joins = 2 * prompt <= instance.max_num_batched_tokens
    cuts = instance.batching is Batching.VLLM and prompt > instance.max_num_batched_tokens
    if not applies(trace) or bypasses or joins or cuts:
        return None
    timing = instance.engine.timing
    prefill_ms = timing.predict_prefill_ms([prompt])
    try:
        return compute_mean_ttft_ms(trace.rate, prefill_ms, timing.stages)
    except QueueingError:
        return None


def _compute_wait_ms(rate: float, service_ms: float) -> float:
    """Mean wait in M/D/1: R D^2 / (2 (1 - R D))."""
    per_ms = rate / 1000.0
    load = per_ms * service_ms
    if not 0 <= load < 1:
        raise QueueingError(
            f"rate {rate:g} req/s: {service_ms:g} ms each keep the instance busy {load:.0%} of the "
            "time; the queue is stable only below 100 %"
        )
    return per_ms * service_ms**2 / (2 * (1 - load))
