"""What a client has received of a stream, as far as another engine needs it to continue. No I/O.

Filled by the relay, read once an engine is lost. What is hard: it is kept for every stream, so it
has to be small and cost next to nothing per token. Ids of tokens stay the text that the engine
wrote, about seven bytes each. Of texts only their lengths and digests are kept, with which a replay
is compared; events are parsed in batches of a few KiB. All of it is reserved in the buffer budget:
a stream for which there is no room goes on, but no other engine can continue it.

Engines divide the same text into events in different ways (two tokens in one event when a reader
lags, none in another), so text and tokens are collected, not events.
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import msgspec

from cleave.gateway.http.buffer_budget import BufferBudget
from cleave.gateway.upstream.response_types import StreamChoice, decode_stream_event, decode_text

EVENT_SEPARATOR = b"\n\n"
DONE_EVENT = b"data: [DONE]\n\n"
DATA_PREFIX = b"data: "
_DATA_BYTES = len(DATA_PREFIX)

Event = dict[str, Any]
JsonPath = tuple[str | int, ...]

CONSTANT_KEYS = frozenset(("role", "id", "type", "name"))
"""Keys of a delta whose text comes once and is not concatenated."""
CONTENT_KEYS = ("text", "delta", "logprobs", "token_ids")
"""Keys of a choice whose values grow with its tokens."""
_PLAIN_PATHS = frozenset({("text",), ("delta", "content"), ("delta", "role")})
"""Where tokens lie as text, not parsed into something else (reasoning, tool calls)."""

MAX_PENDING_BYTES = 4 << 10
"""Events and texts that are kept as they are before they are read."""
MAX_PARSED_BYTES = 64 << 10
MAX_PARSED_VALUES = 1_024
"""Of one event: reading, comparing and writing 1,024 values takes 3 ms. A larger one is not read,
so it cannot be compared with a replay. One with 20 log-probabilities a token may have 6 tokens."""
MAX_TEXTS = 256
"""Texts and lists of one choice that are compared: 4 us each when they begin."""
MAX_PATH_CHARS = 128
"""Of the path of one of them, in Python's form."""
MAX_DEPTH = 16
"""Parts of a path; walking deeper values takes long."""
MAX_CHOICES = 1_024
"""Choices of a stream of which the number is not known."""
ROOM_BYTES = 1 << 10
"""Step in which room for ids of tokens is reserved."""
_CHOICE_BYTES = 512
_TEXT_BYTES = 1 << 10
"""Memory of a choice and of one of its texts: Python's objects and the state of a digest."""
_UNFINISHED = b'"finish_reason":null'
_VALUE_BEGINS = (b",", b"[", b"{")


class TooDeepError(ValueError):
    """A value is nested deeper than `MAX_DEPTH`."""


class SentText:
    """A text of which so much has been sent."""

    __slots__ = ("_digest", "num_characters")

    def __init__(self) -> None:
        self.num_characters = 0
        self._digest = blake2b(digest_size=16)

    def add(self, text: str) -> None:
        """More of it."""
        self.num_characters += len(text)
        self._digest.update(text.encode(errors="surrogatepass"))

    def compute_digest(self) -> bytes:
        """Of the whole text."""
        return self._digest.digest()


class ChoiceTranscript:
    """What has been sent of one choice."""

    __slots__ = ("counts", "finished", "texts")

    def __init__(self) -> None:
        self.texts: dict[JsonPath, SentText] = {}
        """By path in the event: `text`, `delta.content`, arguments of a tool call, ..."""
        self.counts: dict[JsonPath, int] = {}
        """By path: lengths of lists with one entry per token, except those of token ids."""
        self.finished = False


class Transcript:
    """What has been sent of a stream."""

    __slots__ = (
        "_counted_bytes", "_num_choices", "_num_counted", "_pending", "_pending_bytes",
        "_place", "_reserved", "_settled_bytes", "budget", "choices", "done", "has_output",
        "has_parsed_output", "has_unknown_events", "head", "ids_room", "is_dropped", "keeps_ids",
        "keeps_text", "output_ids", "prompt_ids", "shows_ids", "text", "text_bytes", "text_path",
        "usage",
    )  # fmt: skip

    def __init__(
        self,
        budget: BufferBudget | None = None,
        *,
        keeps_ids: bool = True,
        keeps_text: bool = True,
        shows_ids: bool = False,
        num_choices: int = 0,
    ) -> None:
        """`keeps_ids`: it can be continued from the ids of its tokens; `keeps_text`: it can be
        replayed. `shows_ids`: the client receives them. `num_choices`: that were requested; 0: not
        known."""
        self.budget = budget
        self._reserved = 0
        self.keeps_ids = keeps_ids
        self.keeps_text = keeps_text
        self.shows_ids = shows_ids
        self._num_choices = num_choices
        self.is_dropped = False
        """There was no room: nothing is kept any more."""
        self.head: dict[str, msgspec.Raw] = {}
        """`id`, `created` and `model` of its first event."""
        self.choices: dict[int, ChoiceTranscript] = {}
        self.prompt_ids = b""
        """The prompt's token ids as the engine wrote them, with commas between them."""
        self.output_ids = bytearray()
        """Those of the only choice, with commas between those of an event and a bracket after
        them; only the latest, if they are not kept."""
        self.ids_room = 0
        """Bytes of `output_ids` for which there is room; `add_room` makes more."""
        self._num_counted = self._counted_bytes = 0
        """Tokens in this beginning of `output_ids`, with those that were not kept."""
        self._settled_bytes = 0
        """Of `output_ids`: tokens whose text has been sent. A character may take several."""
        self._place = 0
        """The length of `output_ids` at the last event that was added as a whole."""
        self.text = bytearray()
        """The newest text, as it lies within JSON at `text_path`."""
        self.text_path: JsonPath = ()
        self._pending: list[tuple[JsonPath | None, bytes, int]] = []
        """(path, text), or (None, event), with the bytes of `output_ids` after it: unread."""
        self._pending_bytes = 0
        self.usage = False
        """Whether the final token counts were sent."""
        self.done = False
        self.has_output = False
        """Whether anything was sent that another response could not begin with."""
        self.has_parsed_output = False
        """Whether the engine parsed tokens into something other than text."""
        self.has_unknown_events = False
        """Whether anything was sent that is not an event of a completion."""
        self.text_bytes = 0
        """Of all texts, as far as they were read."""

    # --- what the relay calls ---

    def add_event(self, event: bytes, *, is_measured: bool = False) -> None:
        """Add a complete event, without its ids; `is_measured`: `text_bytes` must contain it."""
        is_kept = self.keeps_ids or self.keeps_text or is_measured
        if not is_kept and self.has_output and _UNFINISHED in event:
            return
        self._pending.append((None, event, self._place if self.keeps_ids else 0))
        self._pending_bytes += len(event)
        if self._pending_bytes > MAX_PENDING_BYTES or not is_kept:
            self.read()

    def skip_event(self, event: bytes) -> None:
        """An event that is not read, so that the stream cannot be continued."""
        if not self.is_dropped:
            self.drop()
        self.has_output = self.has_unknown_events = True
        self.text_bytes += len(event)

    def close_text(self) -> None:
        """Something else follows `text`, or it is long enough."""
        self._pending.append((self.text_path, bytes(self.text), 0))
        self._pending_bytes += len(self.text)
        self.text.clear()
        if self._pending_bytes > MAX_PENDING_BYTES:
            self.read()

    def set_prompt_ids(self, ids: bytes) -> None:
        """Keep the prompt's token ids; once, before those of the output."""
        if self.keeps_ids and self._reserve(len(ids) + ROOM_BYTES):
            self.prompt_ids = ids
            self.ids_room += ROOM_BYTES

    def set_path(self, path: JsonPath) -> None:
        """From now on text at this path and ids are added directly, without their events."""
        self.text_path = path
        self.has_output = True
        self.has_parsed_output = self.has_parsed_output or path not in _PLAIN_PATHS

    def end_run(self, ids: bytes = b"") -> None:
        """What was added directly is followed by another event, which has these ids."""
        if self.text:
            self.close_text()
        if len(self.output_ids) > self._place:
            # All of it had text.
            self._settled_bytes = len(self.output_ids)
        if ids:
            self.output_ids += ids + b"]"
            if len(self.output_ids) > self.ids_room:
                self.add_room()
        self._place = len(self.output_ids)

    def add_room(self) -> None:
        """Make room for further ids: reserve it, or forget those that are not kept."""
        if not self.keeps_ids:
            self._forget_ids()
            self.ids_room = ROOM_BYTES
            return
        room = len(self.output_ids) + ROOM_BYTES
        if self._reserve(room - self.ids_room):
            self.ids_room = room

    @property
    def num_ids(self) -> int:
        """Tokens of which ids have come, also if they are not kept."""
        ids, at = self.output_ids, self._counted_bytes
        self._num_counted += ids.count(b",", at) + ids.count(b"]", at)
        self._counted_bytes = len(ids)
        return self._num_counted

    def read(self) -> None:
        """Read what was added and not read."""
        self.end_run()
        pending, self._pending, self._pending_bytes = self._pending, [], 0
        for path, data, place in pending:
            if path is not None:
                self._read_text(path, data)
            elif data == DONE_EVENT:
                self.done = True
            elif is_costly(data):
                self._skip_event(data, place)
            else:
                self._read_event(data, place)

    def drop(self) -> None:
        """Keep nothing any more: no other engine can continue the stream."""
        self.is_dropped = True
        self.close()

    def close(self) -> None:
        """The stream has ended: give all room back."""
        self.keeps_ids = self.keeps_text = False
        self.prompt_ids = b""
        self._forget_ids()
        for choice in self.choices.values():
            choice.texts, choice.counts = {}, {}
        if self.budget is not None:
            self.budget.release_for_stream(self._reserved)
        self._reserved = 0

    # --- what is asked once an engine is lost ---

    @property
    def finished(self) -> bool:
        """Whether every choice has a finish reason."""
        finished = sum(choice.finished for choice in self.choices.values())
        return finished > 0 and finished >= (self._num_choices or len(self.choices))

    @property
    def num_settled(self) -> int:
        """Tokens whose text has been sent."""
        ids, end = self.output_ids, self._settled_bytes
        return ids.count(b",", 0, end) + ids.count(b"]", 0, end)

    @property
    def settled_ids(self) -> bytes:
        """Their ids, with a comma after each."""
        return bytes(self.output_ids[: self._settled_bytes]).replace(b"]", b",")

    def list_unsettled_ids(self) -> list[int]:
        """Ids of the tokens whose text has not been sent."""
        unsettled = self.output_ids[self._settled_bytes :].replace(b"]", b",")
        return [int(each) for each in unsettled.split(b",") if each]

    def drop_unsettled_ids(self) -> None:
        """They are generated again."""
        self._num_counted = self.num_ids - len(self.list_unsettled_ids())
        del self.output_ids[self._settled_bytes :]
        self._counted_bytes = self._place = len(self.output_ids)

    # --- reading ---

    def _read_event(self, data: bytes, place: int) -> None:
        event = decode_stream_event(data[_DATA_BYTES:]) if data.startswith(DATA_PREFIX) else None
        if event is None:
            self.has_unknown_events = True
            return
        if not self.head:
            names = ("id", "created", "model")
            self.head = {name: raw for name in names if len(raw := getattr(event, name))}
        choices = event.choices or []
        if not choices and event.usage:
            self.usage = True
        try:
            for choice in choices:
                self._read_choice(choice, place)
        except TooDeepError:
            self._skip_event(data, place)

    def _read_choice(self, new: StreamChoice, place: int) -> None:
        choice = self._find_choice(new.index)
        if choice is None:
            self.has_unknown_events = True
            return
        has_text = False
        for path, value in walk_choice(new):
            if isinstance(value, str):
                has_text = has_text or bool(value and path[-1] not in CONSTANT_KEYS)
                self._add_text(choice, path, value)
            elif value and self.keeps_text and (path in choice.counts or self._add(choice, path)):
                choice.counts[path] = choice.counts.get(path, 0) + len(value)
        if has_text:
            self._settle(place)
        choice.finished = choice.finished or new.finish_reason is not None
        has_ids = place > 0 or (self.shows_ids and self.num_ids > 0)
        self.has_output = self.has_output or choice.finished or has_ids

    def _read_text(self, path: JsonPath, data: bytes) -> None:
        """Read text as it lies within JSON; it belongs to the first choice."""
        text, choice = decode_text(b'"%b"' % data), self._find_choice(0)
        if text is None or choice is None:
            self.has_unknown_events = True
        else:
            self._add_text(choice, path, text)

    def _add_text(self, choice: ChoiceTranscript, path: JsonPath, text: str) -> None:
        if not text:
            return
        if path[-1] != "role":
            self.has_output = True
            self.text_bytes += len(text.encode(errors="surrogatepass"))
        if path not in _PLAIN_PATHS:
            self.has_parsed_output = True
        if not self.keeps_text:
            return
        sent = choice.texts.get(path)
        if sent is None:
            if not self._add(choice, path):
                return
            sent = choice.texts[path] = SentText()
        sent.add(text)

    def _add(self, choice: ChoiceTranscript, path: JsonPath) -> bool:
        """Make room for another text or list; False: there is none."""
        if len(choice.texts) + len(choice.counts) == MAX_TEXTS or len(repr(path)) > MAX_PATH_CHARS:
            self.keeps_text = False
            return False
        return self._reserve(_TEXT_BYTES)

    def _find_choice(self, index: int) -> ChoiceTranscript | None:
        """The choice with this number; None: there can be none."""
        choice = self.choices.get(index)
        if choice is None and 0 <= index < (self._num_choices or MAX_CHOICES):
            choice = self.choices[index] = ChoiceTranscript()
            if self.keeps_text or self.keeps_ids:
                self._reserve(_CHOICE_BYTES)
        return choice

    def _skip_event(self, data: bytes, place: int) -> None:
        """An event that is too large to be parsed. Its text counts as sent, and not by itself."""
        self.keeps_text = False
        self.has_output = True
        self.text_bytes += len(data)
        self._settle(place)
        choice = self._find_choice(0)
        if choice is not None and _UNFINISHED not in data and self._num_choices == 1:
            choice.finished = True

    def _settle(self, place: int) -> None:
        """The text of the tokens up to here has been sent."""
        self._settled_bytes = max(self._settled_bytes, min(place, len(self.output_ids)))

    def _forget_ids(self) -> None:
        self._num_counted = self.num_ids
        self.output_ids.clear()
        self._counted_bytes = self._settled_bytes = self._place = self.ids_room = 0

    def _reserve(self, count: int) -> bool:
        if self.budget is not None and not self.budget.reserve_for_stream(count):
            self.drop()
            return False
        self._reserved += count
        return True


def walk_choice(choice: StreamChoice) -> Iterator[tuple[JsonPath, str | list[Any]]]:
    """Every text and every list with an entry per token of a choice, with its path.
    Raises TooDeepError."""
    if choice.text is not None:
        yield ("text",), choice.text
    if choice.delta is not None:
        yield from _walk_value(("delta",), choice.delta)
    for key, values in (choice.logprobs or {}).items():
        if values is not None:
            yield ("logprobs", key), values


def _walk_value(path: JsonPath, value: object) -> Iterator[tuple[JsonPath, str | list[Any]]]:
    if len(path) > MAX_DEPTH:
        raise TooDeepError
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk_value((*path, key), inner)
    elif isinstance(value, list):
        if path[-1] == "tool_calls":
            for position, inner in enumerate(value):
                yield from _walk_value((*path, get_tool_call_key(inner, position)), inner)
        else:
            yield path, value


def get_tool_call_key(value: object, position: int) -> int:
    """A tool call's own index, which identifies it in every event; or else its position."""
    index = value.get("index") if isinstance(value, dict) else None
    return index if isinstance(index, int) else position


def is_costly(event: bytes) -> bool:
    """Whether reading an event would take too long."""
    size = len(event)
    if size <= MAX_PARSED_VALUES:
        return False
    return size > MAX_PARSED_BYTES or sum(map(event.count, _VALUE_BEGINS)) > MAX_PARSED_VALUES


def decode_event(event: bytes) -> Event | None:
    """The JSON of an event; None when it has none."""
    if not event.startswith(DATA_PREFIX):
        return None
    try:
        value = msgspec.json.decode(event[_DATA_BYTES:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
