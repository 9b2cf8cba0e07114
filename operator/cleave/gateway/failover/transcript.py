"""What a client has received of a stream, parsed once an engine is lost. Pure.

What is hard: engines divide the same text into events in different ways (two tokens in one event
when a reader lags, none in another), so text and tokens are collected, not events.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

EVENT_SEPARATOR = b"\n\n"
DONE_EVENT = b"data: [DONE]\n\n"
DATA_PREFIX = b"data: "

Event = dict[str, Any]
JsonPath = tuple[str | int, ...]

CONSTANT_KEYS = frozenset(("role", "id", "type", "name"))
"""Keys of a delta whose text comes once and is not concatenated."""

_decode = msgspec.json.Decoder().decode


@dataclass(slots=True)
class ChoiceTranscript:
    """What has been sent of one choice."""

    texts: dict[JsonPath, str] = field(default_factory=dict)
    """By path in the event: `text`, `delta.content`, arguments of a tool call, ..."""
    counts: dict[JsonPath, int] = field(default_factory=dict)
    """By path: lengths of lists with one entry per token."""
    token_ids: list[int] = field(default_factory=list)
    """Token ids, if the engine sends them."""
    num_settled: int = 0
    """How many of `token_ids` have had their text sent: a character may take several tokens."""
    finished: bool = False


@dataclass(slots=True)
class Transcript:
    """What has been sent of a stream."""

    head: Event = field(default_factory=dict)
    """`id`, `created` and `model` of its first event."""
    choices: dict[int, ChoiceTranscript] = field(default_factory=dict)
    usage: bool = False
    """Whether the final token counts were sent."""
    done: bool = False
    has_unknown_events: bool = False
    """Whether anything was sent that is not an event of a completion."""

    def read(self, events: bytes) -> None:
        """Add complete events."""
        for event in events.split(EVENT_SEPARATOR):
            if event == DONE_EVENT[: -len(EVENT_SEPARATOR)]:
                self.done = True
            elif event:
                value = decode_event(event)
                if value is None:
                    self.has_unknown_events = True
                else:
                    self._add(value)

    @property
    def finished(self) -> bool:
        """Whether every choice has a finish reason."""
        return bool(self.choices) and all(choice.finished for choice in self.choices.values())

    @property
    def is_empty(self) -> bool:
        """Whether nothing was sent that another response could not begin with."""
        return not any(
            choice.token_ids
            or choice.finished
            or any(text and path[-1] != "role" for path, text in choice.texts.items())
            for choice in self.choices.values()
        )

    def _add(self, event: Event) -> None:
        if not self.head:
            self.head = {key: event[key] for key in ("id", "created", "model") if key in event}
        choices = event.get("choices") or []
        if not choices and event.get("usage"):
            self.usage = True
        for new in choices:
            choice = self.choices.setdefault(new.get("index", 0), ChoiceTranscript())
            has_text = False
            for path, value in walk_choice(new):
                if isinstance(value, str):
                    constant = path[-1] in CONSTANT_KEYS
                    choice.texts[path] = value if constant else choice.texts.get(path, "") + value
                    has_text = has_text or bool(value and not constant)
                else:
                    choice.counts[path] = choice.counts.get(path, 0) + len(value)
            choice.token_ids += new.get("token_ids") or ()
            if has_text:
                choice.num_settled = len(choice.token_ids)
            choice.finished = choice.finished or new.get("finish_reason") is not None


def walk_choice(choice: Event) -> Iterator[tuple[JsonPath, str | list[Any]]]:
    """Every text and every per-token list of a choice, with its path."""
    yield from _walk_value((), {key: choice[key] for key in CONTENT_KEYS if key in choice})


CONTENT_KEYS = ("text", "delta", "logprobs", "token_ids")
"""Keys of a choice whose values grow with its tokens."""


def _walk_value(path: JsonPath, value: object) -> Iterator[tuple[JsonPath, str | list[Any]]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk_value((*path, key), inner)
    elif isinstance(value, list):
        if path and path[-1] == "tool_calls":
            for position, inner in enumerate(value):
                yield from _walk_value((*path, get_tool_call_key(inner, position)), inner)
        else:
            yield path, value


def get_tool_call_key(value: object, position: int) -> int:
    """A tool call's own index, which identifies it in every event; or else its position."""
    index = value.get("index") if isinstance(value, dict) else None
    return index if isinstance(index, int) else position


def decode_event(event: bytes) -> Event | None:
    """The JSON of an event; None when it has none."""
    if not event.startswith(DATA_PREFIX):
        return None
    try:
        value = _decode(event[len(DATA_PREFIX) :])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
