"""Which requests of a recording failed: those are left out, counted and mentioned.

Called by `history`. What is hard: logs say it in many ways, by a status, an error or no output,
and a word that is not known here must not pass in silence.
"""

import re
from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cleave.traffic.recordings.history_error import HistoryError
from cleave.traffic.recordings.request_fields import Field, FieldRole, list_words, normalize
from cleave.traffic.recordings.request_numbers import find_tokens, merge_tokens
from cleave.traffic.recordings.request_table import RequestTable, format_value

_SERVED = list_words(
    """
    ok success successful succeeded completed complete done finished stop length toolcalls
    toolcall functioncall endturn maxtokens tooluse incomplete default debug info notice warning
    warn none null normal
    """
)
_FAILED = list_words(
    """
    error errored fail failed failure cancelled canceled aborted abort timeout timedout rejected
    unfinished unavailable exception shed broken invalid critical fatal
    """
)
_NO_REQUESTS = list_words(
    """
    span event trace agent tool chain retriever guardrail evaluator
    """
)
"""Langfuse's kinds of observations that are no calls of a model."""
_NOTHING = frozenset(("", "0", "none", "null", "false", "no", "nan", "[]", "{}"))


class FailedRequests(NamedTuple):
    """Requests that were not served."""

    rows: NDArray[np.bool_]
    """Whether a request is one of them."""
    remarks: tuple[str, ...]


def find_failed(table: RequestTable) -> FailedRequests:
    """The requests that did not bring an output, and what to say about them. Raises HistoryError
    if none is left."""
    reasons: Counter[str] = Counter()
    rows, remarks = np.zeros(len(table), bool), []
    for field in table.select(FieldRole.KIND, FieldRole.STATUS, FieldRole.ERROR, FieldRole.SUCCESS):
        verdicts = [_is_failure(field, cell) for cell in table.cells[field.path]]
        failed = np.array([each is True for each in verdicts]) & ~rows
        reasons[f"by {field.path}"] += int(failed.sum())
        rows |= failed
        unknown = [at for at, each in enumerate(verdicts) if each is None]
        if unknown:
            value = format_value(table.cells[field.path][unknown[0]])
            what = f"{field.path} {value} is not known to be a failure"
            remarks.append(f"{what}: {len(unknown):,} such requests count as served")
    for path, is_empty in _find_empty(table).items():
        failed = is_empty & ~rows
        reasons[f"with {path} 0"] += int(failed.sum())
        rows |= failed
    if rows.any():
        causes = ", ".join(f"{num:,} {reason}" for reason, num in reasons.items() if num)
        what = f"{rows.sum():,} of {len(table):,} requests failed or generated nothing ({causes})"
        if rows.all():
            raise HistoryError(f"{table.path}: {what}; record requests that are served")
        remarks.append(f"{what} and are left out, also of the rate")
    return FailedRequests(rows, tuple(remarks))


def _find_empty(table: RequestTable) -> dict[str, NDArray[np.bool_]]:
    """Requests without output, by the field that says so."""
    found = find_tokens(table, FieldRole.OUTPUT, FieldRole.OUTPUT_PART)
    return {next(iter(found)): merge_tokens(found) == 0} if found else {}


def _is_failure(field: Field, cell: object) -> bool | None:
    """Whether the request failed; None: the value is not known."""
    text = "" if cell is None else str(cell).strip()
    word = normalize(text)
    if field.role is FieldRole.KIND:
        return word in _NO_REQUESTS
    is_nothing = text.lower() in _NOTHING
    if field.role is FieldRole.ERROR:
        return not is_nothing
    if field.role is FieldRole.SUCCESS:
        return bool(text) and is_nothing
    if not text or word in _SERVED:
        return False
    code = re.match(r"[1-5]\d\d(?!\d)", text)
    if code is not None:
        return int(code[0]) >= 400
    return True if word in _FAILED else None
