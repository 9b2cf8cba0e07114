"""Curves through few measured points. Used by all latency models that become an EngineTiming.

Standard library only: emulated engines import it.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

_MAX_POINTS = 2048
_MIN_PIVOT = 1e-9
"""A coefficient whose scaled pivot is not above this is not determined by the samples."""

Points = Sequence[tuple[float, float]]
"""(x, value), x ascending."""


def interpolate(points: Points, at: float) -> float:
    """Piecewise linear interpolation through two or more `points`, extrapolated on both sides."""
    index = min(max(bisect_right(points, (at, math.inf)) - 1, 0), len(points) - 2)
    (x0, y0), (x1, y1) = points[index], points[index + 1]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def interpolate_all(points: Points, ascending: Iterable[float]) -> list[float]:
    """`interpolate` at every one of these positions, in one pass over `points`."""
    found: list[float] = []
    index, last = 0, len(points) - 2
    for at in ascending:
        while index < last and points[index + 1][0] <= at:
            index += 1
        (x0, y0), (x1, y1) = points[index], points[index + 1]
        found.append(y0 + (y1 - y0) * (at - x0) / (x1 - x0))
    return found


def tabulate(points: Points, step: float) -> tuple[float, ...]:
    """`points` interpolated at 0, step, 2 steps, ... to one step beyond the last; never below 0.

    Beyond the last point the mean slope of the upper half is used, because the slope of the last
    two points is noisy.
    """
    last, value = points[-1]
    middle = points[(len(points) - 1) // 2]
    slope = max((value - middle[1]) / (last - middle[0]), 0.0)
    count = math.ceil(last / step - 1e-9)
    positions = (min(i * step, last) for i in range(count + 1))
    inside = [max(value, 0.0) for value in interpolate_all(points, positions)]
    inside[-1] += slope * (count * step - last)
    return (*inside, inside[-1] + slope * step)


def find_step(xs: Iterable[int]) -> int:
    """The widest step of a table that contains every x, limited to _MAX_POINTS table entries."""
    xs = tuple(xs)
    return max(math.gcd(*xs), math.ceil(max(xs) / _MAX_POINTS))


def fit_non_decreasing(points: Points) -> list[tuple[float, float]]:
    """The non-decreasing least-squares fit: neighbours in wrong order are replaced by their mean.
    (Pool adjacent violators.)"""
    blocks: list[tuple[float, int]] = []
    for _, value in points:
        total, count = value, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            total, count = total + blocks[-1][0], count + blocks.pop()[1]
        blocks.append((total, count))
    values = [total / count for total, count in blocks for _ in range(count)]
    return [(x, value) for (x, _), value in zip(points, values, strict=True)]


def solve_least_squares(
    rows: Sequence[Sequence[float]], values: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Coefficients, none below 0, that minimise sum(weight * (row . coefficients - value)^2).
    Raises ValueError when the rows do not determine them."""
    size = len(rows[0])
    moments = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for row, value, weight in zip(rows, values, weights or [1.0] * len(rows), strict=True):
        for i in range(size):
            right[i] += weight * row[i] * value
            for j in range(size):
                moments[i][j] += weight * row[i] * row[j]
    return solve_moments(moments, right)


def solve_moments(moments: Sequence[Sequence[float]], right: Sequence[float]) -> tuple[float, ...]:
    """Solve the normal equations of least squares; coefficients that would be below 0 become 0.
    Raises ValueError when columns are 0 or linearly dependent."""
    columns = list(range(len(right)))
    while columns:
        solved = _solve([[*(moments[i][j] for j in columns), right[i]] for i in columns])
        if min(solved) >= 0:
            by_column = dict(zip(columns, solved, strict=True))
            return tuple(by_column.get(i, 0.0) for i in range(len(right)))
        del columns[solved.index(min(solved))]
    return (0.0,) * len(right)


def compute_mean_error(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Mean absolute error of (predicted, measured) as a share; None for no pairs."""
    shares = [abs(predicted - measured) / measured for predicted, measured in pairs]
    return sum(shares) / len(shares) if shares else None


def _solve(matrix: list[list[float]]) -> list[float]:
    """Gaussian elimination with pivots on moments, with the right side as last column."""
    size = len(matrix)
    # Each column is scaled to 1: otherwise tokens beside tokens^2 would look degenerate.
    scales = [math.sqrt(matrix[i][i]) for i in range(size)]
    if min(scales) == 0:
        raise ValueError("the samples do not determine the coefficients")
    rows = [
        [*(matrix[i][j] / scales[i] / scales[j] for j in range(size)), matrix[i][size] / scales[i]]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(rows[k][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        if abs(rows[i][i]) <= _MIN_PIVOT:
            raise ValueError("the samples do not determine the coefficients")
        for k in range(i + 1, size):
            share = rows[k][i] / rows[i][i]
            rows[k] = [a - share * b for a, b in zip(rows[k], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        solved = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - solved) / rows[i][i]
    return [part / scale for part, scale in zip(solution, scales, strict=True)]
