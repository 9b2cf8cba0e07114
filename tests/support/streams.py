"""Streams as vLLM writes them, of any tokens divided into events in any way."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

DONE = b"data: [DONE]\n\n"
PROMPT_IDS = [11, 12, 13]


@dataclass(frozen=True)
class Token:
    """A token; its text may be empty: a character may take several."""

    id: int
    text: str


texts = st.one_of(
    st.text(max_size=6),
    st.sampled_from(
        ["", " word", '"', "\\", '\\"', "\n\n", "data: [DONE]", '","token_ids":[7]', "é", "😀", "]"]
    ),
)
tokens = st.builds(Token, st.integers(0, 200_000), texts)
token_lists = st.lists(tokens, min_size=1, max_size=40)
sizes = st.lists(st.integers(1, 9), max_size=40)
borders = st.lists(st.integers(0, 1 << 20), max_size=30)


def group(values: Sequence[Token], sizes: Sequence[int]) -> list[list[Token]]:
    """The tokens of each event."""
    groups, at = [], 0
    for size in itertools.chain(sizes, itertools.repeat(1)):
        if at >= len(values):
            return groups
        groups.append(list(values[at : at + size]))
        at += size
    return groups


def encode(value: dict[str, Any]) -> bytes:
    return (
        b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
    )


def build_frame(*, chat: bool) -> dict[str, Any]:
    kind = "chat.completion.chunk" if chat else "text_completion"
    return {"id": "cmpl-1", "object": kind, "created": 1, "model": "m"}


def build_event(
    part: Sequence[Token],
    *,
    chat: bool = False,
    key: str = "content",
    finish: str | None = None,
    ids: bool = True,
    **choice: Any,
) -> bytes:
    """The event of these tokens; `key`: of a chat's text."""
    text = "".join(token.text for token in part)
    said: dict[str, Any] = {"delta": {key: text}} if chat else {"text": text}
    value = {"index": 0, **said, "logprobs": None, "finish_reason": finish, **choice}
    if ids:
        value["token_ids"] = [token.id for token in part]
    return encode({**build_frame(chat=chat), "choices": [value]})


def build_role(ids: Sequence[int] = PROMPT_IDS) -> bytes:
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
    value = {**build_frame(chat=True), "choices": [choice | {"finish_reason": None}]}
    return encode(value | {"prompt_token_ids": list(ids)})


def build_stream(groups: Sequence[Sequence[Token]], *, chat: bool) -> list[bytes]:
    """All events with tokens, none of them the last one."""
    if chat:
        return [build_role(), *[build_event(part, chat=True) for part in groups]]
    first, *rest = groups
    return [
        build_event(first, prompt_token_ids=PROMPT_IDS),
        *[build_event(part, prompt_token_ids=None) for part in rest],
    ]


def cut(stream: bytes, borders: Sequence[int]) -> list[bytes]:
    """The stream in pieces that end anywhere."""
    marks = [0, *sorted(border % len(stream) for border in borders), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(marks) if b > a]
