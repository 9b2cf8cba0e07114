"""The fields of recorded requests that mean something here, from a CSV or JSON file.

Called by `history`. What is hard: files have hundreds of MiB, mostly texts, so lines are read one
after another and only known fields stay in memory; a field may begin in a later line; and JSON
comes as lines, as one array, or as the document of a tool, with the requests somewhere inside.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from cleave.traffic.recordings.history_error import HistoryError
from cleave.traffic.recordings.request_fields import Field, FieldRole, classify_field, normalize

MAX_BYTES = 1 << 29
"""Larger files are rejected: a planner needs thousands of requests, not those of a year."""
MAX_DOCUMENT_BYTES = 1 << 28
"""Of one JSON value, which has to be in memory as a whole."""
MAX_REQUESTS = 5_000_000

_JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
_DELIMITERS = ",;\t|"
_MAX_VALUE_CHARACTERS = 40
_MAX_DEPTH = 6
_MAX_NAMES = 100
"""Names that are remembered for error messages."""
_MAX_FIELDS = 64
_MAX_LISTS = 1000
"""Elements of a list in which lists of requests are searched."""
_BY_OUTCOME = {
    "successful": "success",
    "completed": "success",
    "errored": "error",
    "failed": "error",
    "incomplete": "unfinished",
}
"""Names of guidellm's lists of requests -> the status of those in them."""
_LINES = "write one JSON object per line and request"


@dataclass(slots=True)
class RequestTable:
    """The cells of all known fields, not yet converted."""

    path: Path
    unit: str = ":"
    """Between the file's name and the number of a line, or of a request in a JSON document."""
    fields: dict[str, Field] = field(default_factory=dict)
    """Known fields by path, in order of appearance."""
    cells: dict[str, list[object]] = field(default_factory=dict)
    """By path one cell per request; None: it has no such field."""
    lines: list[int] = field(default_factory=list)
    """Number of each request's line, from 1."""
    names: dict[str, None] = field(default_factory=dict)
    """Paths of the first fields, known or not, in order of appearance."""

    def __len__(self) -> int:
        return len(self.lines)

    def build_error(self, row: int, what: str) -> HistoryError:
        """An error about one request."""
        return HistoryError(f"{self.path}{self.unit}{self.lines[row]}: {what}")

    def select(self, *roles: FieldRole) -> list[Field]:
        """The fields of these roles, in order of appearance."""
        return [each for each in self.fields.values() if each.role in roles]

    def take(self, order: NDArray[np.int64]) -> "RequestTable":
        """The requests at these indices, in this order."""
        rows = order.tolist()
        cells = {path: [column[at] for at in rows] for path, column in self.cells.items()}
        return replace(self, cells=cells, lines=[self.lines[at] for at in rows])

    def add(self, line: int, record: Mapping[str, object]) -> None:
        """Append a request. Raises HistoryError."""
        if len(self.lines) >= MAX_REQUESTS:
            raise HistoryError(
                f"{self.path}: holds over {MAX_REQUESTS:,} requests, which are not read: cut it"
            )
        num = len(self.lines)
        for path, value in _walk_fields(record):
            column = self.cells.get(path)
            if column is None and path not in self.names:
                column = self._add_field(path)
            if column is not None:
                if len(column) < num:
                    column.extend([None] * (num - len(column)))
                column.append(value)
        self.lines.append(line)

    def _add_field(self, path: str) -> list[object] | None:
        """Its cells; None: it is not known. Raises HistoryError."""
        if len(self.names) < _MAX_NAMES:
            self.names[path] = None
        known = classify_field(path)
        if known is None:
            return None
        if len(self.fields) >= _MAX_FIELDS:
            what = f"over {_MAX_FIELDS} fields may be tokens, times or errors"
            raise HistoryError(f"{self.path}: {what}, such as {path!r}; {_LINES}")
        self.fields[path] = known
        return self.cells.setdefault(path, [])


def format_value(value: object) -> str:
    """It as an error shows it."""
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else text[: _MAX_VALUE_CHARACTERS - 3] + "..."


def read_table(path: Path) -> RequestTable:
    """Read the known fields of all requests. Raises HistoryError."""
    try:
        # Read once, from front to end: pipes and devices can be read, too.
        with path.open("rb") as file:
            start = file.peek().removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
            is_json = path.suffix in _JSON_ENDINGS or start in (b"{", b"[")
            table = RequestTable(path)
            table = _read_json(table, file, start) if is_json else _read_csv(table, file)
    except OSError as error:
        raise HistoryError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise HistoryError(f"{path}: is not UTF-8 text; convert it") from error
    if not table.lines:
        raise HistoryError(f"{path}: holds no requests; record some traffic first")
    for column in table.cells.values():
        column.extend([None] * (len(table) - len(column)))
    return table


def _read_lines(path: Path, file: BufferedReader) -> Iterator[bytes]:
    read = 0
    while line := file.readline(MAX_DOCUMENT_BYTES + 1):
        is_first, read = read == 0, read + len(line)
        if read > MAX_BYTES:
            raise HistoryError(
                f"{path}: has over {MAX_BYTES >> 20} MiB, which are not read: cut it"
            )
        if len(line) > MAX_DOCUMENT_BYTES:
            size = f"{MAX_DOCUMENT_BYTES >> 20} MiB"
            raise HistoryError(f"{path}: a line has over {size}; {_LINES}")
        yield line.removeprefix(b"\xef\xbb\xbf") if is_first else line


def _walk_fields(
    record: Mapping[str, object], prefix: str = "", depth: int = 1
) -> Iterable[tuple[str, object]]:
    for key, value in record.items():
        if isinstance(value, dict) and value and depth < _MAX_DEPTH:
            yield from _walk_fields(value, f"{prefix}{key}.", depth + 1)
        else:
            yield prefix + key, value


def _has_tokens(paths: Iterable[str]) -> bool:
    fields = [classify_field(path) for path in paths]
    roles = {each.role for each in fields if each is not None}
    has_prompt = FieldRole.PROMPT in roles or FieldRole.PROMPT_PART in roles
    return has_prompt and (FieldRole.OUTPUT in roles or FieldRole.OUTPUT_PART in roles)


def _is_request(record: Mapping[str, object]) -> bool:
    return _has_tokens(path for path, each in _walk_fields(record) if not isinstance(each, list))


def _is_sum(records: Sequence[object]) -> bool:
    paths = [path for each in records if isinstance(each, dict) for path, _ in _walk_fields(each)]
    fields = [classify_field(path) for path in paths]
    return any(each is not None and each.role is FieldRole.REQUESTS for each in fields)


def _read_csv(table: RequestTable, file: BufferedReader) -> RequestTable:
    texts = (line.decode() for line in _read_lines(table.path, file))
    first = next(texts, "")
    delimiter = max(_DELIMITERS, key=first.count)
    reader = csv.reader(chain([first], texts), delimiter=delimiter)
    try:
        names = next(reader, [])
        if twice := [name for at, name in enumerate(names) if name and name in names[:at]]:
            raise HistoryError(f"{table.path}: has two columns {twice[0]!r}; rename or drop one")
        nested = [at for at, name in enumerate(names) if normalize(name) == "usagedetails"]
        for row in reader:
            if len(row) == len(names):
                cells: list[object] = [*row]
                for at in nested:
                    cells[at] = _decode_cell(row[at])
                table.add(reader.line_num, dict(zip(names, cells, strict=True)))
            elif row:
                what = f"has {len(row)} of {len(names)} fields: complete or drop it"
                raise HistoryError(f"{table.path}:{reader.line_num}: {what}")
    except csv.Error as error:
        raise HistoryError(
            f"{table.path}:{reader.line_num}: not CSV: {error}; drop texts"
        ) from error
    return table


def _decode_cell(cell: str) -> object:
    """A cell that contains an object, or the cell."""
    try:
        return msgspec.json.decode(cell) if cell.startswith("{") else cell
    except msgspec.DecodeError:
        return cell


def _read_json(table: RequestTable, file: BufferedReader, start: bytes) -> RequestTable:
    lines = enumerate(_read_lines(table.path, file), 1)
    for number, line in lines:
        if line.isspace():
            continue
        record, error = _decode(line)
        is_part = isinstance(record, list) or error is not None
        if is_part and not table.lines and start in (b"{", b"["):
            return _read_document(table, line, (rest for _, rest in lines))
        if not isinstance(record, dict):
            what = error or format_value(record)
            raise HistoryError(f"{table.path}:{number}: not a JSON object: {what}; {_LINES}")
        lists = [] if _is_request(record) else list(_find_lists(table.path, record, "."))
        if not lists:
            table.add(number, record)
        elif table.lines or any(not rest.isspace() for _, rest in lines):
            what = f"line {number} holds a list of requests, but is not the only line"
            raise HistoryError(f"{table.path}: {what}; {_LINES}")
        else:
            return _add_lists(table, lists)
    return table


def _decode(text: bytes) -> tuple[object, str | None]:
    """The value, or the error."""
    try:
        return msgspec.json.decode(text), None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return None, str(error)


def _read_document(table: RequestTable, first: bytes, rest: Iterable[bytes]) -> RequestTable:
    """One value that spans all lines: an array, or the document of a tool."""
    text = bytearray(first)
    for line in rest:
        text += line
        if len(text) > MAX_DOCUMENT_BYTES:
            size = f"{MAX_DOCUMENT_BYTES >> 20} MiB"
            raise HistoryError(f"{table.path}: is one JSON value of over {size}; {_LINES}")
    document, error = _decode(bytes(text))
    if error is not None:
        what = f"not a JSON object: {error}"
        raise HistoryError(
            f"{table.path}:1: {what}, nor is the file one JSON value; {_LINES} (jq -c .)"
        )
    lists = list(_find_lists(table.path, document, "."))
    if not lists:  # `history` names its fields
        records = document if isinstance(document, list) else [document]
        lists = [_RequestList(".", records)]
    return _add_lists(table, lists)


class _RequestList(NamedTuple):
    """A list of requests inside a JSON value."""

    where: str
    """Its path as jq has it."""
    records: Sequence[object]


def _find_lists(path: Path, value: object, where: str, depth: int = 0) -> Iterator[_RequestList]:
    """The lists of requests in a JSON value. Raises HistoryError."""
    if isinstance(value, list):
        if any(isinstance(each, dict) and _is_request(each) for each in value):
            yield _RequestList(where, value)
        elif depth < _MAX_DEPTH:
            for at, each in enumerate(value[:_MAX_LISTS]):
                yield from _find_lists(path, each, f"{where}[{at}]", depth + 1)
    elif isinstance(value, dict):
        if columns := _find_columns(path, value):
            yield _RequestList(where, columns)
        elif depth < _MAX_DEPTH:
            _check_totals(path, value)
            for key, each in value.items():
                inner = f"{where.rstrip('.')}.{key}"
                yield from _find_lists(path, each, inner, depth + 1)


def _find_columns(path: Path, value: Mapping[str, object]) -> list[object]:
    """Requests whose fields are lists, as in the results of vLLM's benchmark; empty: there are
    none. Raises HistoryError."""
    columns = {key: each for key, each in value.items() if isinstance(each, list)}
    if not _has_tokens(columns):
        return []
    sizes = {key: len(columns[key]) for key in columns if classify_field(key) is not None}
    (first, size), *more = sizes.items()
    for key, other in more:
        if other != size:
            what = f"{first} has {size:,} values and {key} {other:,}"
            raise HistoryError(f"{path}: {what}; each needs one per request")
    known = {key: columns[key] for key in sizes}
    return [dict(zip(known, row, strict=True)) for row in zip(*known.values(), strict=True)]


def _check_totals(path: Path, value: Mapping[str, object]) -> None:
    """Reject a part of guidellm's requests: their times do not show the rate."""
    totals, requests = value.get("request_totals"), value.get("requests")
    if isinstance(totals, dict) and isinstance(requests, dict):
        held, all_ = requests.get("successful"), totals.get("successful")
        if isinstance(held, list) and isinstance(all_, int) and len(held) != all_:
            what = f"holds {len(held):,} of {all_:,} requests (request_totals)"
            raise HistoryError(f"{path}: {what}; write them all (guidellm's --sample-requests)")


def _add_lists(table: RequestTable, lists: Sequence[_RequestList]) -> RequestTable:
    """Add the requests of one list, or of lists that only the outcome separates. Raises
    HistoryError."""
    parents = {each.where.rpartition(".")[0] for each in lists}
    outcomes = [_BY_OUTCOME.get(each.where.rpartition(".")[2]) for each in lists]
    if len(lists) > 1 and (len(parents) > 1 or None in outcomes):
        if any(_is_sum(each.records) for each in lists):
            what = "sums requests up, in several lists"
            raise HistoryError(f"{table.path}: {what}; write one JSON object for each request")
        some = ", ".join(each.where for each in lists[:4])
        what = f"holds {len(lists)} lists of requests ({some}{', ...' if len(lists) > 4 else ''})"
        hint = f"such as with jq -c '{lists[0].where}[]'"
        raise HistoryError(f"{table.path}: {what}; write the requests of one, {hint}")
    table.unit = ": request "
    for (where, records), outcome in zip(lists, outcomes, strict=True):
        for record in records:
            if not isinstance(record, dict):
                number = len(table) + 1
                what = f"request {number} is not a JSON object: {format_value(record)}"
                raise HistoryError(f"{table.path}: {what} in {where}; {_LINES}")
            marked = record if outcome is None else {**record, "status": outcome}
            table.add(len(table) + 1, marked)
    return table
