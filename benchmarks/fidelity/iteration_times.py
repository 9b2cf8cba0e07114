"""Passes that engines clocked while they served, and how they differ from profiled ones.

A profile repeats one pass on an otherwise idle engine. In traffic the same pass takes longer: a
prompt has emptied the caches that decoding lives on, requests join and leave, a pull of KV is begun
by the core that computes; and a machine shared with strangers is not as fast at each minute. All
of it is put into three numbers, so that what the simulator makes of passes can be separated from
what a pass costs. No request's own times take part.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cleave.perf.pipeline import scale_timing
from cleave.perf.timing import EngineTiming, compute_iteration_ms

Passes = NDArray[np.float64]
"""One row per pass: begin_s, end_s, tokens, squares, batch, contexts, pulled blocks."""
COLUMNS = 7
BEGIN, END, TOKENS, SQUARES, BATCH, CONTEXTS, PULLED = range(COLUMNS)


@dataclass(frozen=True, slots=True)
class PassScale:
    """What passes take in traffic."""

    prompt: float = 1.0
    """Prompts' part of a pass, as a multiple of what was profiled."""
    decode: float = 1.0
    """The same of decoding."""
    pull_ms: float = 0.0
    """By which pulls of KV lengthen the pass that begins with them, however many."""
    pull_block_ms: float = 0.0
    """The same per block."""

    def apply(self, timing: EngineTiming) -> EngineTiming:
        """`timing` at this pace."""
        return scale_timing(timing, prompt=self.prompt, decode=self.decode)


def read_passes(folder: Path, since_s: float, until_s: float) -> Passes:
    """What all engines of a fleet have written about this time, of `time.monotonic`."""
    rows = [row for file in sorted(folder.glob("*.csv")) for row in _read_rows(file)]
    passes = np.array(rows, dtype=np.float64).reshape(-1, COLUMNS)
    return passes[(passes[:, BEGIN] >= since_s) & (passes[:, END] <= until_s)]


def fit_pass_scale(passes: Passes, timing: EngineTiming) -> PassScale:
    """Of sums, not medians: a queue feels every millisecond. A kind that did not occur is as was.

    Passes without prompts and pulls measure decoding; then those with prompts, less their decoding,
    of prompts; then those that began pulls, and the next ones, of pulls.
    """
    took_ms = (passes[:, END] - passes[:, BEGIN]) * 1e3
    decode_ms = np.array([_predict(timing, row, has_prompts=False) for row in passes])
    whole_ms = np.array([_predict(timing, row, has_prompts=True) for row in passes])
    pulls = passes[:, PULLED] > 0
    after = np.append(False, pulls[:-1]) & ~pulls
    prompts = passes[:, TOKENS] > 0
    decode = _ratio(took_ms, decode_ms, ~prompts & ~pulls & ~after)
    prompt = _ratio(took_ms - decode * decode_ms, whole_ms - decode_ms, prompts & ~pulls & ~after)
    longer_ms = took_ms - decode * decode_ms - prompt * (whole_ms - decode_ms)
    with_next_ms = longer_ms + np.append(longer_ms[1:] * after[1:], 0.0)
    return PassScale(prompt, decode, *_fit_pulls(passes[pulls, PULLED], with_next_ms[pulls]))


def _predict(timing: EngineTiming, row: Passes, *, has_prompts: bool) -> float:
    return compute_iteration_ms(
        timing.prompt_step,
        timing.prompt_ms,
        timing.prompt_square_ms,
        timing.decode_ms,
        timing.decode_context_ms,
        timing.mixed_context_ms or timing.decode_context_ms,
        row[TOKENS] if has_prompts else 0.0,
        row[SQUARES] if has_prompts else 0.0,
        int(row[BATCH]),
        row[CONTEXTS],
    )


def _fit_pulls(blocks: Passes, longer_ms: Passes) -> tuple[float, float]:
    """A straight line through what passes with pulls took longer, or its mean."""
    if len(blocks) < 2 or np.ptp(blocks) == 0:
        return (float(longer_ms.mean()), 0.0) if len(blocks) else (0.0, 0.0)
    block_ms, pull_ms = np.polyfit(blocks, longer_ms, 1)
    return max(0.0, float(pull_ms)), max(0.0, float(block_ms))


def _ratio(took_ms: Passes, said_ms: Passes, chosen: NDArray[np.bool_]) -> float:
    said = said_ms[chosen].sum()
    return float(took_ms[chosen].sum() / said) if said > 0 else 1.0


def _read_rows(file: Path) -> Iterable[list[float]]:
    for line in file.read_text().splitlines():
        fields = line.split(",")
        # The last line may be half written.
        if len(fields) == COLUMNS:
            yield [float(field) for field in fields]
