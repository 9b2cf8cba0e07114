"""Inter-token latencies (ITL) of a simulation, as a histogram. Compiled, but for the constants.

The gap before a token is the time since the previous one of its request, whatever came between:
longer passes with prompts, a preemption, a transfer. What is hard: a leap has thousands of them, so
they are counted by iteration, and equal bins of an arithmetic series are found by halving.
"""

import numpy as np

from cleave.simulator.record_access import get_itl_count
from cleave.simulator.records import State

_MANTISSA_BITS = 52
_BITS_PER_OCTAVE = 6
_FIRST_OCTAVE = -7
"""The first bin begins at 2 ** -7 ms; shorter gaps count in it ..."""
_OCTAVES = 25
"""... and longer ones than 2 ** 18 ms in the last."""
_SHIFT = _MANTISSA_BITS - _BITS_PER_OCTAVE
_FIRST = (1023 + _FIRST_OCTAVE) << _BITS_PER_OCTAVE
NUM_BINS = _OCTAVES << _BITS_PER_OCTAVE
"""Bins are 64 equal parts of an octave, so 0.8 to 1.6 % wide: the leading bits of a float."""


def compute_middles() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The middle of each bin, in ms."""
    edges = (np.arange(NUM_BINS + 1, dtype=np.int64) + _FIRST << _SHIFT).view(np.float64)
    return (edges[1:] + edges[:-1]) / 2


def record_gaps(state: State, end: float, gap: float, count: int) -> None:
    """`count` tokens came at `end`, `gap` ms after the previous ones of their requests."""
    if state.itl_begin <= end < state.itl_end:
        get_itl_count(state, _find_bin(gap)).value += count


def record_series(state: State, gap: float, change: float, length: int, count: int) -> None:
    """`count` tokens came after each of the gaps `gap`, `gap + change` ... in the window."""
    last = gap + (length - 1) * change
    if change < 0.0:
        gap, change, last = last, -change, gap
    number, highest = _find_bin(gap), _find_bin(last)
    while number < highest:
        edge = float(np.int64(number + 1 + _FIRST << _SHIFT).view(np.float64))
        step = min(int((edge - gap) / change) + 1, length)
        get_itl_count(state, number).value += count * step
        gap += step * change
        length -= step
        number = max(_find_bin(gap), number + 1)
    get_itl_count(state, highest).value += count * length


def _find_bin(gap: float) -> int:
    number = (int(np.float64(gap).view(np.int64)) >> _SHIFT) - _FIRST
    return max(min(number, NUM_BINS - 1), 0)
