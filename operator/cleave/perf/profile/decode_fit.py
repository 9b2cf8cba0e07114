"""Fit of decode iterations: for each batch, ms is a line over the context (Aladdin, Eq. 3).

Used for measured profiles of engines and for the attention in operator profiles. Standard library
only. What is hard: points are few and noisy. One slope for all batches is robust; one slope for
each batch follows kernels that use the device better in larger batches. Cross-validation decides.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Protocol

from cleave.perf.profile import curve
from cleave.perf.timing import Timing

_MOST_FOLDS = 20


class Measured(Protocol):
    """A measured decode iteration, or its attention."""

    @property
    def batch(self) -> int:
        """Number of requests."""

    @property
    def context_tokens(self) -> int:
        """Sum over all requests."""

    @property
    def ms(self) -> float:
        """Duration."""


Tables = tuple[tuple[float, ...], tuple[float, ...]]
"""(ms without contexts, ms per context token), each by batch from 0 on."""


def fit(points: Sequence[Measured]) -> Tables:
    """The decode tables of a Timing, from two points or more."""
    return _fit_lines(points, _is_common(points))


def held_out_error(points: Sequence[Measured]) -> float | None:
    """Mean absolute percentage error of `fit` on fold-out points; None: none can be fold out."""
    return _error(points, is_common=_is_common(points))


def folds(count: int) -> Iterator[range]:
    """Indices to hold out together: single points, in a large profile every twentieth point."""
    number = min(count, _MOST_FOLDS)
    return (range(first, count, number) for first in range(number))


def _is_common(points: Sequence[Measured]) -> bool:
    """Whether one slope over the context predicts fold-out points as well as one for each batch."""
    common, own = (_error(points, is_common=choice) for choice in (True, False))
    return own is None or common is None or common <= own


def _fit_lines(points: Sequence[Measured], is_common: bool) -> Tables:
    """Fit the tables with a common slope, or with one for each batch."""
    by_batch: dict[int, list[Measured]] = defaultdict(list)
    for point in points:
        by_batch[point.batch].append(point)
    slopes = _common_slope(by_batch) if is_common else _own_slopes(by_batch)
    fixed = [
        (batch, _mean([p.ms - slopes[batch] * p.context_tokens for p in group]))
        for batch, group in sorted(by_batch.items())
    ]
    if len(fixed) == 1:
        batch, ms = fixed[0]
        fixed = [(0, ms), (batch, ms)]
    table = curve.tabulate(curve.non_decreasing(fixed), 1.0)
    slope_points = sorted(slopes.items())
    slope_points = (
        slope_points if len(slope_points) > 1 else [(0, slope_points[0][1]), slope_points[0]]
    )
    # Below the smallest batch its slope is used: extrapolating slopes would be meaningless.
    first = slope_points[0][0]
    context = [
        curve.read(slope_points, max(batch, first)) for batch in range(slope_points[-1][0] + 1)
    ]
    return table, tuple(context)


def _own_slopes(by_batch: dict[int, list[Measured]]) -> dict[int, float]:
    """One slope for each batch, interpolated where a batch was measured with a single context."""
    common = _common_slope(by_batch)
    fitted = [
        (batch, _slope({batch: group}))
        for batch, group in sorted(by_batch.items())
        if len({point.context_tokens for point in group}) > 1
    ]
    if len(fitted) < 2:
        return common
    return {
        batch: curve.read(fitted, min(max(batch, fitted[0][0]), fitted[-1][0]))
        for batch in by_batch
    }


def _common_slope(by_batch: dict[int, list[Measured]]) -> dict[int, float]:
    return dict.fromkeys(by_batch, _slope(by_batch))


def _slope(by_batch: dict[int, list[Measured]]) -> float:
    """The common slope: least squares around each batch's mean, from 0 to the smallest ratio of ms
    to context."""
    rows: list[tuple[float, float, float]] = []
    for group in by_batch.values():
        mean_context = _mean([point.context_tokens for point in group])
        mean_ms = _mean([point.ms for point in group])
        weight = 1 / mean_ms**2
        rows += [(p.context_tokens - mean_context, p.ms - mean_ms, weight) for p in group]
    across = sum(x * x * weight for x, _, weight in rows)
    slope = sum(x * y * weight for x, y, weight in rows) / across if across else 0.0
    most = min(
        (p.ms / p.context_tokens for group in by_batch.values() for p in group if p.context_tokens),
        default=0.0,
    )
    return min(max(slope, 0.0), most)


def _error(points: Sequence[Measured], *, is_common: bool) -> float | None:
    batches = [point.batch for point in points]
    ends = {batch for batch in (min(batches), max(batches)) if batches.count(batch) == 1}

    def pairs() -> Iterator[tuple[float, float]]:
        for fold in folds(len(points)):
            inside = [points[i] for i in fold if points[i].batch not in ends]
            rest = [point for i, point in enumerate(points) if i not in fold or point not in inside]
            if not rest or not inside:
                continue
            table, context = _fit_lines(rest, is_common)
            timing = Timing(1.0, (0.0, 0.0), 0.0, table, context)
            for point in inside:
                yield timing.decode_pass_ms(point.batch, point.context_tokens), point.ms

    return curve.mean_error(pairs())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
