"""How much of a prompt was cached, where the decode engine cannot know it. No I/O.

Made by attempts, read by relays. A decode engine that follows a prefill counts all that it pulls as
cached; the prefill engine's answer, which comes at about the same time, has the right number.
"""

import re

from cleave.gateway.upstream.collected_answer import AnswerBody

_USAGE_BYTES = 4 << 10
# Within a text of JSON the quotes would have backslashes.
_KEY = b'"prompt_tokens_details":'
_MEMBER = re.compile(rb"%b(null|\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\})" % _KEY)


class PromptDetails:
    """The details of one prompt that the decode engine's `usage` should have."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = b"null"

    def read(self, prefill: bytes) -> None:
        """Take those of the prefill engine's answer."""
        if (found := _MEMBER.search(prefill)) is not None:
            self._value = found[1]

    def replace(self, events: bytes) -> bytes:
        """Complete events of the decode engine, or its answer, with these details."""
        return _MEMBER.sub(lambda _: _KEY + self._value, events)

    def replace_in_answer(self, answer: AnswerBody) -> AnswerBody:
        """The decode engine's answer, which may be large, with these details."""
        if isinstance(answer, bytes):
            return self.replace(answer)
        at = answer.usage_at
        found = _MEMBER.search(answer.read(at, at + _USAGE_BYTES)) if at >= 0 else None
        if found is not None:
            answer.replace(at + found.start(), at + found.end(), _KEY + self._value)
        return answer
