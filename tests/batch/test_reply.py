"""What follows from the answer to a request of a batch."""

import pytest

from cleave.batch.reply import (
    MAX_TRIES,
    Reply,
    Usage,
    Verdict,
    classify_reply,
    read_error_code,
    read_retry_after,
    read_usage,
)

SUSPECT = b'{"error": {"code": "suspect_request", "message": ""}}'


@pytest.mark.parametrize(
    ("reply", "num_tries", "verdict"),
    [
        (Reply(200), 1, Verdict.SUCCEEDED),
        (Reply(400), 1, Verdict.FAILED),
        (Reply(404), 1, Verdict.FAILED),
        (Reply(302), 1, Verdict.FAILED),
        (Reply(401), 1, Verdict.UNAUTHORIZED),
        (Reply(429), 1, Verdict.REFUSED),
        (Reply(503), 99, Verdict.REFUSED),
        (Reply(fault="refused", is_unreachable=True), 99, Verdict.REFUSED),
        (Reply(500), 1, Verdict.RETRY),
        (Reply(502), MAX_TRIES - 1, Verdict.RETRY),
        (Reply(504), MAX_TRIES, Verdict.FAILED),
        (Reply(502, SUSPECT), 1, Verdict.FAILED),
        (Reply(fault="broke"), 1, Verdict.RETRY),
        (Reply(fault="broke"), MAX_TRIES, Verdict.FAILED),
    ],
    ids=str,
)
def test_a_verdict_follows_from_status_and_tries(reply, num_tries, verdict) -> None:
    assert classify_reply(reply, num_tries) is verdict


@pytest.mark.parametrize(
    ("body", "code"), [(SUSPECT, "suspect_request"), (b'{"error": {"code": null}}', ""),
                       (b"{}", ""), (b"<html>", ""), (b'{"error": "x"}', "")],
)  # fmt: skip
def test_codes_are_read_from_errors_only(body, code) -> None:
    assert read_error_code(body) == code


def test_tokens_are_read_from_both_apis() -> None:
    assert read_usage(b'{"usage": {"prompt_tokens": 3, "completion_tokens": 2}}') == Usage(3, 2)
    responses = read_usage(b'{"usage": {"input_tokens": 3, "output_tokens": 2}}')
    assert (responses.input_tokens, responses.output_tokens) == (3, 2)
    assert read_usage(b'{"usage": null}') == read_usage(b"x") == Usage()


@pytest.mark.parametrize(("value", "seconds"), [("7", 7.0), (None, None), ("Fri, 1 Jan", None)])
def test_a_delay_is_read_in_seconds_only(value, seconds) -> None:
    assert read_retry_after(value) == seconds
