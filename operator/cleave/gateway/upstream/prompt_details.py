"""How much of a prompt was cached, where the decode engine cannot know it. Pure.

Used by attempts and relays. A decode engine that follows a prefill counts all that it pulls as
cached; the prefill engine's answer, which comes at about the same time, has the right number.
"""

import re

UNKNOWN = b"null"

# Within a text of JSON the quotes would have backslashes.
_KEY = b'"prompt_tokens_details":'
_MEMBER = re.compile(rb"%b(null|\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)*+\})" % _KEY)


def find_prompt_details(body: bytes) -> bytes:
    """The details of the prompt in an engine's answer."""
    found = _MEMBER.search(body)
    return UNKNOWN if found is None else found[1]


def replace_prompt_details(body: bytes, details: bytes) -> bytes:
    """An answer, or events of one, with these details of the prompt."""
    return _MEMBER.sub(lambda _: _KEY + details, body)
