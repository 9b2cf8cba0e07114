"""Numbers from the cells of a recording, and the tokens of each request from all its fields.

Called by `history`. What is hard: a file may have the same count in several fields, each of them
empty for some requests, and some tools state a prompt in parts.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cleave.traffic.recordings.request_fields import SEPARATE, Field, FieldRole, normalize
from cleave.traffic.recordings.request_table import RequestTable, format_value

MAX_TOKENS = 10_000_000

Counts = NDArray[np.int64]
Numbers = NDArray[np.float64]
Value = TypeVar("Value")


def find_tokens(table: RequestTable, role: FieldRole, part: FieldRole) -> dict[str, Numbers]:
    """By path the counts of each field of this role; those of role `part` are added up for each
    object. NaN: the request has none."""
    found = {field.path: to_numbers(table.cells[field.path]) for field in table.select(role)}
    for path in found:
        for separate in select_separate(table, path):
            found[path] = found[path] + np.nan_to_num(to_numbers(table.cells[separate.path]))
    for parent in dict.fromkeys(field.parent for field in table.select(part)):
        parts = [each for each in table.select(part) if each.parent == parent]
        counts = np.array([to_numbers(table.cells[each.path]) for each in parts])
        found[parts[0].path] = np.where(np.isnan(counts).all(axis=0), np.nan, np.nansum(counts, 0))
    return found


def select_separate(table: RequestTable, path: str) -> list[Field]:
    """The counts that the field of this path leaves out."""
    parent, _, name = path.rpartition(".")
    names = SEPARATE.get(normalize(name), frozenset())
    separate = [each for each in table.select(FieldRole.SEPARATE) if each.parent == parent]
    return [each for each in separate if normalize(each.path.rpartition(".")[2]) in names]


def merge_tokens(found: dict[str, Numbers]) -> Numbers:
    """The first count of each request."""
    merged, *more = found.values()
    for each in more:
        merged = np.where(np.isnan(merged), each, merged)
    return merged


def read_tokens(table: RequestTable, found: dict[str, Numbers], minimum: int = 1) -> Counts:
    """The tokens of each request, as `find_tokens` found them. Raises HistoryError where a request
    has none, or fields that contradict each other."""
    numbers = merge_tokens(found)
    names = list(found)
    for name, each in found.items():
        wrong = np.flatnonzero(~np.isnan(each) & (each != numbers))
        if len(wrong):
            at = int(wrong[0])
            other = next(key for key in names if not np.isnan(found[key][at]))
            what = f"{other} {numbers[at]:g} and {name} {each[at]:g} contradict each other"
            raise table.build_error(at, f"{what}; drop one of these fields")
    wrong = np.flatnonzero(~np.isfinite(numbers))
    if len(wrong):
        at = int(wrong[0])
        cells = [(name, table.cells[name][at]) for name in names]
        name, cell = next((pair for pair in cells if pair[1] is not None), cells[0])
        what = f"{name} {format_value(cell)}: not a number"
        raise table.build_error(at, f"{what}; drop or correct the request")
    wrong = np.flatnonzero((numbers < minimum) | (numbers > MAX_TOKENS) | (numbers % 1 != 0))
    if len(wrong):
        at = int(wrong[0])
        name = next(key for key in names if not np.isnan(found[key][at]))
        what = f"{name} {format_value(table.cells[name][at])}: must be a whole number"
        limits = f"from {minimum} to {MAX_TOKENS:,}"
        raise table.build_error(at, f"{what} {limits}; drop or correct the request")
    return numbers.astype(np.int64)


def read_counts(table: RequestTable, path: str, minimum: int = 1) -> Counts:
    """A column of counts. Raises HistoryError."""
    return read_tokens(table, {path: to_numbers(table.cells[path])}, minimum)


def read_numbers(table: RequestTable, path: str) -> Numbers:
    """A column of finite numbers, times of arrival. Raises HistoryError."""
    cells = table.cells[path]
    numbers = to_numbers(cells)
    wrong = np.flatnonzero(~np.isfinite(numbers))
    if len(wrong):
        at = int(wrong[0])
        what = f"{path} {format_value(cells[at])}"
        remedy = "drop or correct it, or write dates as 2026-05-01T12:00:00Z"
        raise table.build_error(at, f"{what}: not a number; {remedy}")
    return numbers


def to_numbers(cells: Sequence[object]) -> Numbers:
    """The cells as numbers; NaN: it is none. Converted at once where all are numbers."""
    try:
        # Exclude bool, which Python accepts as a number.
        if bool not in set(map(type, cells)):
            return np.array(cells, dtype=np.float64).reshape(len(cells))
    except (ValueError, TypeError, OverflowError):
        pass
    return np.array([_parse_number(cell) for cell in cells])


def _parse_number(cell: object) -> float:
    is_plain = isinstance(cell, str | int | float) and not isinstance(cell, bool)
    number = try_parse(float, cell) if is_plain else None
    return np.nan if number is None else number


def try_parse(parse: Callable[[Any], Value], cell: object) -> Value | None:
    """The value; None: the cell cannot be parsed."""
    try:
        return parse(cell)
    except (ValueError, OverflowError, TypeError):
        return None
