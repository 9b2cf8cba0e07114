"""Reads recorded requests from a file: arrival times and lengths.

Called for `spec.workload.trace` and by `cleave workload`. What is hard: files come from many tools,
so columns have many names and times three units; and a fault must be reported with its line,
although columns are converted at once, because converting single lines would take seconds. Hashes
of prompts' blocks chain: a file in which a block follows two different ones is not a recording.
"""

import csv
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from cleave.simulator.trace import PromptBlocks, Trace

MAX_BYTES = 1 << 29
"""Larger files are rejected: a planner needs thousands of requests, not those of a year."""
MAX_REQUESTS = 5_000_000

PROMPT_NAMES = (
    *("prompttokens", "inputtokens", "contexttokens", "numprefilltokens", "inputlength"),
    *("promptlength", "promptsize", "requesttokens"),
)
"""Column names in normalised form: lower-case letters and digits only."""
OUTPUT_NAMES = (
    *("outputtokens", "generatedtokens", "completiontokens", "numdecodetokens", "outputlength"),
    *("outputsize", "tokensize", "responsetokens"),
)
ARRIVAL_NAMES = {
    **dict.fromkeys(("arrivalms", "timestampms"), 0.001),
    **dict.fromkeys(("arrivals", "arrivedat", "arrivaltimestamp", "arrival"), 1.0),
    **dict.fromkeys(("arrivaltime", "timestamp", "timestamps", "time"), 1.0),
}
"""Names of the arrival column -> seconds per unit. Any of them may contain dates and times."""

HASHES_NAME = "hashids"
"""A list for each request: hashes of its prompt's leading blocks, each chained to those before."""
BLOCK_TOKENS_NAME = "hashblocktokens"
"""Tokens per hashed block, the same in all lines."""
MOONCAKE_BLOCK_TOKENS = 512
"""Tokens per block of Mooncake's traces, which do not state it (FAST 2025)."""

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_MAX_VALUE_CHARACTERS = 40
_MAX_TOKENS = 10_000_000

Value = TypeVar("Value")


class HistoryError(ValueError):
    """The recording cannot be used; one line with file, line, value and remedy."""


class _Table(NamedTuple):
    """The cells of the file, not yet converted."""

    path: Path
    names: Sequence[str]
    """Column names."""
    rows: Sequence[Sequence[object]]
    """One row per request."""
    lines: Sequence[int]
    """Line number of each row, from 1."""

    def build_error(self, row: int, what: str) -> HistoryError:
        return HistoryError(f"{self.path}:{self.lines[row]}: {what}")


def read_trace(path: Path) -> Trace:
    """Read the requests of a CSV or JSONL file; the first one arrives at 0 ms.

    Accepts the columns of Azure's, Mooncake's, BurstGPT's and Vidur's traces and plain names
    (`arrival_s` or `arrival_ms`, `prompt_tokens`, `output_tokens`). Without a column of arrivals
    all requests arrive at once; it supplies lengths for a given rate. `hash_ids` in JSONL, as in
    Mooncake's traces, say which prompts begin alike. Raises HistoryError.
    """
    return _build_trace(_read_table(path))


def read_trace_with_columns(
    path: Path, *named: Sequence[str]
) -> tuple[Trace, list[NDArray[np.int64] | None]]:
    """The same with further columns of counts: for each of `named` the first name that the file
    has.

    Names are in normalised form: lower-case letters and digits only. None: no such column; an empty
    cell counts as 0. Raises HistoryError.
    """
    table = _read_table(path)
    plain = _normalize_names(table)
    indices = [_find_index(plain, names) for names in named]
    return _build_trace(table), [
        None if index is None else _read_optional_counts(table, index) for index in indices
    ]


def write_trace(path: Path, trace: Trace) -> None:
    """Write a CSV file that `read_trace` accepts, in whole microseconds. Raises HistoryError."""
    rows = zip(
        np.round(trace.arrival_ms / 1000, 6).tolist(),
        trace.prompt_tokens.tolist(),
        trace.output_tokens.tolist(),
        strict=True,
    )
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            file.write("arrival_s,prompt_tokens,output_tokens\n")
            file.writelines(f"{arrival},{prompt},{output}\n" for arrival, prompt, output in rows)
    except OSError as error:
        raise HistoryError(f"{path}: cannot be written: {error.strerror}") from error


def _read_table(path: Path) -> _Table:
    text = _read_text(path)
    is_json = path.suffix in _JSON_LINES or text.lstrip()[:1] == "{"
    table = _parse_json_lines(path, text) if is_json else _parse_csv(path, text)
    if not table.rows:
        raise HistoryError(f"{path}: holds no requests; record some traffic first")
    if len(table.rows) > MAX_REQUESTS:
        raise HistoryError(
            f"{path}: holds {len(table.rows):,} requests; {MAX_REQUESTS:,} can be read: cut it"
        )
    return table


def _build_trace(table: _Table) -> Trace:
    prompt, output, arrival = _find_columns(table)
    prompt_tokens = _read_tokens(table, prompt)
    return Trace(
        _read_arrivals(table, arrival) if arrival is not None else np.zeros(len(table.rows)),
        prompt_tokens,
        _read_tokens(table, output),
        blocks=_read_blocks(table, prompt_tokens),
    )


def _read_blocks(table: _Table, prompt_tokens: NDArray[np.int64]) -> PromptBlocks | None:
    """The blocks that prompts share; None: the file has no hashes."""
    plain = _normalize_names(table)
    if HASHES_NAME not in plain:
        return None
    block_tokens = _read_block_tokens(table, plain)
    column = plain.index(HASHES_NAME)
    # In order of appearance: the blocks of a prompt lie side by side in the simulator's memory.
    found: dict[object, int] = {}
    numbers: list[int] = []
    starts = [0]
    for at, row in enumerate(table.rows):
        hashes = row[column]
        name = table.names[column]
        if not isinstance(hashes, list) or not set(map(type, hashes)) <= {int, str}:
            what = f"{name} {_format_value(hashes)}: must be a list of numbers or texts"
            raise table.build_error(at, f"{what}; correct it, or drop the column")
        if len(hashes) > -(-int(prompt_tokens[at]) // block_tokens):
            what = f"{name} has {len(hashes)} hashes, more than {prompt_tokens[at]} prompt tokens"
            remedy = "state the tokens per hash as hash_block_tokens"
            raise table.build_error(at, f"{what} have blocks of {block_tokens}; {remedy}")
        numbers += [found.setdefault(each, len(found)) for each in hashes]
        starts.append(len(numbers))
    blocks = PromptBlocks(block_tokens, np.array(starts), np.array(numbers, np.int64), len(found))
    _check_chains(table, blocks, prompt_tokens)
    return blocks if found else None


def _read_block_tokens(table: _Table, plain: Sequence[str]) -> int:
    if BLOCK_TOKENS_NAME not in plain:
        return MOONCAKE_BLOCK_TOKENS
    column = plain.index(BLOCK_TOKENS_NAME)
    tokens = _read_tokens(table, column)
    other = np.flatnonzero(tokens != tokens[0])
    if len(other):
        at, name = int(other[0]), table.names[column]
        raise table.build_error(
            at, f"{name} {tokens[at]}: must be {tokens[0]} as in the lines above; hash all alike"
        )
    return int(tokens[0])


def _check_chains(table: _Table, blocks: PromptBlocks, prompt_tokens: NDArray[np.int64]) -> None:
    """Reject a block that follows different blocks, or has different lengths."""
    numbers, starts = blocks.numbers, blocks.starts
    owner = np.repeat(np.arange(len(prompt_tokens)), np.diff(starts))
    position = np.arange(len(numbers)) - starts[owner]
    previous = np.where(position > 0, np.roll(numbers, 1), -1)
    length = np.minimum(blocks.block_tokens, prompt_tokens[owner] - position * blocks.block_tokens)
    _, first = np.unique(numbers, return_index=True)
    seen = first[numbers] if len(numbers) else first
    wrong = np.flatnonzero((previous != previous[seen]) | (length != length[seen]))
    if len(wrong):
        at = int(wrong[0])
        column = _normalize_names(table).index(HASHES_NAME)
        value = table.rows[owner[at]][column][position[at]]
        what = (
            f"{table.names[column]}[{position[at]}] {_format_value(value)} is the hash of another"
        )
        remedy = "hash each block together with all blocks before it"
        raise table.build_error(
            int(owner[at]), f"{what} block in line {table.lines[owner[seen[at]]]}; {remedy}"
        )


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            # Not limited by its reported size: pipes and devices have none.
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise HistoryError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise HistoryError(f"{path}: has over {MAX_BYTES >> 20} MiB, which are not read: cut it")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise HistoryError(f"{path}: is not UTF-8 text (byte {error.start}); convert it") from error


def _parse_csv(path: Path, text: str) -> _Table:
    reader = csv.reader(StringIO(text, newline=""))
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        names = next(reader, [])
        for row in reader:
            if row:
                rows.append(row)
                lines.append(reader.line_num)
    except csv.Error as error:
        raise HistoryError(f"{path}:{reader.line_num}: not CSV: {error}") from error
    table = _Table(path, names, rows, lines)
    for at, row in enumerate(rows):
        if len(row) != len(names):
            fault = f"has {len(row)} of {len(names)} fields: complete or drop it"
            raise table.build_error(at, fault)
    return table


def _parse_json_lines(path: Path, text: str) -> _Table:
    decoder = msgspec.json.Decoder()
    objects: list[dict[str, object]] = []
    lines: list[int] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line or line.isspace():
            continue
        try:
            record = decoder.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise HistoryError(f"{path}:{number}: not a JSON object: {error}") from error
        if not isinstance(record, dict):
            raise HistoryError(f"{path}:{number}: not a JSON object: {_format_value(record)}")
        objects.append(record)
        lines.append(number)
    names = list(objects[0]) if objects else []
    # A request that lacks a key of the first one is reported when its column is converted.
    return _Table(path, names, [[each.get(name) for name in names] for each in objects], lines)


def _find_columns(table: _Table) -> tuple[int, int, tuple[int, float] | None]:
    """Indices of the prompt and output columns; index and unit of the arrival column."""
    plain = _normalize_names(table)
    prompt, output = _find_index(plain, PROMPT_NAMES), _find_index(plain, OUTPUT_NAMES)
    if prompt is None or output is None:
        missing = "prompt_tokens" if prompt is None else "output_tokens"
        named = ", ".join(map(_format_value, table.names)) or "none"
        raise HistoryError(
            f"{table.path}: no column {missing} (or a usual name for it) among {named}; rename one"
        )
    units = ((plain.index(name), unit) for name, unit in ARRIVAL_NAMES.items() if name in plain)
    column_index, unit = next(units, (None, 1.0))
    if column_index is None:
        return prompt, output, None
    # In Mooncake's traces `timestamp` is in milliseconds.
    is_mooncake = plain[prompt] == "inputlength" and plain[column_index] == "timestamp"
    return prompt, output, (column_index, 0.001 if is_mooncake else unit)


def _find_index(plain: Sequence[str], names: Sequence[str]) -> int | None:
    return next((plain.index(name) for name in names if name in plain), None)


def _normalize_names(table: _Table) -> list[str]:
    return ["".join(filter(str.isalnum, name)).lower() for name in table.names]


def _read_arrivals(table: _Table, column: tuple[int, float]) -> NDArray[np.float64]:
    """Milliseconds since the first arrival."""
    column_index, unit_s = column
    cells = [row[column_index] for row in table.rows]
    seconds = (
        _parse_dates(table, cells)
        if _is_date(cells[0])
        else _read_numbers(table, column_index) * unit_s
    )
    backwards = np.flatnonzero(np.diff(seconds) < 0)
    if len(backwards):
        at = int(backwards[0]) + 1
        remedy = f"sort by {table.names[column_index]}"
        fault = f"{_format_value(cells[at])} is before the request above; {remedy}"
        raise table.build_error(at, fault)
    arrivals_ms: NDArray[np.float64] = (seconds - seconds[0]) * 1000
    return arrivals_ms


def _is_date(cell: object) -> bool:
    # Numbers first, as 20240131 would parse as a date too.
    if not isinstance(cell, str) or _try_parse(float, cell) is not None:
        return False
    return _try_parse(datetime.fromisoformat, cell.strip()) is not None


def _parse_dates(table: _Table, cells: Sequence[object]) -> NDArray[np.float64]:
    """Seconds since the first date."""
    try:
        dates = [datetime.fromisoformat(str(cell).strip()) for cell in cells]
        offsets = [date - dates[0] for date in dates]
    except (ValueError, TypeError):
        first = datetime.fromisoformat(str(cells[0]).strip())
        at = next(
            at
            for at, cell in enumerate(cells)
            if (date := _try_parse(datetime.fromisoformat, str(cell).strip())) is None
            or (date.tzinfo is None) != (first.tzinfo is None)
        )
        fault = f"{_format_value(cells[at])}: no date and time as in line 2"
        raise table.build_error(at, fault) from None
    return np.array([each / timedelta(seconds=1) for each in offsets])


def _read_optional_counts(table: _Table, column_index: int) -> NDArray[np.int64]:
    """A column of counts in which an empty cell is 0."""
    rows = [
        [0 if at == column_index and cell in (None, "") else cell for at, cell in enumerate(row)]
        for row in table.rows
    ]
    return _read_tokens(table._replace(rows=rows), column_index, minimum=0)


def _read_tokens(table: _Table, column_index: int, minimum: int = 1) -> NDArray[np.int64]:
    numbers = _read_numbers(table, column_index)
    wrong = np.flatnonzero((numbers < minimum) | (numbers > _MAX_TOKENS) | (numbers % 1 != 0))
    if len(wrong):
        at = int(wrong[0])
        raise table.build_error(
            at,
            f"{table.names[column_index]} {_format_value(table.rows[at][column_index])}: must be a "
            f"whole number from {minimum} to {_MAX_TOKENS:,}; drop or correct the request",
        )
    return numbers.astype(np.int64)


def _read_numbers(table: _Table, column_index: int) -> NDArray[np.float64]:
    """Convert a column of finite numbers at once; search for the faulty line only if that fails."""
    cells = [row[column_index] for row in table.rows]
    try:
        # Exclude bool, which Python accepts as a number.
        odd = bool in set(map(type, cells))
        plain = [_parse_number(cell) for cell in cells] if odd else cells
        numbers = np.array(plain, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        numbers = np.array([_parse_number(cell) for cell in cells])
    wrong = np.flatnonzero(~np.isfinite(numbers))
    if len(wrong):
        at = int(wrong[0])
        what = f"{table.names[column_index]} {_format_value(cells[at])}"
        raise table.build_error(at, f"{what}: not a number; drop or correct the request")
    return numbers


def _parse_number(cell: object) -> float:
    is_plain = isinstance(cell, str | int | float) and not isinstance(cell, bool)
    number = _try_parse(float, cell) if is_plain else None
    return np.nan if number is None else number


def _try_parse(parse: Callable[[Any], Value], cell: object) -> Value | None:
    try:
        return parse(cell)
    except (ValueError, OverflowError):
        return None


def _format_value(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else text[: _MAX_VALUE_CHARACTERS - 3] + "..."
