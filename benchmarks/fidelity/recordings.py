"""Loads that were served, in files: the trace, what clients saw of it, and the engines' passes."""

from pathlib import Path
from typing import Any

import numpy as np
from iteration_times import Passes
from load import Seen

from cleave.simulator.trace import PromptBlocks, Trace


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
        gaps_ms=seen.gaps_ms,
        faults=np.array(seen.faults, dtype=str),
        busy_share=seen.busy_share,
        engine_tokens=seen.prompt_tokens,
        passes=passes,
        **_list_blocks(trace),
    )
    partial.replace(file)


def recall(file: Path) -> tuple[Trace, Seen, Passes]:
    """What `keep` wrote."""
    with np.load(file) as archive:
        blocks = None
        if "block_tokens" in archive:
            sizes = archive["starts"], archive["numbers"], int(archive["block_count"])
            blocks = PromptBlocks(int(archive["block_tokens"]), *sizes)
        trace = Trace(
            archive["arrival_ms"],
            archive["prompt_tokens"],
            archive["output_tokens"],
            blocks=blocks,
        )
        faults = tuple(str(fault) for fault in archive["faults"])
        names = "first_token_ms", "end_ms", "lag_ms", "gaps_ms"
        times = (archive[name] for name in names)
        computed, cached, pulled = map(float, archive["engine_tokens"])
        seen = Seen(*times, faults, float(archive["busy_share"]), (computed, cached, pulled))
        return trace, seen, archive["passes"]


def _list_blocks(trace: Trace) -> dict[str, Any]:
    blocks = trace.blocks
    if blocks is None:
        return {}
    return {
        "block_tokens": blocks.block_tokens,
        "starts": blocks.starts,
        "numbers": blocks.numbers,
        "block_count": blocks.count,
    }
