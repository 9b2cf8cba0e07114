"""Fit of decode iterations: for each batch, ms is a line over the context (Aladdin, Eq. 3).

Used for measured profiles of engines and for the attention in operator profiles. Standard library
only. What is hard: points are few and noisy. One slope for all batches is robust; one slope for
each batch follows kernels that use the device better in larger batches. Cross-validation decides.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from cleave.perf.profile import curve
from cleave.perf.profile.profile import DecodeAttentionPoint, DecodePoint
from cleave.perf.timing import EngineTiming

_MAX_FOLDS = 20
_MANY_CONTEXTS = 4
"""Mean number of contexts for each batch from which every batch has a slope of its own."""

DecodeSample = DecodePoint | DecodeAttentionPoint
"""A measured decode iteration, or its attention."""

DecodeTables = tuple[tuple[float, ...], tuple[float, ...]]
"""(ms without contexts, ms per context token), each by batch from 0 on."""


def fit_tables(points: Sequence[DecodeSample]) -> DecodeTables:
    """The decode tables of an EngineTiming, from two points or more."""
    return _fit_by_batch(points, _prefers_common_slope(points))


def compute_validation_error(points: Sequence[DecodeSample]) -> float | None:
    """Mean absolute percentage error of `fit_tables` on held-out points; None: too few points."""
    return _cross_validate(points, is_common=_prefers_common_slope(points))


def iter_folds(count: int) -> Iterator[range]:
    """Indices to hold out together: single points; in a large profile every twentieth point."""
    number = min(count, _MAX_FOLDS)
    return (range(first, count, number) for first in range(number))


def _prefers_common_slope(points: Sequence[DecodeSample]) -> bool:
    """Whether one slope over the context predicts held-out points as well as one for each batch.
    With many contexts for each batch, as in kernel tables, it never does."""
    if len(points) >= _MANY_CONTEXTS * len({point.batch for point in points}):
        return False
    common, own = _cross_validate(points, is_common=True), _cross_validate(points, is_common=False)
    return own is None or common is None or common <= own


def _fit_by_batch(points: Sequence[DecodeSample], is_common: bool) -> DecodeTables:
    """Fit the tables with a common slope, or with one for each batch."""
    by_batch: dict[int, list[DecodeSample]] = defaultdict(list)
    for point in points:
        by_batch[point.batch].append(point)
    slopes = _fit_common_slope(by_batch) if is_common else _fit_own_slopes(by_batch)
    fixed = [
        (batch, _compute_mean([p.ms - slopes[batch] * p.context_tokens for p in group]))
        for batch, group in sorted(by_batch.items())
    ]
    if len(fixed) == 1:
        fixed.insert(0, (0, fixed[0][1]))
    table = curve.tabulate(curve.fit_non_decreasing(fixed), 1.0)
    slope_points = sorted(slopes.items())
    if len(slope_points) == 1:
        slope_points.insert(0, (0, slope_points[0][1]))
    # Below the smallest batch its slope is used: extrapolating slopes would be meaningless.
    first = slope_points[0][0]
    batches = range(slope_points[-1][0] + 1)
    return table, tuple(curve.interpolate_all(slope_points, (max(n, first) for n in batches)))


def _fit_own_slopes(by_batch: dict[int, list[DecodeSample]]) -> dict[int, float]:
    """One slope for each batch, interpolated where a batch was measured with a single context."""
    common = _fit_common_slope(by_batch)
    fitted = [
        (batch, _fit_slope({batch: group}))
        for batch, group in sorted(by_batch.items())
        if len({point.context_tokens for point in group}) > 1
    ]
    if len(fitted) < 2:
        return common
    first, last = fitted[0][0], fitted[-1][0]
    return {n: curve.interpolate(fitted, min(max(n, first), last)) for n in by_batch}


def _fit_common_slope(by_batch: dict[int, list[DecodeSample]]) -> dict[int, float]:
    return dict.fromkeys(by_batch, _fit_slope(by_batch))


def _fit_slope(by_batch: dict[int, list[DecodeSample]]) -> float:
    """Least squares around each batch's mean, from 0 to the smallest ratio of ms to context."""
    rows: list[tuple[float, float, float]] = []
    for group in by_batch.values():
        mean_context = _compute_mean([point.context_tokens for point in group])
        mean_ms = _compute_mean([point.ms for point in group])
        weight = 1 / mean_ms**2
        rows += [(p.context_tokens - mean_context, p.ms - mean_ms, weight) for p in group]
    across = sum(x * x * weight for x, _, weight in rows)
    slope = sum(x * y * weight for x, y, weight in rows) / across if across else 0.0
    most = min(
        (p.ms / p.context_tokens for group in by_batch.values() for p in group if p.context_tokens),
        default=0.0,
    )
    return min(max(slope, 0.0), most)


def _cross_validate(points: Sequence[DecodeSample], *, is_common: bool) -> float | None:
    batches = [point.batch for point in points]
    ends = {batch for batch in (min(batches), max(batches)) if batches.count(batch) == 1}

    def pairs() -> Iterator[tuple[float, float]]:
        for fold in iter_folds(len(points)):
            inside = [points[i] for i in fold if points[i].batch not in ends]
            rest = [point for i, point in enumerate(points) if i not in fold or point not in inside]
            if not rest or not inside:
                continue
            table, context = _fit_by_batch(rest, is_common)
            timing = EngineTiming(1.0, (0.0, 0.0), 0.0, table, context)
            for point in inside:
                yield timing.predict_decode_ms(point.batch, point.context_tokens), point.ms

    return curve.compute_mean_error(pairs())


def _compute_mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
