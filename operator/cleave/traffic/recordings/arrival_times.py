"""Times of arrival from the cells of a recording, in any unit, or as dates.

Called by `history`. What is hard: a column rarely says its unit. Numbers that lie between 2001 and
2065 in one unit are times since 1970 in that unit; small ones count from the start of the
recording. What is assumed is said in a remark, and what fits nothing is refused.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cleave.traffic.recordings.request_fields import Field, PublishedFormat
from cleave.traffic.recordings.request_numbers import read_numbers, try_parse
from cleave.traffic.recordings.request_table import RequestTable, format_value

_UNITS = {"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6, "nanoseconds": 1e-9}
_NAMES = {unit_s: name for name, unit_s in _UNITS.items()}
_EPOCH_S = (1e9, 3e9)
"""Times since 1970 in these seconds: from 2001 to 2065."""
_LONGEST_S = 1e8
"""Longer recordings, over three years, are taken for a wrong unit."""
_REMEDY = "name the column by its unit: arrival_s, arrival_ms, arrival_us or arrival_ns"
_LONGEST_GAP_S = 1.0
"""A longer mean gap in a column without a unit may be one in milliseconds: 5 is 0.2 requests a
second, or 200."""
_DAYS = (30_000, 80_000)
_SHORTEST_GAP_S = 1e-3
"""With a shorter one, numbers like these are no seconds: spreadsheets write dates as days."""
_FEW = 20
"""Fewer requests may have any gap."""
_IDLE_GAP_S = 86_400.0
"""With a longer mean gap, numbers that could be times since 1970 are in the unit of their name."""


class Arrivals(NamedTuple):
    """When requests arrived."""

    ms: NDArray[np.float64]
    """Since the first row, in the order of the file."""
    is_clock: bool
    """Whether the times are dates or count from 1970: then any order of rows is a recording."""
    remarks: tuple[str, ...]


def read_arrivals(
    table: RequestTable, field: Field, published: PublishedFormat | None = None
) -> Arrivals:
    """The arrivals of all requests. `published`: knows the unit of small numbers where the name of
    the column does not say it. Raises HistoryError."""
    cells = table.cells[field.path]
    if _is_date(cells[0]):
        return Arrivals(_parse_dates(table, cells) * 1000, True, ())
    numbers = read_numbers(table, field.path)
    unit_s, remark = _choose_unit(table, field, numbers, published)
    is_clock = _find_epoch_unit(float(numbers[0])) == unit_s
    ms: NDArray[np.float64] = (numbers - numbers[0]) * (unit_s * 1000)
    return Arrivals(ms, is_clock, (remark,) if remark else ())


def _choose_unit(
    table: RequestTable,
    field: Field,
    numbers: NDArray[np.float64],
    published: PublishedFormat | None,
) -> tuple[float, str]:
    """Seconds per unit, and what to say about that. Raises HistoryError."""
    first, last = float(numbers.min()), float(numbers.max())
    epoch_s = _find_epoch_unit(first)
    if epoch_s != _find_epoch_unit(last):
        epoch_s = None
    named_s = field.unit_s
    is_named = named_s is not None and last * named_s < _EPOCH_S[1]
    is_idle = first == last or (last - first) * (epoch_s or 1) > _IDLE_GAP_S * len(numbers)
    if named_s is not None and is_named and (epoch_s is None or epoch_s <= named_s or is_idle):
        return named_s, ""
    if epoch_s is not None and not is_named:
        date = datetime.fromtimestamp(first * epoch_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        read = f"{field.path} is read as {_NAMES[epoch_s]} since 1970"
        return epoch_s, f"{read}: the first request arrived at {date}"
    default_s = published.unit_s if published is not None else 1.0
    is_known = published is not None or _is_likely_seconds(numbers)
    is_known = is_known and not _is_spreadsheets(numbers)
    if named_s is None and last * default_s < _LONGEST_S and is_known:
        why = f"as in {published.name}'s traces" if published else "since its name has no unit"
        read = f"{field.path} is read as {_NAMES[default_s]}, {why}"
        return default_s, f"{read}; if it is not, {_REMEDY}"
    at = int(np.argmax(numbers))
    what, remedy = f"{field.path} {format_value(table.cells[field.path][at])}", _REMEDY
    if _is_spreadsheets(numbers):
        what += ": is a date of a spreadsheet, in days"
        remedy = "write dates as 2026-05-01T12:00:00Z"
    elif named_s is None and last < _LONGEST_S:
        what += ": may be seconds or milliseconds since the start"
    else:
        what += ": neither surely times since 1970 in one unit, nor since the start"
        remedy += ", and let it begin at 0"
    raise table.build_error(at, f"{what}; {remedy}")


def _is_likely_seconds(numbers: NDArray[np.float64]) -> bool:
    """Whether times since the start can hardly be in a smaller unit."""
    if len(numbers) < _FEW:
        return True
    return float(numbers.max() - numbers.min()) / len(numbers) < _LONGEST_GAP_S


def _is_spreadsheets(numbers: NDArray[np.float64]) -> bool:
    """Whether they are days since 1900 rather than seconds: from 1982 to 2119, with parts."""
    first, last = float(numbers.min()), float(numbers.max())
    return _DAYS[0] < first < last < _DAYS[1] and last - first < _SHORTEST_GAP_S * len(numbers)


def _find_epoch_unit(number: float) -> float | None:
    """Seconds per unit in which it is a time since 1970; None: in no unit."""
    units = (unit_s for unit_s in _NAMES if _EPOCH_S[0] <= number * unit_s < _EPOCH_S[1])
    return next(units, None)


def _is_date(cell: object) -> bool:
    # Numbers first, as 20240131 would parse as a date too.
    if not isinstance(cell, str) or try_parse(float, cell) is not None:
        return False
    return try_parse(_parse_date, cell) is not None


def _parse_date(cell: object) -> datetime:
    text = str(cell).strip()
    return datetime.fromisoformat(text.removesuffix(" UTC") + "+00:00" * text.endswith(" UTC"))


def _parse_dates(table: RequestTable, cells: Sequence[object]) -> NDArray[np.float64]:
    """Seconds since the first date."""
    try:
        dates = [_parse_date(cell) for cell in cells]
        offsets = [date - dates[0] for date in dates]
    except (ValueError, TypeError):
        first = _parse_date(cells[0])
        at = next(
            at
            for at, cell in enumerate(cells)
            if (date := try_parse(_parse_date, cell)) is None
            or (date.tzinfo is None) != (first.tzinfo is None)
        )
        fault = f"{format_value(cells[at])}: no date and time as in line {table.lines[0]}"
        raise table.build_error(at, fault) from None
    return np.array([each / timedelta(seconds=1) for each in offsets])
