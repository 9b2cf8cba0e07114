"""The rest of a stream, from another engine's events. Used by the relay of a stream that lost one.

Two ways. Continued: the engine was given prompt and tokens so far and only goes on; its events, of
whichever API, take the form of the first engine's. Replayed: it was given the request again, and
what the client has seen is taken off its answer. What is hard: a replay need not cut its events
like the first engine did, so text is taken off by length and compared on the way; an answer that
differs is no replay.
"""

from collections.abc import Sequence

import msgspec

from cleave.gateway.recovery.transcript import (
    BORDER,
    CONSTANTS,
    DATA,
    DONE,
    PARTS,
    Choice,
    Event,
    Path,
    Transcript,
    decode_event,
    name_element,
)

_encode = msgspec.json.Encoder().encode
_DIFFERS = "answers otherwise than what the client has seen already"


class SpliceError(Exception):
    """Another engine's answer is not the rest of this stream. Continues `instance NAME ...`."""


class Continued:
    """Events of /v1/completions, asked with prompt and tokens so far, as the rest of the stream."""

    def __init__(
        self, transcript: Transcript, *, chat: bool, tokens: int, again: Sequence[int] = ()
    ) -> None:
        """`tokens`: generated before, now part of the prompt.

        `again`: ids that come next and that the client has seen, but not their text.
        """
        self._head = transcript.head
        self._chat = chat
        self._tokens = tokens
        self._again = list(again)

    def turn(self, event: bytes) -> bytes:
        """One event as the first engine would have sent it. Raises SpliceError as a replay does."""
        value = decode_event(event)
        if value is None or "error" in value:
            return event + BORDER
        value |= self._head
        if self._chat:
            value["object"] = "chat.completion.chunk"
        value["choices"] = [self._turn_choice(choice) for choice in value.get("choices") or ()]
        usage = value.get("usage")
        if usage:
            usage["prompt_tokens"] -= self._tokens
            usage["completion_tokens"] = (usage["completion_tokens"] or 0) + self._tokens
        return build_event(value)

    def _turn_choice(self, choice: Event) -> Event:
        if self._again and choice.get("token_ids"):
            choice["token_ids"] = self._drop_seen(choice["token_ids"])
        if not self._chat:
            if "prompt_token_ids" in choice:
                choice["prompt_token_ids"] = None
            return choice
        turned: Event = {
            "index": choice.get("index", 0),
            "delta": {"content": choice.get("text", "")},
            "logprobs": None,
            "finish_reason": choice.get("finish_reason"),
        }
        if turned["finish_reason"] is not None:
            turned["stop_reason"] = choice.get("stop_reason")
        turned["token_ids"] = choice.get("token_ids")
        return turned

    def _drop_seen(self, ids: list[int]) -> list[int]:
        count = min(len(ids), len(self._again))
        if ids[:count] != self._again[:count]:
            raise SpliceError(_DIFFERS)
        del self._again[:count]
        return ids[count:]


class Replayed:
    """Events of the same request asked again, less what the client has seen."""

    def __init__(self, transcript: Transcript) -> None:
        self._seen = transcript
        self._met: dict[int, dict[Path, int]] = {}
        """By choice and place: how much has come again."""

    def turn(self, event: bytes) -> bytes:
        """What of an event is new. Raises SpliceError when it differs from what was seen."""
        if event == DONE[: -len(BORDER)]:
            return DONE
        value = decode_event(event)
        if value is None or "error" in value:
            return event + BORDER
        value |= self._seen.head
        if self._seen.head:
            value.pop("prompt_token_ids", None)
        choices = value.get("choices") or []
        if not choices:
            return b"" if self._seen.usage else build_event(value)
        value["choices"] = [left for choice in choices if (left := self._trim_choice(choice))]
        return build_event(value) if value["choices"] else b""

    def _trim_choice(self, choice: Event) -> Event | None:
        """The choice less what was seen; None when nothing is left."""
        index = choice.get("index", 0)
        seen = self._seen.choices.get(index, Choice())
        met = self._met.setdefault(index, {})
        trimmed = {
            key: _trim(value, (key,), seen, met) if key in PARTS else value
            for key, value in choice.items()
        }
        if index in self._seen.choices:
            trimmed.pop("prompt_token_ids", None)
        ends = choice.get("finish_reason") is not None and not seen.finished
        return trimmed if ends or any(_holds(trimmed.get(key)) for key in PARTS) else None


def build_event(value: Event) -> bytes:
    """One event."""
    return DATA + _encode(value) + BORDER


def _trim(value: object, path: Path, seen: Choice, met: dict[Path, int]) -> object:
    """A part of a choice less what was seen of it."""
    if isinstance(value, str):
        return _trim_text(value, path, seen, met)
    if isinstance(value, dict):
        return {
            key: left
            for key, inner in value.items()
            if (left := _trim(inner, (*path, key), seen, met)) is not None or inner is None
        }
    if not isinstance(value, list):
        return value
    if path[-1] == "tool_calls":
        calls = []
        for place, call in enumerate(value):
            name = name_element(call, place)
            left = _trim(call, (*path, name), seen, met)
            if isinstance(left, dict) and any(
                _holds(part) for key, part in left.items() if key != "index"
            ):
                calls.append(left)
        return calls
    before = met.get(path, 0)
    met[path] = before + len(value)
    return value[max(0, seen.counts.get(path, 0) - before) :]


def _trim_text(text: str, path: Path, seen: Choice, met: dict[Path, int]) -> str | None:
    known = seen.texts.get(path, "")
    if path[-1] in CONSTANTS:
        return None if known else text
    before = met.get(path, 0)
    met[path] = before + len(text)
    again = known[before : before + len(text)]
    if not text.startswith(again):
        raise SpliceError(_DIFFERS)
    return text[len(again) :]


def _holds(part: object) -> bool:
    """Whether anything is in it."""
    if isinstance(part, dict):
        return any(_holds(inner) for inner in part.values())
    if isinstance(part, list):
        return bool(part)
    return isinstance(part, str) and bool(part)
