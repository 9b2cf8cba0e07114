"""Cron expressions: refused where `kubectl apply` meets the webhook, or a file the command line."""

import pytest
from pydantic import ValidationError

from cleave.api.scaling import ScheduledPeak


@pytest.mark.parametrize(
    ("cron", "reason"),
    [
        ("0 25 * * *", "Bad hour"),
        ("0 9 30 2 *", "Bad day-of-month"),
        ("0 9 * * noday", "Bad day-of-week"),
    ],
)
def test_a_moment_that_never_comes_is_refused_in_words(cron: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=f"must be a cron expression .+{reason}"):
        ScheduledPeak(cron=cron, duration_s=60, rate=1)


def test_crontab_expressions_are_accepted() -> None:
    for cron in ("*/15 8-17 * * 1-5", "0 9 1,15 * *", "30 6 * jan-mar sun"):
        assert ScheduledPeak(cron=cron, duration_s=60, rate=1).cron == cron
