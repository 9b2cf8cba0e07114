"""Rewrites another engine's events into the rest of a stream. Used by the relay after a loss.

Continued: the engine received the prompt and the output so far and generates only the rest; its
events, of whichever API, take the form of the first engine's. Replayed: it received the original
request, and what the client has is cut from its output. What is hard: a replay may divide its text
into other events than the first engine did, so text is cut by length and compared; any difference
ends the stream.
"""

from collections.abc import Sequence

import msgspec

from cleave.gateway.failover.transcript import (
    CONSTANT_KEYS,
    CONTENT_KEYS,
    DATA_PREFIX,
    DONE_EVENT,
    EVENT_SEPARATOR,
    ChoiceTranscript,
    Event,
    JsonPath,
    Transcript,
    decode_event,
    get_tool_call_key,
)

_encode = msgspec.json.Encoder().encode
_DIFFERS = "answers otherwise than what the client has seen already"

Lengths = dict[JsonPath, int]


class SpliceError(Exception):
    """The output is not the rest of this stream; continues `instance NAME ...`."""


class ContinuedStream:
    """Rewrites events of /v1/completions, requested with the prompt and the output so far."""

    def __init__(
        self, transcript: Transcript, chat: bool, tokens: int, repeated_ids: Sequence[int] = ()
    ) -> None:
        """`tokens`: output tokens that are now part of the prompt.
        `repeated_ids`: generated again, because the client has these ids but not their text."""
        self._head = transcript.head
        self._chat = chat
        self._num_prompt_output_tokens = tokens
        self._repeated_ids = list(repeated_ids)

    def rewrite(self, event: bytes) -> bytes:
        """One event in the first engine's form. Raises SpliceError as a replay does."""
        value = decode_event(event)
        if value is None or "error" in value:
            return event + EVENT_SEPARATOR
        value |= self._head
        if self._chat:
            value["object"] = "chat.completion.chunk"
        value["choices"] = [self._rewrite_choice(choice) for choice in value.get("choices") or ()]
        if usage := value.get("usage"):
            moved = self._num_prompt_output_tokens
            usage["prompt_tokens"] -= moved
            usage["completion_tokens"] = (usage["completion_tokens"] or 0) + moved
            # An engine may have cached the output that is moved here, too.
            details = usage.get("prompt_tokens_details") or {}
            if details.get("cached_tokens"):
                details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])
        return build_event(value)

    def _rewrite_choice(self, choice: Event) -> Event:
        if self._repeated_ids and choice.get("token_ids"):
            choice["token_ids"] = self._drop_repeated(choice["token_ids"])
        if not self._chat:
            choice.pop("prompt_token_ids", None)
            return choice
        rewritten: Event = {
            "index": choice.get("index", 0),
            "delta": {"content": choice.get("text", "")},
            "logprobs": None,
            "finish_reason": choice.get("finish_reason"),
        }
        if rewritten["finish_reason"] is not None:
            rewritten["stop_reason"] = choice.get("stop_reason")
        rewritten["token_ids"] = choice.get("token_ids")
        return rewritten

    def _drop_repeated(self, ids: list[int]) -> list[int]:
        count = min(len(ids), len(self._repeated_ids))
        if ids[:count] != self._repeated_ids[:count]:
            raise SpliceError(_DIFFERS)
        del self._repeated_ids[:count]
        return ids[count:]


class ReplayedStream:
    """Rewrites events of the original request sent again: cuts what the client has."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._replayed_lengths: dict[int, Lengths] = {}
        """By choice: how much has been repeated so far, by path."""

    def rewrite(self, event: bytes) -> bytes:
        """The new part of an event. Raises SpliceError when it differs from what was sent."""
        if event == DONE_EVENT[: -len(EVENT_SEPARATOR)]:
            return DONE_EVENT
        value = decode_event(event)
        if value is None or "error" in value:
            return event + EVENT_SEPARATOR
        value |= self._transcript.head
        if self._transcript.head:
            value.pop("prompt_token_ids", None)
        choices = value.get("choices") or []
        if not choices:
            return b"" if self._transcript.usage else build_event(value)
        value["choices"] = [new for choice in choices if (new := self._trim_choice(choice))]
        return build_event(value) if value["choices"] else b""

    def _trim_choice(self, choice: Event) -> Event | None:
        """The new part of a choice; None when there is none."""
        index = choice.get("index", 0)
        sent = self._transcript.choices.get(index, ChoiceTranscript())
        replayed = self._replayed_lengths.setdefault(index, {})
        trimmed = {
            key: _trim(value, (key,), sent, replayed) if key in CONTENT_KEYS else value
            for key, value in choice.items()
        }
        if index in self._transcript.choices:
            trimmed.pop("prompt_token_ids", None)
        finish = choice.get("finish_reason")
        # The relay has to see that an engine gives the request up.
        ends = finish is not None and (finish == "abort" or not sent.finished)
        is_new = ends or any(_has_content(trimmed.get(key)) for key in CONTENT_KEYS)
        return trimmed if is_new else None


def build_event(value: Event) -> bytes:
    """An event with this JSON."""
    return DATA_PREFIX + _encode(value) + EVENT_SEPARATOR


def _trim(value: object, path: JsonPath, sent: ChoiceTranscript, replayed: Lengths) -> object:
    """The new part of a value of a choice."""
    if isinstance(value, str):
        return _trim_text(value, path, sent, replayed)
    if isinstance(value, dict):
        return {
            key: remaining
            for key, inner in value.items()
            if (remaining := _trim(inner, (*path, key), sent, replayed)) is not None
            or inner is None
        }
    if not isinstance(value, list):
        return value
    if path[-1] == "tool_calls":
        calls = []
        for position, call in enumerate(value):
            remaining = _trim(call, (*path, get_tool_call_key(call, position)), sent, replayed)
            if isinstance(remaining, dict) and any(
                _has_content(part) for key, part in remaining.items() if key != "index"
            ):
                calls.append(remaining)
        return calls
    before = replayed.get(path, 0)
    replayed[path] = before + len(value)
    return value[max(0, sent.counts.get(path, 0) - before) :]


def _trim_text(text: str, path: JsonPath, sent: ChoiceTranscript, replayed: Lengths) -> str | None:
    sent_text = sent.texts.get(path, "")
    if path[-1] in CONSTANT_KEYS:
        return None if sent_text else text
    before = replayed.get(path, 0)
    replayed[path] = before + len(text)
    repeated = sent_text[before : before + len(text)]
    if not text.startswith(repeated):
        raise SpliceError(_DIFFERS)
    return text[len(repeated) :]


def _has_content(part: object) -> bool:
    """Whether it contains any text or list element."""
    if isinstance(part, dict):
        return any(_has_content(inner) for inner in part.values())
    return isinstance(part, str | list) and bool(part)
