"""Where requests spend their time: the five stages of DistServe's section 6.3.

Used by `cleave simulate` and the report. Pure functions.
"""

from enum import StrEnum

import numpy as np

from cleave.simulator.outcome import Outcome, Times


class Stage(StrEnum):
    """One part of a request's life, in order."""

    PREFILL_QUEUE = "prefill queueing"
    PREFILL = "prefill"
    TRANSFER = "KV transfer"
    DECODE_QUEUE = "decode queueing"
    DECODE = "decode"


def stage_ms(outcome: Outcome) -> dict[Stage, Times]:
    """Milliseconds of every request in each stage; nan where it never reached the stage.

    Decode queueing is the wait for room on the decode instance before the pull plus the wait for
    its first iteration after it. The five add up to the time from arrival to end. On a mixed
    instance there is no transfer, and decode includes iterations that other prompts lengthened.
    """
    return {
        Stage.PREFILL_QUEUE: outcome.prefill_start_ms - outcome.arrival_ms,
        Stage.PREFILL: outcome.prefill_end_ms - outcome.prefill_start_ms,
        Stage.TRANSFER: outcome.transfer_end_ms - outcome.transfer_start_ms,
        Stage.DECODE_QUEUE: (outcome.transfer_start_ms - outcome.prefill_end_ms)
        + (outcome.decode_start_ms - outcome.transfer_end_ms),
        Stage.DECODE: outcome.end_ms - outcome.decode_start_ms,
    }


def stage_shares(outcome: Outcome) -> dict[Stage, float]:
    """Each stage's share of the total time of the requests that ended; zeros when none did."""
    ended = ~np.isnan(outcome.end_ms)
    totals = {stage: float(np.nansum(ms[ended])) for stage, ms in stage_ms(outcome).items()}
    overall = sum(totals.values())
    return {stage: total / overall if overall else 0.0 for stage, total in totals.items()}
