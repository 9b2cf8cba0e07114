"""Plans how another engine continues a stream whose engine was lost. Pure.

Used by the exchange. Preferred is continuation: the token ids of the prompt and of the output so
far are sent to another engine as one prompt, so nothing is generated twice and the text is not
tokenized differently. A request whose output depends on state of the first engine (a seed, a
grammar, a stop string, several choices, tool calls) is replayed instead, if the same output is
guaranteed; if it is also sampled, it cannot be resumed.
"""

from dataclasses import dataclass

import msgspec

from cleave.gateway.failover.splice import Continued, Replayed, build_event
from cleave.gateway.failover.transcript import DONE, Choice, Transcript
from cleave.gateway.http.completion_request import Completion, Fields, decode_any

COMPLETIONS = b"/v1/completions"
CHAT = b"/v1/chat/completions"
RESUMABLE = (COMPLETIONS, CHAT)

DEFAULT_OUTPUT_TOKENS = 16
"""Limit of /v1/completions for a request without `max_tokens`."""

_CARRIED = (
    "allowed_token_ids",
    "cache_salt",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "model",
    "priority",
    "repetition_penalty",
    "session_id",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop_token_ids",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_p",
    "user",
    "return_token_ids",
)
"""Fields that keep their meaning for the rest of a response; all others are dropped."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """What to send to another engine, and how its events become the rest of the stream."""

    path: bytes
    completion: Completion
    splice: Continued | Replayed
    how: str
    """For the metrics: continued or replayed."""


@dataclass(frozen=True, slots=True)
class Ending:
    """No engine is needed: only these events are missing."""

    events: bytes


class _Message(msgspec.Struct, gc=False):
    content: msgspec.Raw = msgspec.Raw(b"null")


class _Part(msgspec.Struct, gc=False):
    type: str = "text"


# Contents may be very long, so their text is not decoded.
_decode_messages = msgspec.json.Decoder(list[_Message]).decode
_decode_parts = msgspec.json.Decoder(list[_Part]).decode


class NotResumableError(Exception):
    """The stream has to end; the message is for the client."""


def plan(
    path: bytes,
    completion: Completion,
    transcript: Transcript,
    prompt_ids: bytes,
    max_model_len: int,
) -> Resumption | Ending:
    """How to continue a request of which the client has received `transcript`.

    `prompt_ids`: as the engine wrote them, empty if it did not. `max_model_len`: in tokens, of
    every instance that may be used; 0 when unknown. Raises NotResumableError.
    """
    if path not in RESUMABLE or transcript.foreign:
        raise NotResumableError("answers of this kind cannot be resumed")
    if transcript.silent:
        return Resumption(path, completion, Replayed(transcript), "replayed")
    if transcript.finished and (transcript.usage or not _wants_usage(completion.fields)):
        return Ending(DONE)
    continued = _continue(path == CHAT, completion, transcript, prompt_ids, max_model_len)
    if continued is not None:
        return continued
    if not is_repeatable(completion.fields):
        raise NotResumableError(
            "its answer is sampled and depends on more than its tokens; "
            "with temperature 0 or a seed it could have been resumed"
        )
    return Resumption(path, completion, Replayed(transcript), "replayed")


def is_repeatable(fields: Fields) -> bool:
    """Whether the same request must get the same response again."""
    if "temperature" in fields and decode_any(fields["temperature"]) == 0:
        return True
    if "top_k" in fields and decode_any(fields["top_k"]) == 1:
        return True
    return "seed" in fields and type(decode_any(fields["seed"])) is int


def _continue(
    chat: bool,
    completion: Completion,
    transcript: Transcript,
    prompt_ids: bytes,
    max_model_len: int,
) -> Resumption | Ending | None:
    if not (completion.numbered and prompt_ids and transcript.choices.keys() == {0}):
        return None
    choice = transcript.choices[0]
    if not choice.ids or _is_parsed(choice) or (chat and _holds_media(completion.fields)):
        return None
    prompt = [int(number) for number in prompt_ids.split(b",")]
    limit = completion.output_tokens or (0 if chat else DEFAULT_OUTPUT_TOKENS)
    max_output = limit or max_model_len - len(prompt)
    remaining = max_output - choice.settled
    if choice.finished or remaining < 1:
        return Ending(_end(chat, completion, transcript, len(prompt), choice))
    # Tokens without text are generated again and must not count twice if that engine is lost, too.
    repeated = choice.ids[choice.settled :] if completion.asks_ids else []
    if not repeated:
        del choice.ids[choice.settled :]
    ids = prompt + choice.ids[: choice.settled]
    fields = {key: completion.fields[key] for key in _CARRIED if key in completion.fields}
    fields["prompt"] = _raw(ids)
    fields["max_tokens"] = _raw(remaining)
    min_tokens = decode_any(completion.fields.get("min_tokens", _raw(0)))
    if type(min_tokens) is int and min_tokens > choice.settled:
        fields["min_tokens"] = _raw(min_tokens - choice.settled)
    rest = Completion(
        model=completion.model,
        fields=fields,
        stream=True,
        splittable=completion.splittable,
        prompt_tokens=len(ids),
        output_tokens=remaining,
        numbered=True,
    )
    splice = Continued(transcript, chat=chat, tokens=choice.settled, again=repeated)
    return Resumption(COMPLETIONS, rest, splice, "continued")


def _end(
    chat: bool, completion: Completion, transcript: Transcript, prompt_tokens: int, choice: Choice
) -> bytes:
    """The last events of a response of which every token was sent."""
    kind = "chat.completion.chunk" if chat else "text_completion"
    frame = {"object": kind, **transcript.head}
    events = b""
    if not choice.finished:
        text: dict[str, object] = {"delta": {"content": ""}} if chat else {"text": ""}
        last = {"index": 0, **text, "logprobs": None, "finish_reason": "length"}
        events += build_event({**frame, "choices": [last]})
    if _wants_usage(completion.fields) and not transcript.usage:
        usage = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + len(choice.ids),
            "completion_tokens": len(choice.ids),
        }
        events += build_event({**frame, "choices": [], "usage": usage})
    return events + DONE


def _is_parsed(choice: Choice) -> bool:
    """Whether the engine parses tokens into something other than text (reasoning, tool calls)."""
    plain = {("text",), ("delta", "content"), ("delta", "role")}
    return any(text and path not in plain for path, text in choice.texts.items())


def _holds_media(fields: Fields) -> bool:
    """Whether the prompt contains anything besides text."""
    try:
        messages = _decode_messages(fields["messages"])
        contents = [each.content for each in messages if _is_list(each.content)]
        return any(part.type != "text" for raw in contents for part in _decode_parts(raw))
    except (KeyError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return True


def _is_list(raw: msgspec.Raw) -> bool:
    return bytes(memoryview(raw)[:1]) == b"["


def _wants_usage(fields: Fields) -> bool:
    options = decode_any(fields["stream_options"]) if "stream_options" in fields else None
    return isinstance(options, dict) and bool(options.get("include_usage"))


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
