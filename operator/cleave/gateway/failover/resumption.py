"""Plans how another engine continues a stream whose engine was lost. Pure.

Used by `RetryState`. Preferred is continuation: the token ids of the prompt and of the output so
far are sent to another engine as one prompt, so nothing is generated twice and the text is not
tokenized differently. A request whose output depends on state of the first engine (a seed, a
grammar, a stop string, several choices, tool calls) is replayed instead, if the same output is
guaranteed; if it is also sampled, it cannot be resumed.
"""

from dataclasses import dataclass

import msgspec

from cleave.gateway.failover.splice import ContinuedStream, ReplayedStream, build_event
from cleave.gateway.failover.transcript import DONE_EVENT, Transcript
from cleave.gateway.http.completion_request import CompletionRequest, Fields, decode_value
from cleave.gateway.http.stream_fields import TokenReport

COMPLETIONS_PATH = b"/v1/completions"
CHAT_PATH = b"/v1/chat/completions"
RESUMABLE_PATHS = (COMPLETIONS_PATH, CHAT_PATH)

DEFAULT_OUTPUT_TOKENS = 16
"""Limit of /v1/completions for a request without `max_tokens`."""

CONTINUATION_FIELDS = (
    "allowed_token_ids", "cache_salt", "ignore_eos", "include_stop_str_in_output", "logit_bias",
    "min_p", "model", "priority", "repetition_penalty", "session_id", "skip_special_tokens",
    "spaces_between_special_tokens", "stop_token_ids", "stream", "stream_interval",
    "stream_options", "temperature", "top_k", "top_p", "user", "return_token_ids",
)  # fmt: skip
"""Fields that keep their meaning for the rest of a response; all others are dropped."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """What to send to another engine, and how its events become the rest of the stream."""

    path: bytes
    completion: CompletionRequest
    splice: ContinuedStream | ReplayedStream
    mode: str
    """For the metrics: continued or replayed."""


@dataclass(frozen=True, slots=True)
class StreamEnding:
    """No engine is needed: only these events are missing."""

    events: bytes


class _ChatMessage(msgspec.Struct, gc=False):
    content: msgspec.Raw = msgspec.Raw(b"null")


class _ContentPart(msgspec.Struct, gc=False):
    type: str = "text"


# Contents may be very long, so their text is not decoded.
_decode_messages = msgspec.json.Decoder(list[_ChatMessage]).decode
_decode_parts = msgspec.json.Decoder(list[_ContentPart]).decode


class NotResumableError(Exception):
    """The stream has to end; the message is for the client."""


def plan_resumption(
    path: bytes,
    completion: CompletionRequest,
    transcript: Transcript,
    max_model_len: int,
) -> Resumption | StreamEnding:
    """How to continue a request of which the client has received `transcript`. `max_model_len`: in
    tokens, of every instance that may be used; 0 when unknown. Raises NotResumableError."""
    if transcript.done:
        return StreamEnding(b"")
    if path not in RESUMABLE_PATHS or transcript.has_unknown_events:
        raise NotResumableError("answers of this kind cannot be resumed")
    if not transcript.has_output:
        return Resumption(path, completion, ReplayedStream(transcript), "replayed")
    report = completion.report
    shows_usage = report is not None and report.shows_usage
    if transcript.finished and (transcript.usage or not shows_usage):
        return StreamEnding(DONE_EVENT)
    if transcript.is_dropped:
        raise NotResumableError("the gateway had no memory left to keep what that takes")
    continued = _plan_continuation(path == CHAT_PATH, completion, transcript, max_model_len)
    if continued is not None:
        return continued
    if not is_repeatable(completion.fields):
        raise NotResumableError(
            "its answer is sampled and depends on more than its tokens; "
            "with temperature 0 or a seed it could have been resumed"
        )
    if not transcript.keeps_text:
        raise NotResumableError("one of its events was too large to be compared with another run")
    return Resumption(path, completion, ReplayedStream(transcript), "replayed")


def is_repeatable(fields: Fields) -> bool:
    """Whether the same request must get the same response again."""
    if "temperature" in fields and decode_value(fields["temperature"]) == 0:
        return True
    if "top_k" in fields and decode_value(fields["top_k"]) == 1:
        return True
    return "seed" in fields and type(decode_value(fields["seed"])) is int


def _plan_continuation(
    chat: bool,
    completion: CompletionRequest,
    transcript: Transcript,
    max_model_len: int,
) -> Resumption | StreamEnding | None:
    prompt_ids, sent, report = transcript.prompt_ids, completion.fields, completion.report
    if not (completion.can_continue and prompt_ids and transcript.output_ids and report):
        return None
    if transcript.has_parsed_output or (chat and contains_media(sent)):
        return None
    prompt_tokens, settled = prompt_ids.count(b",") + 1, transcript.num_settled
    limit = completion.output_tokens or (0 if chat else DEFAULT_OUTPUT_TOKENS)
    remaining = (limit or max_model_len - prompt_tokens) - settled
    if transcript.finished or remaining < 1:
        return StreamEnding(_build_ending(chat, report, transcript, prompt_tokens))
    # Tokens without text are generated again and must not count twice if that engine is lost, too.
    repeated = transcript.list_unsettled_ids() if report.shows_ids else []
    if not repeated:
        transcript.drop_unsettled_ids()
    fields = {key: sent[key] for key in CONTINUATION_FIELDS if key in sent}
    # As text: numbers of 131,072 tokens would take 20 ms to convert.
    ids = b"%b,%b" % (prompt_ids, transcript.settled_ids)
    fields["prompt"] = msgspec.Raw(b"[%b]" % ids[:-1])
    fields["max_tokens"] = _to_raw(remaining)
    min_tokens = decode_value(sent.get("min_tokens", _to_raw(0)))
    if type(min_tokens) is int and min_tokens > settled:
        fields["min_tokens"] = _to_raw(min_tokens - settled)
    rest = CompletionRequest(
        model=completion.model,
        fields=fields,
        stream=True,
        can_disaggregate=completion.can_disaggregate,
        prompt_tokens=prompt_tokens + settled,
        output_tokens=remaining,
        report=report,
        can_continue=True,
    )
    splice = ContinuedStream(transcript, chat, settled, repeated)
    return Resumption(COMPLETIONS_PATH, rest, splice, "continued")


def _build_ending(
    chat: bool, report: TokenReport, transcript: Transcript, prompt_tokens: int
) -> bytes:
    """The last events of a response of which every token was sent."""
    frame = {"object": "chat.completion.chunk" if chat else "text_completion", **transcript.head}
    events = b""
    if not transcript.finished:
        text: dict[str, object] = {"delta": {"content": ""}} if chat else {"text": ""}
        last = {"index": 0, **text, "logprobs": None, "finish_reason": "length"}
        events += build_event({**frame, "choices": [last]})
    if report.shows_usage and not transcript.usage:
        output = transcript.num_ids
        total = prompt_tokens + output
        usage = {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": output}
        events += build_event({**frame, "choices": [], "usage": usage})
    return events + DONE_EVENT


def contains_media(fields: Fields) -> bool:
    """Whether the prompt contains anything besides text."""
    try:
        messages = _decode_messages(fields["messages"])
        contents = [each.content for each in messages if _is_list(each.content)]
        return any(part.type != "text" for raw in contents for part in _decode_parts(raw))
    except (KeyError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return True


def _is_list(raw: msgspec.Raw) -> bool:
    return bytes(memoryview(raw)[:1]) == b"["


def _to_raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
