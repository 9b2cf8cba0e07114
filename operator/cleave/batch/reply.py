"""What follows from the answer to a request of a batch. Pure. Used by `batch_run`."""

from dataclasses import dataclass
from enum import Enum, auto

import msgspec

MAX_TRIES = 5
"""Times that a request is sent which ends in errors of engines or connections."""
_REFUSED = (429, 503)
_FAILED = (408, 500, 502, 504)
_SUSPECT = "suspect_request"


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a request, or why there is none."""

    status: int = 0
    """0: no answer."""
    body: bytes = b""
    request_id: str = ""
    retry_after_s: float | None = None
    fault: str = ""
    """Why there is no answer."""
    is_unreachable: bool = False
    """There is no answer because the gateway could not be reached."""


class Verdict(Enum):
    """What to do with a request after an answer."""

    SUCCEEDED = auto()
    FAILED = auto()
    """It is not sent again."""
    REFUSED = auto()
    """The gateway has no capacity, or is away: it is sent again, as often as needed."""
    RETRY = auto()
    """It is sent again, `MAX_TRIES` times altogether."""
    UNAUTHORIZED = auto()
    """No request would be answered: the run ends."""


class _ErrorBody(msgspec.Struct):
    code: str | None = None


class _Refusal(msgspec.Struct):
    error: _ErrorBody = msgspec.field(default_factory=_ErrorBody)


class Usage(msgspec.Struct, frozen=True):
    """Tokens of an answer, by the names of both of OpenAI's APIs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _CountedAnswer(msgspec.Struct):
    usage: Usage | None = None


def classify_reply(reply: Reply, num_tries: int) -> Verdict:
    """What to do after the answer to the `num_tries`-th try, refusals not counted."""
    if 200 <= reply.status < 300:
        return Verdict.SUCCEEDED
    if reply.status in (401, 403):
        return Verdict.UNAUTHORIZED
    if reply.status in _REFUSED or reply.is_unreachable:
        return Verdict.REFUSED
    is_final = bool(reply.status) and reply.status not in _FAILED
    # A request that ends engines must not be given to more of them.
    if is_final or num_tries >= MAX_TRIES or read_error_code(reply.body) == _SUSPECT:
        return Verdict.FAILED
    return Verdict.RETRY


def read_error_code(body: bytes) -> str:
    """The code of an error; empty: none, or no error."""
    try:
        return msgspec.json.decode(body, type=_Refusal).error.code or ""
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def read_usage(body: bytes) -> Usage:
    """The tokens of an answer; zeros if it does not count them."""
    try:
        return msgspec.json.decode(body, type=_CountedAnswer).usage or Usage()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Usage()


def read_retry_after(value: str | None) -> float | None:
    """Seconds of a `retry-after`; None: absent, or a date."""
    return float(value) if value is not None and value.isdecimal() else None
