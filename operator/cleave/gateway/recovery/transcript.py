"""What a client has seen of a stream, read from its bytes. Used only once an engine is lost. Pure.

What is hard: engines put the same text into events in different ways (two tokens in one event when
a reader lags, none in another), so what counts is the text and the tokens, not the events.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

BORDER = b"\n\n"
DONE = b"data: [DONE]\n\n"
DATA = b"data: "

Event = dict[str, Any]
Path = tuple[str | int, ...]

CONSTANTS = frozenset(("role", "id", "type", "name"))
"""Texts of a delta that come once and are not added up."""

_decode = msgspec.json.Decoder().decode


@dataclass(slots=True)
class Choice:
    """What has come of one choice."""

    texts: dict[Path, str] = field(default_factory=dict)
    """By place in the event: `text`, `delta.content`, arguments of a tool call, ..."""
    counts: dict[Path, int] = field(default_factory=dict)
    """Lengths of lists with an entry per token."""
    ids: list[int] = field(default_factory=list)
    """Tokens, when the engine tells them."""
    settled: int = 0
    """Of them, those whose text has come: a character may take several tokens."""
    finished: bool = False


@dataclass(slots=True)
class Transcript:
    """A stream so far."""

    head: Event = field(default_factory=dict)
    """`id`, `created` and `model` of its first event."""
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: bool = False
    """Whether the tokens were counted up at the end."""
    done: bool = False
    foreign: bool = False
    """Whether something came that is no event of a completion."""

    def read(self, events: bytes) -> None:
        """Take in whole events."""
        for event in events.split(BORDER):
            if event == DONE[: -len(BORDER)]:
                self.done = True
            elif event:
                value = decode_event(event)
                if value is None:
                    self.foreign = True
                else:
                    self._add(value)

    @property
    def finished(self) -> bool:
        """Whether every choice has its last token."""
        return bool(self.choices) and all(choice.finished for choice in self.choices.values())

    @property
    def silent(self) -> bool:
        """Whether nothing has come that another answer could not begin with."""
        return not any(
            choice.ids
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
        for stated in choices:
            choice = self.choices.setdefault(stated.get("index", 0), Choice())
            said = False
            for path, value in walk(stated):
                if isinstance(value, str):
                    constant = path[-1] in CONSTANTS
                    choice.texts[path] = value if constant else choice.texts.get(path, "") + value
                    said = said or bool(value and not constant)
                else:
                    choice.counts[path] = choice.counts.get(path, 0) + len(value)
            choice.ids += stated.get("token_ids") or ()
            if said:
                choice.settled = len(choice.ids)
            choice.finished = choice.finished or stated.get("finish_reason") is not None


def walk(choice: Event) -> Iterator[tuple[Path, str | list[Any]]]:
    """Every text and every per-token list of a choice, with its place."""
    yield from _walk((), {key: choice[key] for key in PARTS if key in choice})


PARTS = ("text", "delta", "logprobs", "token_ids")
"""Of a choice, what grows with its tokens."""


def _walk(path: Path, value: object) -> Iterator[tuple[Path, str | list[Any]]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk((*path, key), inner)
    elif isinstance(value, list):
        if path and path[-1] == "tool_calls":
            for place, inner in enumerate(value):
                yield from _walk((*path, name_element(inner, place)), inner)
        else:
            yield path, value


def name_element(value: object, place: int) -> int:
    """A tool call's own index, which tells it from others wherever it stands."""
    index = value.get("index") if isinstance(value, dict) else None
    return index if isinstance(index, int) else place


def decode_event(event: bytes) -> Event | None:
    """The JSON of an event; None when it carries none."""
    if not event.startswith(DATA):
        return None
    try:
        value = _decode(event[len(DATA) :])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
