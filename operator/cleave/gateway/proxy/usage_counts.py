"""Counts a stream's tokens by the usage that its engine reports in each event. No I/O.

Used by the relay for streams without ids of tokens (several choices or prompts, hidden reasoning).
The gateway requested the usage for itself (`http.stream_fields`), so what the client did not
request is removed. Each event has the tokens of its own choice so far, the last one those of all
choices together.
"""

import re

from cleave.gateway.http.stream_fields import TokenReport
from cleave.gateway.upstream.answers import parse_usage

_USAGE = b',"usage":'
"""Within a text of JSON the first quote would have a backslash."""
_DETAILS = rb"\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\}"
_VALUE = re.compile(rb"null|\{[^{}]*+(?:%b[^{}]*+)*+\}" % _DETAILS)
"""Tokens of a prompt are counted by kind of its media, three levels deep."""
_END_BYTES = 16 << 10
"""Of an event: where its usage lies, and at its beginning its choices."""
_INDEX = re.compile(rb'"choices":\[\{"index":([0-9]{1,9})[,}]')
_NO_CHOICES = b'"choices":[],'


class UsageCounts:
    """The tokens of one stream."""

    __slots__ = ("_by_choice", "_report", "is_counted", "num_tokens", "prompt_tokens")

    def __init__(self, report: TokenReport) -> None:
        self._report = report
        self._by_choice: dict[int, int] = {}
        self.is_counted = False
        """Whether the engine has reported any."""
        self.num_tokens = 0
        """Output tokens so far, of all choices."""
        self.prompt_tokens = 0
        """0: not known yet."""

    def take(self, event: bytes) -> bytes:
        """Count the usage in an event; returns the event for the client, or nothing."""
        start = event.rfind(_USAGE, -_END_BYTES)
        value = _VALUE.match(event, start + len(_USAGE)) if start >= 0 else None
        if value is None:
            return event
        report, is_final = self._report, _NO_CHOICES in event[:_END_BYTES]
        usage = parse_usage(value[0])
        if usage is not None:
            self.is_counted = True
            tokens = usage.completion_tokens or 0
            if is_final:
                self.num_tokens = max(self.num_tokens, tokens)
                self.prompt_tokens = usage.prompt_tokens
            else:
                self._count(event, tokens)
                if report.num_prompts == 1:
                    self.prompt_tokens = usage.prompt_tokens
        if report.shows_usage if is_final else report.shows_running_usage:
            return event
        return b"" if is_final else event[:start] + event[value.end() :]

    def _count(self, event: bytes, tokens: int) -> None:
        found = _INDEX.search(event, 0, _END_BYTES)
        if found is None:
            return
        index, limit = int(found[1]), self._report.num_choices
        if index >= limit:
            return
        growth = tokens - self._by_choice.get(index, 0)
        if growth > 0:
            self._by_choice[index] = tokens
            self.num_tokens += growth
