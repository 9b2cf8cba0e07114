"""When a line of a log was written, from its own time stamp. Pure.

Used by `cleave logs --since`. What is hard: a pod's log has lines of several programs. Cleave's own
begin with a date, or with it as JSON; vLLM's have month and day only; lines of libraries, and all
but the first of a traceback, have none and belong to the line before them.
"""

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta

_ENGINE = r"(?:\[engine\] )?"
_TEXT = re.compile(rf"{_ENGINE}(\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}}) ")
"""`2026-11-26 23:44:49,947 INFO ...`, local time: cleave.logs.TextFormatter."""
_JSON = re.compile(rf'{_ENGINE}{{"time": "(\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{{3}})Z"')
"""cleave.logs.JsonFormatter, UTC."""
_VLLM = re.compile(
    rf"{_ENGINE}(?:\([^)]*\) )?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (\d\d-\d\d \d\d:\d\d:\d\d) "
)
"""`INFO 11-26 23:45:19 [file.py:1] ...`, local time: vLLM's formatter."""
_SLACK = timedelta(days=1)
"""A time without a year that lies further in the future is of the year before."""


def find_time(line: str, now: datetime) -> datetime | None:
    """When the line was written; None: it has no time stamp. `now`: aware; gives the year."""
    try:
        if (found := _TEXT.match(line)) is not None:
            return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").astimezone()
        if (found := _JSON.match(line)) is not None:
            return datetime.fromisoformat(found[1]).replace(tzinfo=UTC)
        if (found := _VLLM.match(line)) is not None:
            return _complete_year(found[1], now)
    except ValueError:
        return None  # It only looks like a time.
    return None


def select_since(lines: Iterable[str], since: datetime, now: datetime) -> Iterator[str]:
    """The lines from the first that was written at `since` or later, both aware."""
    has_begun = False
    for line in lines:
        if not has_begun:
            written_at = find_time(line, now)
            has_begun = written_at is not None and written_at >= since
        if has_begun:
            yield line


def _complete_year(text: str, now: datetime) -> datetime:
    """The latest such month and day that is not in the future."""
    for year in (now.year + 1, now.year, now.year - 1):
        # February 29 exists in some years only.
        try:
            found = datetime.strptime(f"{year}-{text}", "%Y-%m-%d %H:%M:%S").astimezone()
        except ValueError:
            continue
        if found <= now + _SLACK:
            return found
    raise ValueError(f"{text} is no date of these years")
