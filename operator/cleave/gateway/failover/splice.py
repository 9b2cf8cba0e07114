"""Rewrites another engine's events into the rest of a stream. Used by the relay after a loss.

Continued: the engine received the prompt and the output so far and generates only the rest; its
events, of whichever API, take the form of the first engine's. Replayed: it received the original
request, and what the client has is cut from its output. What is hard: a replay may divide its text
into other events than the first engine did, so text is cut by length, and compared by its digest
once all that was sent has come again; any difference ends the stream.
"""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from cleave.gateway.failover.transcript import (
    CONSTANT_KEYS,
    CONTENT_KEYS,
    DATA_PREFIX,
    DONE_EVENT,
    EVENT_SEPARATOR,
    MAX_DEPTH,
    ChoiceTranscript,
    Event,
    JsonPath,
    SentText,
    TooDeepError,
    Transcript,
    decode_event,
    get_tool_call_key,
    is_costly,
)

_encode = msgspec.json.Encoder().encode
_DIFFERS = "answers otherwise than what the client has seen already"


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
        _check_size(event)
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
        """`transcript`: of what the client has now; later changes do not matter."""
        self._head = transcript.head
        self._has_usage = transcript.usage
        self._choices = {
            index: _ReplayedChoice(choice, transcript.num_ids if index == 0 else 0)
            for index, choice in transcript.choices.items()
        }

    def rewrite(self, event: bytes) -> bytes:
        """The new part of an event. Raises SpliceError when it differs from what was sent."""
        if event == DONE_EVENT[: -len(EVENT_SEPARATOR)]:
            return DONE_EVENT
        _check_size(event)
        value = decode_event(event)
        if value is None or "error" in value:
            return event + EVENT_SEPARATOR
        value |= self._head
        if self._head:
            value.pop("prompt_token_ids", None)
        choices = value.get("choices") or []
        if not choices:
            return b"" if self._has_usage else build_event(value)
        value["choices"] = [new for choice in choices if (new := self._trim_choice(choice))]
        return build_event(value) if value["choices"] else b""

    def _trim_choice(self, choice: Event) -> Event | None:
        """The new part of a choice; None when there is none."""
        sent = self._choices.get(choice.get("index", 0))
        if sent is None:
            return choice
        trimmed = {
            key: sent.trim(value, (key,)) if key in CONTENT_KEYS else value
            for key, value in choice.items()
        }
        trimmed.pop("prompt_token_ids", None)
        finish = choice.get("finish_reason")
        # The relay has to see that an engine gives the request up.
        ends = finish is not None and (finish == "abort" or not sent.finished)
        if ends and finish != "abort" and not sent.is_repeated:
            raise SpliceError(_DIFFERS)
        is_new = ends or any(_has_content(trimmed.get(key)) for key in CONTENT_KEYS)
        return trimmed if is_new else None


class _ReplayedChoice:
    """One choice that is generated again: what was sent of it, and what has come again."""

    def __init__(self, sent: ChoiceTranscript, num_ids: int) -> None:
        self.finished = sent.finished
        self._counts = {**sent.counts, ("token_ids",): num_ids}
        """By path, list elements that are still to come again."""
        self._lengths = {path: text.num_characters for path, text in sent.texts.items()}
        self._digests = {path: text.compute_digest() for path, text in sent.texts.items()}
        self._repeated: dict[JsonPath, SentText] = defaultdict(SentText)
        """The beginning of each text, as it has come again."""

    @property
    def is_repeated(self) -> bool:
        """Whether all text that was sent has come again."""
        return all(
            path[-1] in CONSTANT_KEYS or self._repeated[path].num_characters == length
            for path, length in self._lengths.items()
        )

    def trim(self, value: object, path: JsonPath) -> object:
        """The new part of a value. Raises TooDeepError."""
        if len(path) > MAX_DEPTH:
            raise TooDeepError
        if isinstance(value, str):
            return self._trim_text(value, path)
        if isinstance(value, dict):
            return {
                key: remaining
                for key, inner in value.items()
                if (remaining := self.trim(inner, (*path, key))) is not None or inner is None
            }
        if not isinstance(value, list):
            return value
        if path[-1] == "tool_calls":
            return self._trim_calls(value, path)
        left = self._counts.get(path, 0)
        if left:
            self._counts[path] = max(left - len(value), 0)
        return value[left:]

    def _trim_calls(self, calls: list[Event], path: JsonPath) -> list[Event]:
        trimmed = []
        for position, call in enumerate(calls):
            remaining = self.trim(call, (*path, get_tool_call_key(call, position)))
            if isinstance(remaining, dict) and any(
                _has_content(part) for key, part in remaining.items() if key != "index"
            ):
                trimmed.append(remaining)
        return trimmed

    def _trim_text(self, text: str, path: JsonPath) -> str | None:
        length = self._lengths.get(path, 0)
        if path[-1] in CONSTANT_KEYS:
            return None if length else text
        if not length:
            return text
        repeated = self._repeated[path]
        left = length - repeated.num_characters
        if left <= 0:
            return text
        repeated.add(text[:left])
        if len(text) >= left and repeated.compute_digest() != self._digests[path]:
            raise SpliceError(_DIFFERS)
        return text[left:]


def _check_size(event: bytes) -> None:
    if is_costly(event):
        raise SpliceError("sent an event that is too long for the rest of a stream")


def build_event(value: Event) -> bytes:
    """An event with this JSON."""
    return DATA_PREFIX + _encode(value) + EVENT_SEPARATOR


def _has_content(part: object) -> bool:
    """Whether it contains any text or list element."""
    if isinstance(part, dict):
        return any(_has_content(inner) for inner in part.values())
    return isinstance(part, str | list) and bool(part)
