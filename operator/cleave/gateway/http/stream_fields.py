"""What the gateway requests of a stream for itself: what counts its tokens. Pure.

Used when completion requests are parsed. Tenants pay for tokens, so they must be known exactly, at
any moment, however an engine divides them into events. A stream of one choice gets ids of tokens,
which cost the engine least and which a continuation needs as well; others get running usage, as the
ids of a prompt would come once for each choice. What the client itself requested stays in its
stream, everything else is removed from it.
"""

import contextlib

import msgspec

from cleave.gateway.http.errors import build_bad_request

Fields = dict[str, msgspec.Raw]

RETURN_IDS_KEY = "return_token_ids"
OPTIONS_KEY = "stream_options"
INTERVAL_KEY = "stream_interval"
MAX_INTERVAL = 128
"""Tokens in one event. Beyond that an event saves nothing, while a client waits for seconds and
what it has received cannot be continued in between."""
MAX_REPORTED_PROMPT = 200_000
"""Tokens of a prompt, estimated, whose ids are requested: they come in one event, of at most
`MAX_PROMPT_IDS_BYTES`, with about seven bytes each."""
_MAX_OPTIONS_BYTES = 1_024
_MAX_INTEGER_BYTES = 32
_MAX_CHOICES = 1 << 17
_USAGE_KEYS = ("include_usage", "continuous_usage_stats")

_TRUE = msgspec.Raw(b"true")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_decode_int = msgspec.json.Decoder(int | None).decode


class TokenReport:
    """How the tokens of one completion are reported, and what of it the client requested."""

    __slots__ = (
        "has_ids", "interval", "num_choices", "num_prompts", "shows_ids", "shows_running_usage",
        "shows_usage",
    )  # fmt: skip

    def __init__(
        self,
        *,
        has_ids: bool,
        shows_ids: bool = False,
        shows_usage: bool = False,
        shows_running_usage: bool = False,
        num_choices: int = 1,
        num_prompts: int = 1,
        interval: int = 1,
    ) -> None:
        self.has_ids = has_ids
        """Each event of a stream has the ids of its tokens; otherwise it has running usage."""
        self.shows_ids = shows_ids
        self.shows_usage = shows_usage
        self.shows_running_usage = shows_running_usage
        self.num_choices = num_choices
        """Of all prompts together."""
        self.num_prompts = num_prompts
        self.interval = interval
        """Tokens that one event may wait for."""


_PLAIN_STREAM = TokenReport(has_ids=True)
_PLAIN_ANSWER = TokenReport(has_ids=False)
_OWN_KEYS = frozenset(("n", INTERVAL_KEY, OPTIONS_KEY, RETURN_IDS_KEY, "include_reasoning", "echo"))


def request_report(
    fields: Fields, num_prompts: int, prompt_tokens: int = 0, *, stream: bool
) -> TokenReport:
    """Limit the tokens of an event, and request what counts those of a stream; changes `fields`.
    `prompt_tokens`: estimated. Raises GatewayError (400)."""
    is_plain = num_prompts == 1 and _OWN_KEYS.isdisjoint(fields)
    if is_plain and not stream:
        return _PLAIN_ANSWER
    is_short = prompt_tokens <= MAX_REPORTED_PROMPT
    if is_plain and is_short:
        fields[RETURN_IDS_KEY] = _TRUE
        return _PLAIN_STREAM
    interval = _limit_interval(fields)
    num_choices = min(max(_read_int("n", fields.get("n")) or 1, 1) * num_prompts, _MAX_CHOICES)
    if not stream:
        return TokenReport(has_ids=False, num_choices=num_choices, num_prompts=num_prompts)
    options = _read_options(fields)
    shows_usage = options.get(_USAGE_KEYS[0]) is True
    shows_running_usage = shows_usage and options.get(_USAGE_KEYS[1]) is True
    is_requested = _is_json(fields, RETURN_IDS_KEY, b"true")
    has_ids = num_choices == 1 and (is_short or is_requested) and _may_have_ids(fields)
    shows_ids = has_ids and is_requested
    if has_ids:
        fields[RETURN_IDS_KEY] = _TRUE
    else:
        fields[OPTIONS_KEY] = msgspec.Raw(_encode(options | dict.fromkeys(_USAGE_KEYS, True)))
    return TokenReport(
        has_ids=has_ids,
        shows_ids=shows_ids,
        shows_usage=shows_usage,
        shows_running_usage=shows_running_usage,
        num_choices=num_choices,
        num_prompts=num_prompts,
        interval=interval,
    )


def _limit_interval(fields: Fields) -> int:
    """The tokens that an event may wait for; the client may ask for more. Raises GatewayError."""
    interval = _read_int(INTERVAL_KEY, fields.get(INTERVAL_KEY))
    if interval is None:
        return 1
    if interval > MAX_INTERVAL:
        fields[INTERVAL_KEY] = msgspec.Raw(_encode(MAX_INTERVAL))
    return min(max(interval, 1), MAX_INTERVAL)


def _may_have_ids(fields: Fields) -> bool:
    """Whether the engine sends ids on request, and the same text: vLLM sends none if it hides the
    reasoning, and echoes no text of the prompt with them. A value that is not valid must reach the
    engine."""
    valid = any(_is_json(fields, RETURN_IDS_KEY, value) for value in (b"null", b"false", b"true"))
    echoes = not any(_is_json(fields, "echo", value) for value in (b"null", b"false"))
    return valid and not echoes and _is_json(fields, "include_reasoning", b"true", absent=True)


def _is_json(fields: Fields, key: str, value: bytes, *, absent: bool = False) -> bool:
    raw = fields.get(key)
    if raw is None:
        return absent or value == b"null"
    return bytes(memoryview(raw)[: len(value) + 1]).strip() == value


def _read_int(key: str, raw: msgspec.Raw | None) -> int | None:
    if raw is None:
        return None
    # Decoding a number takes as long as it has digits.
    if len(raw) <= _MAX_INTEGER_BYTES:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            value: int | None = _decode_int(raw)
            return value
    raise build_bad_request(f"{key} must be an integer", param=key)


def _read_options(fields: Fields) -> dict[str, object]:
    """The client's `stream_options`. Raises GatewayError (400)."""
    raw = fields.get(OPTIONS_KEY)
    if raw is None:
        return {}
    options: object = None
    if len(raw) <= _MAX_OPTIONS_BYTES:
        try:
            options = _decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            options = b""
        if options is None:
            return {}
    if not isinstance(options, dict):
        message = f"{OPTIONS_KEY} must be an object of at most {_MAX_OPTIONS_BYTES} bytes"
        raise build_bad_request(message, param=OPTIONS_KEY)
    for key in _USAGE_KEYS:
        if not isinstance(options.get(key), bool | None):
            # vLLM would also read a text or a number.
            raise build_bad_request(f"{OPTIONS_KEY}.{key} must be true or false", param=OPTIONS_KEY)
    return options
