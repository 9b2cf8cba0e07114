"""Time stamps of Cleave's text and JSON lines, and of vLLM's, whose year is missing."""

import logging
from datetime import UTC, datetime, timedelta

import pytest

from cleave import logs
from cleave.local.kubelet.line_times import find_time, select_since

NOW = datetime(2026, 11, 27, 12).astimezone()


@pytest.mark.parametrize("prefix", ["", "[engine] "])
@pytest.mark.parametrize("formatter", [logs.TextFormatter(), logs.JsonFormatter()])
def test_lines_of_cleaves_own_formats_have_the_time_of_their_record(prefix, formatter) -> None:
    record = logging.LogRecord("a", logging.INFO, "a.py", 1, "hello", None, None)
    found = find_time(prefix + formatter.format(record), NOW)
    assert abs(found.timestamp() - record.created) < 0.002


@pytest.mark.parametrize("prefix", ["", "[engine] ", "[engine] (EngineCore pid=9560) "])
def test_lines_of_vllm_get_the_year(prefix: str) -> None:
    line = prefix + "INFO 11-26 23:45:23 [core.py:133] Initializing"
    assert find_time(line, NOW) == datetime(2026, 11, 26, 23, 45, 23).astimezone()


@pytest.mark.parametrize(
    ("day", "now", "year"),
    [
        ("12-31", datetime(2027, 1, 1), 2026),
        ("01-01", datetime(2026, 12, 31, 23), 2027),
        ("02-29", datetime(2028, 3, 1), 2028),
        ("02-29", datetime(2029, 1, 1), 2028),
    ],
)
def test_the_year_is_the_one_that_is_nearest_before_now(day: str, now: datetime, year: int) -> None:
    assert find_time(f"INFO {day} 10:00:00 [a.py:1] b", now.astimezone()).year == year


@pytest.mark.parametrize(
    "line",
    ["", "Traceback (most recent call last):", "2026-13-41 25:00:00,000 INFO a: b",
     "INFO 02-30 10:00:00 [a.py:1] b", "[engine] Triton is installed",
     "x 2026-11-27 10:00:00,000 "],
)  # fmt: skip
def test_other_lines_have_no_time(line: str) -> None:
    assert find_time(line, NOW) is None


def test_lines_without_a_time_belong_to_the_line_before() -> None:
    moments = [NOW.astimezone(UTC) - timedelta(minutes=minutes) for minutes in (30, 20, 10)]
    old, middle, new = (f'{{"time": "{each:%Y-%m-%dT%H:%M:%S}.000Z"}}' for each in moments)
    lines = ["before any time", old, "of old", middle, "of middle", new]
    assert list(select_since(lines, NOW - timedelta(minutes=20), NOW)) == lines[3:]
    assert list(select_since(lines, NOW, NOW)) == []
