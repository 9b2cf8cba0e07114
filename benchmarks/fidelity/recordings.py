"""Loads that were served, in files: the trace, what clients saw of it, and the engines' passes."""

from pathlib import Path

import numpy as np
from iteration_times import Passes
from load import Seen

from cleave.simulator.trace import Trace


def keep(file: Path, trace: Trace, seen: Seen, passes: Passes) -> None:
    """Write all of it, or nothing."""
    partial = file.with_suffix(".partial.npz")
    np.savez(
        partial,
        arrival_ms=trace.arrival_ms,
        prompt_tokens=trace.prompt_tokens,
        output_tokens=trace.output_tokens,
        first_token_ms=seen.first_token_ms,
        end_ms=seen.end_ms,
        lag_ms=seen.lag_ms,
        faults=np.array(seen.faults, dtype=str),
        busy_share=seen.busy_share,
        passes=passes,
    )
    partial.replace(file)


def recall(file: Path) -> tuple[Trace, Seen, Passes]:
    """What `keep` wrote."""
    with np.load(file) as archive:
        trace = Trace(archive["arrival_ms"], archive["prompt_tokens"], archive["output_tokens"])
        faults = tuple(str(fault) for fault in archive["faults"])
        times = archive["first_token_ms"], archive["end_ms"], archive["lag_ms"]
        seen = Seen(*times, faults, float(archive["busy_share"]))
        return trace, seen, archive["passes"]
