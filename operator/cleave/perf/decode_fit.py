"""Decode passes over batch and context: a line over the context for each batch (Aladdin, Eq. 3).

Used for measured profiles of engines and for the attention of operator profiles. Standard library
only. What is hard: few, noisy points. One slope for all batches is sturdy, one for each follows a
kernel that uses the device better in larger batches; what predicts held-out points better is taken.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Protocol

from cleave.perf import curve
from cleave.perf.timing import Timing

_MOST_FOLDS = 20


class Measured(Protocol):
    """A decode pass, or its attention."""

    @property
    def batch(self) -> int:
        """Requests."""

    @property
    def context_tokens(self) -> int:
        """Of all requests together."""

    @property
    def ms(self) -> float:
        """Duration."""


Tables = tuple[tuple[float, ...], tuple[float, ...]]
"""By batch from 0 on: ms without contexts, ms per context token."""


def fit(points: Sequence[Measured]) -> Tables:
    """Tables as Timing wants them, from two points or more."""
    return _fit_lines(points, _is_common(points))


def held_out_error(points: Sequence[Measured]) -> float | None:
    """Mean absolute percentage error of `fit` on points that took no part in it."""
    return _error(points, is_common=_is_common(points))


def folds(count: int) -> Iterator[range]:
    """Indices to hold out together: one at a time, in a large profile every twentieth."""
    number = min(count, _MOST_FOLDS)
    return (range(first, count, number) for first in range(number))


def _is_common(points: Sequence[Measured]) -> bool:
    """Whether one slope over the context serves all batches better than one each.

    Few or noisy points: one. Attention that uses the device better in larger batches: one each.
    """
    common, own = (_error(points, is_common=choice) for choice in (True, False))
    return own is None or common is None or common <= own


def _fit_lines(points: Sequence[Measured], is_common: bool) -> Tables:
    """Tables over the batch: pass without contexts, and ms per context token."""
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
    lines = sorted(slopes.items())
    lines = lines if len(lines) > 1 else [(0, lines[0][1]), lines[0]]
    # Below the smallest batch the slope is its own; its line over the batch means nothing there.
    first = lines[0][0]
    context = [curve.read(lines, max(batch, first)) for batch in range(lines[-1][0] + 1)]
    return table, tuple(context)


def _own_slopes(by_batch: dict[int, list[Measured]]) -> dict[int, float]:
    """One slope for each batch that was measured with several contexts, lines between them."""
    common = _common_slope(by_batch)
    found = [
        (batch, _slope({batch: group}))
        for batch, group in sorted(by_batch.items())
        if len({point.context_tokens for point in group}) > 1
    ]
    if len(found) < 2:
        return common
    return {
        batch: curve.read(found, min(max(batch, found[0][0]), found[-1][0])) for batch in by_batch
    }


def _common_slope(by_batch: dict[int, list[Measured]]) -> dict[int, float]:
    return dict.fromkeys(by_batch, _slope(by_batch))


def _slope(by_batch: dict[int, list[Measured]]) -> float:
    """Least squares over the distances to each batch's own mean, within what the points bear."""
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
        for held in folds(len(points)):
            inside = [points[i] for i in held if points[i].batch not in ends]
            rest = [point for i, point in enumerate(points) if i not in held or point not in inside]
            if not rest or not inside:
                continue
            table, context = _fit_lines(rest, is_common)
            timing = Timing(1.0, (0.0, 0.0), 0.0, table, context)
            for point in inside:
                yield timing.decode_pass_ms(point.batch, point.context_tokens), point.ms

    return curve.mean_error(pairs())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
