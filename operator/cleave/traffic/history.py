"""Reads recorded requests from a file: arrival times and lengths.

Called for `spec.workload.trace` and by `cleave workload`. What is hard: files come from many tools,
so nothing about them is certain. What can be read in one way only is read; what was assumed is a
remark of the trace; the rest is an error with line, value and remedy.
"""

from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cleave.simulator.trace import Trace
from cleave.traffic.recordings.arrival_times import read_arrivals
from cleave.traffic.recordings.failed_requests import find_failed
from cleave.traffic.recordings.history_error import HistoryError
from cleave.traffic.recordings.prompt_blocks import read_blocks
from cleave.traffic.recordings.request_fields import (
    PUBLISHED_FORMATS,
    FieldRole,
    PublishedFormat,
    list_words,
    normalize,
)
from cleave.traffic.recordings.request_numbers import (
    find_tokens,
    read_tokens,
    select_separate,
    to_numbers,
)
from cleave.traffic.recordings.request_table import RequestTable, format_value, read_table

_PROMPT = (FieldRole.PROMPT, FieldRole.PROMPT_PART)
_OUTPUT = (FieldRole.OUTPUT, FieldRole.OUTPUT_PART)
_TEXTS = list_words(
    """
    conversations conversation messages prompt text content input output response completion
    requestinputs responseoutputs payload payloads body
    """
)
_SUMMARIES = ("totalinput", "totaloutput", "inputsequencelength", "outputsequencelength", "mean")
_SHOWN_NAMES, _SHOWN_MODELS = 12, 3


def read_trace(path: Path) -> Trace:
    """Read the requests of a CSV or JSON file; the first one arrives at 0 ms.

    Accepts the columns of Azure's, Mooncake's, BurstGPT's and Vidur's traces, plain names
    (`arrival_s` or `arrival_ms`, `prompt_tokens`, `output_tokens`), and what load generators and
    gateways write (`request_fields`). Without a column of arrivals all requests arrive at once; it
    supplies lengths for a given rate. `hash_ids`, as in Mooncake's traces, say which prompts begin
    alike. Failed requests are left out. Raises HistoryError.
    """
    table = read_table(path)
    _check_columns(table)
    failed = find_failed(table)
    if failed.rows.any():
        table = table.take(np.flatnonzero(~failed.rows))
    table, arrival_ms, arrival_remarks = _sort_by_arrival(table)
    prompt_tokens = read_tokens(table, find_tokens(table, *_PROMPT))
    output_tokens = read_tokens(table, find_tokens(table, *_OUTPUT))
    blocks, block_remarks = read_blocks(table, prompt_tokens, _find_published(table))
    remarks = *failed.remarks, *arrival_remarks, *_describe_separate(table), *block_remarks
    remarks += _describe_models(table)
    return Trace(arrival_ms, prompt_tokens, output_tokens, blocks=blocks, remarks=remarks)


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


def _check_columns(table: RequestTable) -> None:
    """Raise HistoryError unless the tokens of single requests are known."""
    for field in table.select(FieldRole.REQUESTS):
        numbers = to_numbers(table.cells[field.path])
        many = np.flatnonzero(~np.isnan(numbers) & (numbers != 1))
        if len(many):
            at = int(many[0])
            what = f"{field.path} {format_value(table.cells[field.path][at])}: sums requests up"
            raise table.build_error(at, f"{what}; write one line for each request")
    for field in table.select(FieldRole.TOKEN_UNIT):
        for at, cell in enumerate(table.cells[field.path]):
            if str(cell or "tokens").lower() not in ("tokens", "token"):
                what = f"{field.path} {format_value(cell)}: must be tokens"
                raise table.build_error(at, f"{what}; count them with the model's tokenizer")
    for name, roles in (("prompt_tokens", _PROMPT), ("output_tokens", _OUTPUT)):
        if not table.select(*roles):
            raise HistoryError(f"{table.path}: {_explain_missing(table, name)}")


def _explain_missing(table: RequestTable, missing: str) -> str:
    names = [format_value(name) for name in table.names]
    shown = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
    what = f"no column {missing} (or a usual name for it) among {shown or 'none'}"
    plain = {normalize(part) for name in table.names for part in name.split(".")}
    if any(name.startswith(_SUMMARIES) for name in plain):
        return f"{what}; write the details of each request, not a summary of all"
    if not _TEXTS.isdisjoint(plain):
        return f"{what}; texts are not counted: count tokens with the model's tokenizer"
    return f"{what}; rename one"


def _sort_by_arrival(
    table: RequestTable,
) -> tuple[RequestTable, NDArray[np.float64], tuple[str, ...]]:
    """The requests in order of arrival, their times in ms, and remarks. Raises HistoryError."""
    fields = [
        field
        for field in sorted(table.select(FieldRole.ARRIVAL), key=lambda each: each.rank)
        if any(cell not in (None, "") for cell in table.cells[field.path])
    ]
    if not fields:
        return table, np.zeros(len(table)), ()
    field, *others = fields
    published = _find_published(table) if normalize(field.path) == "timestamp" else None
    arrivals = read_arrivals(table, field, published)
    remarks = arrivals.remarks
    if others:
        names = ", ".join(each.path for each in others)
        remarks += (f"requests arrived at {field.path}, not at {names}",)
    backwards = np.flatnonzero(np.diff(arrivals.ms) < 0)
    if not len(backwards):
        return table, arrivals.ms, remarks
    if not (arrivals.is_clock or field.is_start):
        at = int(backwards[0]) + 1
        fault = f"{format_value(table.cells[field.path][at])} is before the request above"
        raise table.build_error(at, f"{fault}; sort by {field.path}")
    order = np.argsort(arrivals.ms, kind="stable")
    remarks += (f"{len(backwards):,} requests were not in order of {field.path}: all are sorted",)
    return table.take(order), arrivals.ms[order] - arrivals.ms[order[0]], remarks


def _find_published(table: RequestTable) -> PublishedFormat | None:
    names = set(map(normalize, table.names))
    return next((each for each in PUBLISHED_FORMATS if names.issuperset(each.columns)), None)


def _describe_separate(table: RequestTable) -> list[str]:
    return [
        f"{path} does not count {', '.join(names)}, which are added"
        for path in (field.path for field in table.select(FieldRole.PROMPT, FieldRole.OUTPUT))
        if (names := [each.path for each in select_separate(table, path)])
    ]


def _describe_models(table: RequestTable) -> tuple[str, ...]:
    """A remark where requests of several models count as one's traffic."""
    for field in table.select(FieldRole.MODEL):
        counts = Counter(str(cell) for cell in table.cells[field.path] if cell not in (None, ""))
        if len(counts) > 1:
            most = (f"{format_value(name)} {n:,}" for name, n in counts.most_common(_SHOWN_MODELS))
            which = f"{field.path} names {len(counts)} models ({', '.join(most)})"
            return (f"{which}: requests of all count; keep those of one",)
    return ()
