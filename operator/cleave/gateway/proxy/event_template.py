"""What the events of a stream have in common, so that most of them need not be parsed.

Nearly all events of a stream differ only in their text and the ids of its tokens. The relay learns
the rest from one event; those that match it contain nothing else: no error, no end, no handoff.
What is hard: that must hold for every text and every id. So the form around them is proven with the
parser, once for all streams: the same event with another text and no ids says that text alone.
"""

import re
from typing import Final

from cleave.gateway.failover.transcript import JsonPath, walk_choice
from cleave.gateway.upstream.response_types import decode_stream_event

IDS = b',"token_ids":['
PROMPT_IDS = b',"prompt_token_ids":['
"""Within a text of JSON the first quote would have a backslash."""
MAX_FORMS = 16
"""Forms that are remembered: two APIs, texts at three paths, engines of several versions."""
MAX_FORM_BYTES = 1_024

_IDS_BYTES = len(IDS)
_CHOICES = b'"choices":['
_FRAME = re.compile(rb'data: \{(?:"[a-z_]+":(?:"[^"\\\n]*+"|[0-9]++),)*+')
"""An event up to its choices: flat members."""
_TEXT_KEY = re.compile(rb'"[a-z_]+":"(?=[^"])')
_TEXT = re.compile(rb'(?:[^"\\\n]++|\\[^\n])++')
_QUOTE, _BACKSLASH, _LINE_END = b'"\\\n'
_ID_CHARACTERS = b"0123456789,"


class EventForm:
    """The form of events of any stream: what surrounds text and ids."""

    __slots__ = ("after", "before", "before_bytes", "between", "path", "shown_end")

    def __init__(self, before: bytes, between: bytes, after: bytes, path: JsonPath) -> None:
        """`before`: from the choices to the text; `between`: up to the ids; `after`: the rest,
        with the bracket that ends them. `path`: of the text."""
        self.before = before
        self.before_bytes = len(before)
        self.between = between
        self.after = after
        self.shown_end = between[:-_IDS_BYTES] + after[1:]
        """What follows the text in an event without ids."""
        self.path = path


class EventTemplate:
    """Events of one stream, which differ in text and ids only."""

    __slots__ = ("_after", "_between", "_end", "_start_bytes", "path", "shown_end", "start")

    def __init__(self, start: bytes, form: EventForm) -> None:
        """`start`: the event up to its text."""
        self.start = start
        self.shown_end = form.shown_end
        self.path = form.path
        self._start_bytes = len(start)
        self._between = form.between
        self._after = form.after
        self._end = -len(form.after)

    def match(self, event: bytes) -> tuple[bytes, bytes] | None:
        """(the text, as it lies within JSON, the ids with commas between them) of an event that
        has both; None: it may contain something else."""
        # Half the time of a regular expression for all of it.
        if not event.startswith(self.start) or not event.endswith(self._after):
            return None
        text, found, ids = event[self._start_bytes : self._end].rpartition(self._between)
        if not found or not (ids.isdigit() or _are_ids(ids)) or not text:
            return None
        if _QUOTE in text or _BACKSLASH in text or _LINE_END in text:
            return (text, ids) if _TEXT.fullmatch(text) is not None else None
        return text, ids


def are_ids(ids: bytes) -> bool:
    """Whether it is a part of a list of ids, as engines write it."""
    return not ids.translate(None, _ID_CHARACTERS)


def _are_ids(ids: bytes) -> bool:
    return ids[:1].isdigit() and not ids.translate(None, _ID_CHARACTERS)


_forms: Final[dict[tuple[bytes, bytes, bytes], EventForm]] = {}
"""By what is before, between and after text and ids. An engine has few, all streams the same."""


def find_template(event: bytes) -> EventTemplate | None:
    """The template of an event of a known form."""
    for form in _forms.values():
        start = event.find(form.before)
        if start > 0 and _FRAME.fullmatch(event, 0, start) is not None:
            template = EventTemplate(event[: start + form.before_bytes], form)
            if template.match(event) is not None:
                return template
    return None


def learn_form(event: bytes) -> None:
    """Remember the form of an event with text and ids, if those that match it can be known."""
    ids_start = event.rfind(IDS)
    choices_start = event.find(_CHOICES)
    if PROMPT_IDS in event or not 0 < choices_start < ids_start:
        return
    text_start = 0
    for key in _TEXT_KEY.finditer(event, choices_start, min(ids_start, choices_start + 512)):
        text_start = key.end()
    text = _TEXT.match(event, text_start, ids_start) if text_start else None
    ids_end = event.find(b"]", ids_start)
    if text is None or ids_end < 0:
        return
    before = event[choices_start:text_start]
    between, after = event[text.end() : ids_start + _IDS_BYTES], event[ids_end:]
    form = before, between, after
    if form in _forms or sum(map(len, form)) > MAX_FORM_BYTES:
        return
    path = _find_only_text(b"{" + before + b"x" + between + after)
    if path is not None:
        if len(_forms) == MAX_FORMS:
            _forms.clear()
        _forms[form] = EventForm(before, between, after, path)


def _find_only_text(data: bytes) -> JsonPath | None:
    """The path of the text `x`, if it is all that this event says, of the first choice."""
    event = decode_stream_event(data)
    choices = event.choices if event is not None else None
    if event is None or event.usage is not None or not choices or len(choices) > 1:
        return None
    (choice,) = choices
    values = [(path, value) for path, value in walk_choice(choice) if value]
    if choice.index or choice.finish_reason is not None or len(values) != 1:
        return None
    path, value = values[0]
    return path if value == "x" else None
