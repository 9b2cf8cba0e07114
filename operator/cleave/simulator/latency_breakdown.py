"""Where requests spend their time: the five stages of DistServe's section 6.3.

Used by `cleave simulate` and the report. Pure functions.
"""

from enum import StrEnum

import numpy as np

from cleave.simulator.outcome import SimulationResult, Times


class LatencyStage(StrEnum):
    """One part of a request's life, in order."""

    PREFILL_QUEUE = "prefill queueing"
    PREFILL = "prefill"
    TRANSFER = "KV transfer"
    DECODE_QUEUE = "decode queueing"
    DECODE = "decode"


def compute_stage_ms(outcome: SimulationResult) -> dict[LatencyStage, Times]:
    """Milliseconds of every request in each stage; nan where it never reached the stage.

    Decode queueing is the wait for room on the decode instance before the pull plus the wait for
    its first iteration after it. The five add up to the time from arrival to end. On a mixed
    instance there is no transfer, and decode includes iterations that other prompts lengthened.
    """
    return {
        LatencyStage.PREFILL_QUEUE: outcome.prefill_start_ms - outcome.arrival_ms,
        LatencyStage.PREFILL: outcome.prefill_end_ms - outcome.prefill_start_ms,
        LatencyStage.TRANSFER: outcome.transfer_end_ms - outcome.transfer_start_ms,
        LatencyStage.DECODE_QUEUE: (outcome.transfer_start_ms - outcome.prefill_end_ms)
        + (outcome.decode_start_ms - outcome.transfer_end_ms),
        LatencyStage.DECODE: outcome.end_ms - outcome.decode_start_ms,
    }


def compute_stage_shares(outcome: SimulationResult) -> dict[LatencyStage, float]:
    """Each stage's share of the total time of the requests that ended; zeros when none did."""
    ended = ~np.isnan(outcome.end_ms)
    totals = {stage: float(np.nansum(ms[ended])) for stage, ms in compute_stage_ms(outcome).items()}
    overall = sum(totals.values())
    return {stage: total / overall if overall else 0.0 for stage, total in totals.items()}
