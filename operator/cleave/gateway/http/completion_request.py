"""Parses completion requests and builds the bodies for engines. Pure.

Used by the handlers and the proxied requests. Only top-level keys are decoded, and of these engines
get what `engine_fields` lets pass; most values stay the client's bytes. What is hard: no parser may
find a member here that this one does not, as it could be a KV reference. So bodies for engines are
always encoded from the decoded keys, never copied from the client's bytes (a duplicate or escaped
key, `kv_transf\\u0065r_params`, would pass a search for the name), `vllm_xargs` is written again
from decoded values, and what is not strict JSON in UTF-8 is refused, because vLLM's parser takes
more. And parsing blocks the event loop, so any body must cost only a few scans.
"""

import hashlib
from codecs import BOM_UTF8
from collections.abc import Callable

import msgspec

from cleave.gateway.http import bounded_json
from cleave.gateway.http.bounded_json import TooManyMembersError
from cleave.gateway.http.engine_fields import (
    RESERVED_ARGUMENTS,
    TABLES,
    decode_arguments,
)
from cleave.gateway.http.errors import GatewayError, build_bad_request
from cleave.gateway.http.large_json import (
    MIN_BYTES,
    scan_members,
)
from cleave.gateway.http.prompt_tokens import (
    EMBEDS_KEY,
    SIDE_FIELDS,
    is_list,
    measure_prompt,
    measure_short,
    measure_sides,
    measure_texts,
)
from cleave.gateway.http.stream_fields import (
    RETURN_IDS_KEY,
    TokenReport,
    request_report,
)
from cleave.policy.prefix_cache import MAX_PROMPT_BYTES
from cleave.policy.request_targets import TPOT_KEY, TTFT_KEY
from cleave.time_slices import Steps

Fields = dict[str, msgspec.Raw]
Body = bytes | bytearray | memoryview
"""Of a client's request; nothing changes it."""
Piece = bytes | memoryview
"""Of a body for an engine."""
FindModel = Callable[[], str]

KV_PARAMS_KEY = "kv_transfer_params"
XARGS_KEY = "vllm_xargs"

MAX_FIELDS = 1_024
"""Limit of the fields of a request."""
MAX_MODEL_BYTES = 4_096
"""Limit of a model's name as JSON; error messages quote unknown names."""
MAX_XARGS_BYTES = 16 << 10
"""Limit of `vllm_xargs`, all of which is decoded."""
_LARGE_BYTES = 16 << 10
"""Smaller bodies are decoded before their fields are counted: at most 3,300 fields, 1 ms."""
MAX_COPIED_BYTES = 16 << 10
"""Longer values are sent to engines from where they lie."""
_VALUE_BYTES = 1_024
"""Longer values are not decoded: no value that allows a split or a continuation is so long."""
MAX_SALT_BYTES = 1_024
"""Limit of `cache_salt` as JSON, which is hashed; vLLM recommends 43 characters, of 256 bits."""

_decode_fields = msgspec.json.Decoder(Fields).decode
_decode_name = msgspec.json.Decoder(str | None).decode
_decode_json = msgspec.json.Decoder().decode
_decode_flag = msgspec.json.Decoder(bool | None).decode
_encode = msgspec.json.Encoder().encode

_FALSE, _NULL = msgspec.Raw(b"false"), msgspec.Raw(b"null")
_ONE = msgspec.Raw(b"1")
KV_REQUEST_PARAMS = msgspec.Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_TTFT, _TPOT = f'"{TTFT_KEY}":'.encode(), f'"{TPOT_KEY}":'.encode()
_NON_PREFILL_FIELDS = ("stream_options", "min_tokens", RETURN_IDS_KEY)
_COLOCATING_FIELDS = frozenset((
    "n", "echo", "prompt_logprobs", "tool_choice", "use_beam_search", "stream_options",
    "min_tokens",
))  # fmt: skip
"""Fields of which some values rule out a split; most requests have none of them."""
_STATEFUL_FIELDS = frozenset((
    "bad_words", "frequency_penalty", "include_reasoning", "logprob_token_ids", "logprobs",
    "presence_penalty", "prompt_embeds", "repetition_detection", "response_format",
    "return_tokens_as_token_ids", "seed", "stop", "structured_outputs", "suffix",
    "thinking_token_budget", "tools", "top_logprobs", "vllm_xargs", "watermarking", RETURN_IDS_KEY,
))  # fmt: skip
"""Fields of which some values tie a response to the engine that began it."""
_SPECIAL_FIELDS = _COLOCATING_FIELDS | _STATEFUL_FIELDS
_TOO_MANY_FIELDS: tuple[str, str | None] = (f"the body has more than {MAX_FIELDS} fields", None)
_STATELESS_VALUES: tuple[object, ...] = (None, False, 0, [], {}, {"type": "text"})
"""Values of `_STATEFUL_FIELDS` that do not tie a response to an engine."""


class CompletionRequest:
    """A parsed request."""

    __slots__ = (
        "can_continue", "can_disaggregate", "fields", "is_flex", "model", "output_tokens",
        "prompt_tokens", "report", "stream",
    )  # fmt: skip

    def __init__(
        self,
        *,
        model: str,
        fields: Fields,
        stream: bool,
        can_disaggregate: bool,
        prompt_tokens: int,
        output_tokens: int,
        report: TokenReport | None = None,
        can_continue: bool = False,
    ) -> None:
        self.model = model
        self.fields = fields
        self.stream = stream
        self.can_disaggregate = can_disaggregate
        """False: one instance must run both phases."""
        self.prompt_tokens = prompt_tokens
        """Estimated."""
        self.output_tokens = output_tokens
        """The request's output limit; 0: none."""
        self.report = report
        """How its tokens are reported; None: it is no completion."""
        self.can_continue = can_continue
        """Another engine can continue the stream from the ids of its tokens."""
        self.is_flex = "service_tier" in fields and bytes(fields["service_tier"]) == b'"flex"'
        """It only fills idle capacity."""


def get_prompt_text(completion: CompletionRequest) -> bytes | memoryview:
    """The prompt's JSON, after the tools, which chat templates put before the messages: so two
    prompts with the same tools and system prompt begin alike. Without its closing character it is a
    prefix of longer chats."""
    fields = completion.fields
    raw = fields.get("messages") or fields.get("prompt")
    if raw is None:
        return b""
    tools = fields.get("tools")
    if tools is None:
        return memoryview(raw)
    return b"".join((memoryview(tools)[:MAX_PROMPT_BYTES], memoryview(raw)[:MAX_PROMPT_BYTES]))


def get_cache_salt(completion: CompletionRequest) -> bytes:
    """What must be equal, besides the text, for two prompts to share cached KV; empty: nothing."""
    fields = completion.fields
    return bytes(fields["cache_salt"]) if "cache_salt" in fields else b""


def _find_no_model() -> str:
    return ""


def parse_completion(
    path: bytes, body: Body, find_only_model: FindModel = _find_no_model
) -> Steps[CompletionRequest]:
    """Parse a request to /v1/completions or /v1/chat/completions. Raises GatewayError (400).
    `find_only_model`: see `read_model`."""
    # Each generator costs as much as several calls: small requests get by with one.
    if len(body) <= MIN_BYTES:
        return build_completion(path, decode_fields(body), find_only_model)
    return _parse_large(path, body, find_only_model)


def _parse_large(path: bytes, body: Body, find_only_model: FindModel) -> Steps[CompletionRequest]:
    fields = yield from scan_fields(body)
    return (yield from build_completion(path, fields, find_only_model))


def build_completion(
    path: bytes, fields: Fields, find_only_model: FindModel = _find_no_model
) -> Steps[CompletionRequest]:
    """A request to one of these paths from its fields. Raises GatewayError (400)."""
    _admit_fields(path, fields)
    stream = _read_stream(fields)
    limit = _read_output_limit(fields)
    prompts, prompt_tokens = measure_short(fields) or (yield from measure_prompt(fields))
    if not SIDE_FIELDS.isdisjoint(fields):
        prompts, prompt_tokens = yield from measure_sides(fields, prompts, prompt_tokens)
    is_plain = _SPECIAL_FIELDS.isdisjoint(fields)
    can_continue = stream and prompts == 1 and (is_plain or not _depends_on_engine_state(fields))
    report = request_report(fields, prompts, prompt_tokens, stream=stream)
    return CompletionRequest(
        model=read_model(fields, find_only_model),
        fields=fields,
        stream=stream,
        can_disaggregate=prompts == 1
        and limit is not None
        and (is_plain or _can_disaggregate(fields, stream, limit)),
        prompt_tokens=prompt_tokens,
        output_tokens=limit or 0,
        report=report,
        can_continue=can_continue,
    )


def set_cache_salt(completion: CompletionRequest, tenant_salt: str) -> None:
    """Let the request share cached prompts with its tenant only: the time to the first token
    would otherwise show a client whether another one has sent a prompt that begins like its own.
    A salt of the client's own separates further, but cannot name another tenant's."""
    fields = completion.fields
    own = bytes(fields["cache_salt"]) if "cache_salt" in fields else b"null"
    salt = tenant_salt
    if own != b"null":
        salt = hashlib.sha256(b"%b/%b" % (tenant_salt.encode(), own)).hexdigest()[:32]
    fields["cache_salt"] = msgspec.Raw(b'"%b"' % salt.encode())


def parse_engine_request(
    path: bytes, body: Body, find_only_model: FindModel
) -> Steps[CompletionRequest]:
    """Parse a request to another path of an engine; it is never split. Raises GatewayError (400).
    `find_only_model`: see `read_model`."""
    fields = decode_fields(body) if len(body) <= MIN_BYTES else (yield from scan_fields(body))
    return (yield from build_engine_request(path, fields, find_only_model))


def build_engine_request(
    path: bytes, fields: Fields, find_only_model: FindModel = _find_no_model
) -> Steps[CompletionRequest]:
    """A request to such a path from its fields. Raises GatewayError (400)."""
    _admit_fields(path, fields)
    tokens = yield from measure_texts(path, fields)
    return CompletionRequest(
        model=read_model(fields, find_only_model),
        fields=fields,
        stream=_read_stream(fields),
        can_disaggregate=False,
        prompt_tokens=tokens,
        output_tokens=_read_output_limit(fields) or 0,
    )


def set_engine_model(completion: CompletionRequest, engine_model: str) -> CompletionRequest:
    """The request to engines that know its adapter by another name than clients do."""
    return _replace_field(completion, "model", msgspec.Raw(_encode(engine_model)))


def set_targets(
    completion: CompletionRequest, ttft_left_ms: float | None, tpot_ms: float
) -> CompletionRequest:
    """The request with its latency targets for engines (`policy.request_targets`), None: it has its
    first token."""
    before = bytes(completion.fields.get(XARGS_KEY, b"{}"))[:-1]
    comma = b"" if before == b"{" else b","
    ttft = b"%b%.3f," % (_TTFT, ttft_left_ms) if ttft_left_ms is not None else b""
    raw = b"%b%b%b%b%.3f}" % (before, comma, ttft, _TPOT, tpot_ms)
    return _replace_field(completion, XARGS_KEY, msgspec.Raw(raw))


def _replace_field(
    completion: CompletionRequest, key: str, value: msgspec.Raw
) -> CompletionRequest:
    return CompletionRequest(
        model=completion.model,
        fields={**completion.fields, key: value},
        stream=completion.stream,
        can_disaggregate=completion.can_disaggregate,
        prompt_tokens=completion.prompt_tokens,
        output_tokens=completion.output_tokens,
        report=completion.report,
        can_continue=completion.can_continue,
    )


def raise_priority(completion: CompletionRequest, minimum: int) -> None:
    """Raise the request's `priority`, 0 if absent, to at least `minimum`: engines serve lower
    values first. Raises GatewayError (400)."""
    raw = completion.fields.get("priority")
    value = decode_value(raw) if raw is not None else None
    if value is None:
        value = 0
    # vLLM would also read a number from a text.
    if type(value) is not int:
        raise build_bad_request("priority must be an integer", param="priority")
    if value < minimum:
        completion.fields["priority"] = msgspec.Raw(_encode(minimum))


def encode_fields(fields: Fields) -> list[Piece]:
    """A body for an engine, in pieces that follow each other: large values are not copied."""
    if max(map(len, fields.values())) <= MAX_COPIED_BYTES:
        return [_encode(fields)]
    large = [key for key, value in fields.items() if len(value) > MAX_COPIED_BYTES]
    small = {key: value for key, value in fields.items() if key not in large}
    pieces: list[Piece] = [_encode(small)[:-1]]
    comma = b"," if small else b""
    for key in large:
        pieces += [b"%b%b:" % (comma, _encode(key)), memoryview(fields[key])]
        comma = b","
    return [*pieces, b"}"]


def build_prefill_fields(
    completion: CompletionRequest, kv_params: msgspec.Raw = KV_REQUEST_PARAMS
) -> Fields:
    """For an engine that computes the prompt and keeps its KV for another engine."""
    fields = completion.fields.copy()
    for key in _NON_PREFILL_FIELDS:
        fields.pop(key, None)
    fields["stream"] = _FALSE
    fields["max_tokens"] = _ONE
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = _ONE
    fields[KV_PARAMS_KEY] = kv_params
    return fields


def build_decode_fields(completion: CompletionRequest, handoff: msgspec.Raw) -> Fields:
    """For an engine that continues from the KV of a prefill engine."""
    return {**completion.fields, KV_PARAMS_KEY: handoff}


def decode_fields(body: Body) -> Fields:
    """The fields of a body of at most MIN_BYTES, as sent. Raises GatewayError (400)."""
    try:
        raw = bytes(body)
        if not raw.isascii():
            # msgspec decodes the keys only.
            raw.decode()
            raw = raw.removeprefix(BOM_UTF8)
        if len(raw) > _LARGE_BYTES:
            fields = bounded_json.decode_bounded_object(raw, MAX_FIELDS)
        else:
            fields = _decode_fields(raw)
    except TooManyMembersError:
        raise _build_field_error(_TOO_MANY_FIELDS) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise build_bad_request(f"the body is not a JSON object: {error}") from None
    if len(fields) > MAX_FIELDS:
        raise _build_field_error(_TOO_MANY_FIELDS)
    return fields


def scan_fields(body: Body) -> Steps[Fields]:
    """The same of a larger body."""
    begin = len(BOM_UTF8) if bytes(memoryview(body)[: len(BOM_UTF8)]) == BOM_UTF8 else 0
    try:
        return (yield from scan_members(memoryview(body)[begin:], MAX_FIELDS))
    except TooManyMembersError:
        raise _build_field_error(_TOO_MANY_FIELDS) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise build_bad_request(f"the body is not a JSON object: {error}") from None


def _admit_fields(path: bytes, fields: Fields) -> None:
    """Remove and check fields by the rules for this path. Raises GatewayError (400)."""
    table = TABLES[path]
    if fields.keys() <= table.plain:
        return
    for name in fields.keys() - table.plain - table.checked:
        del fields[name]
    if XARGS_KEY in fields:
        _rewrite_xargs(fields)
    if "cache_salt" in fields and len(fields["cache_salt"]) > MAX_SALT_BYTES:
        message = f"cache_salt is longer than {MAX_SALT_BYTES} bytes: send a hash of it"
        raise build_bad_request(message, param="cache_salt")


def read_model(fields: Fields, find_only_model: FindModel) -> str:
    """The model of a request. One that names none, as engines allow, gets the only one there is
    (`find_only_model`; empty: there are several). Raises GatewayError (400)."""
    raw = fields.get("model", _NULL)
    if len(raw) > MAX_MODEL_BYTES:
        raise build_bad_request(f"model is longer than {MAX_MODEL_BYTES} bytes", param="model")
    try:
        name: str | None = _decode_name(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise build_bad_request("model must be a string", param="model") from None
    if not name:
        name = find_only_model()
        if not name:
            raise build_bad_request("you must provide a model parameter", param="model")
        fields["model"] = msgspec.Raw(_encode(name))
    return name


def _read_stream(fields: Fields) -> bool:
    if "stream" not in fields:
        return False
    try:
        return bool(_decode_flag(fields["stream"]))
    except msgspec.MsgspecError:
        raise build_bad_request("stream must be true or false", param="stream") from None


def _read_output_limit(fields: Fields) -> int | None:
    """The output limit; 0: none; None: invalid, so the request must not be split.
    One engine gets the whole request and rejects it with the proper message."""
    limit = 0
    for key in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if key not in fields:
            continue
        value = decode_value(fields[key])
        if value is None:
            continue
        if type(value) is not int or value < 1:
            return None
        limit = value
    return limit


def _can_disaggregate(fields: Fields, stream: bool, limit: int) -> bool:
    values = {key: decode_value(fields[key]) for key in _COLOCATING_FIELDS.intersection(fields)}
    min_tokens = values.get("min_tokens") or 0
    # An echoed chat has log-probabilities of its prompt, which is then computed as a whole.
    has_prompt_logprobs = values.get("echo") and ("logprobs" in fields or "messages" in fields)
    return (
        values.get("n") in (None, 1)
        and not has_prompt_logprobs
        and values.get("prompt_logprobs") is None
        and not is_list(fields.get(EMBEDS_KEY, _ONE))
        and values.get("tool_choice") in (None, "none", "auto")
        and not values.get("use_beam_search")
        and (stream or values.get("stream_options") is None)
        and type(min_tokens) is int
        and (limit == 0 or min_tokens <= limit)
    )


def _depends_on_engine_state(fields: Fields) -> bool:
    """Whether the rest of the response depends on more than the tokens so far.
    Penalties count generated tokens; seeds, grammars, stop strings and multiple choices have state
    in the engine, which is lost with it."""
    values = {key: decode_value(fields[key]) for key in _SPECIAL_FIELDS.intersection(fields)}
    for key in ("stream_options", "min_tokens"):
        values.pop(key, None)
    has_choices = values.pop("n", 1) not in (None, 1)
    if values.pop("tool_choice", None) == "none":
        values.pop("tools", None)
    if values.pop("include_reasoning", True) is not True:
        return True
    if values.pop(RETURN_IDS_KEY, None) not in (None, False, True):
        # An invalid value must reach the engine.
        return True
    # 0 is a valid seed; logprobs=0 requests the log-probability of each output token.
    numbers = [values.pop(key, None) for key in ("seed", "logprobs", "prompt_logprobs")]
    return (
        has_choices
        or any(value is not None and value is not False for value in numbers)
        or any(value not in _STATELESS_VALUES for value in values.values())
    )


def _rewrite_xargs(fields: Fields) -> None:
    """Write `vllm_xargs` again, without what only gateways may send: vLLM and its plug-ins act on
    it. Raises GatewayError (400)."""
    raw = fields.pop(XARGS_KEY)
    if len(raw) > MAX_XARGS_BYTES:
        message = f"{XARGS_KEY} is longer than {MAX_XARGS_BYTES} bytes"
        raise build_bad_request(message, param=XARGS_KEY)
    try:
        arguments = decode_arguments(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        fault = "must be an object whose values are texts, numbers, booleans or lists of those"
        raise build_bad_request(f"{XARGS_KEY} {fault}", param=XARGS_KEY) from None
    if arguments is not None:
        kept = {key: value for key, value in arguments.items() if key not in RESERVED_ARGUMENTS}
        fields[XARGS_KEY] = msgspec.Raw(_encode(kept))


def _build_field_error(error: tuple[str, str | None]) -> GatewayError:
    """`error`: message and parameter."""
    message, param = error
    return build_bad_request(message, param=param)


def decode_value(raw: msgspec.Raw) -> object:
    """A field's value; b"invalid" or b"long" in place of an invalid or too long one."""
    if len(raw) > _VALUE_BYTES:
        return b"long"
    try:
        value: object = _decode_json(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return b"invalid"
    return value
