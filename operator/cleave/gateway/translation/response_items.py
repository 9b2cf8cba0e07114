"""The items of an answer of OpenAI's Responses API, and their texts. Pure.

Used by `responses_answer`. What is hard: a stream repeats the text of an item when the item is
complete, and all of them when it ends. So a text is kept as the JSON that was sent, in pieces,
and events are encoded with a mark in its place and go to the client in pieces.
"""

from collections.abc import Sequence

import msgspec

from cleave.gateway.translation.chat_types import UNTRANSLATABLE
from cleave.gateway.translation.responses_tools import ToolName

Item = dict[str, object]


class FreeText(msgspec.Struct, gc=False):
    """The arguments of a call of a tool that takes free text."""

    input: str


_decode_free_text = msgspec.json.Decoder(FreeText).decode
_MARK = b"\0"
TEXT = msgspec.Raw(b'"%b"' % _MARK)
"""In the place of a text; JSON never contains this byte."""


def fill_texts(data: bytes, texts: Sequence[Sequence[bytes]]) -> list[bytes]:
    """The data in pieces, with these texts, each in pieces, in the place of its first marks."""
    first, *rest = data.split(_MARK, len(texts))
    pieces = [first]
    for text, part in zip(texts, rest, strict=True):
        pieces += text
        pieces.append(part)
    return pieces


class ItemBlock:
    """An item of the answer and how its events are named."""

    event = ""
    part: str | None = None
    """Type of its content; None: it has no content."""
    delta_fields: Item = {}  # noqa: RUF012 - never changed
    is_buffered = False
    """Whether its text is sent when it is complete."""

    def __init__(self, item_id: str) -> None:
        self.item_id = item_id
        self.text: Sequence[bytes] = ()
        """All of it, once it is complete: JSON without its quotes, in pieces."""
        self.status = "completed"

    def build_item(self, text: object, status: str) -> Item:
        """The item with so much text."""
        raise NotImplementedError

    def build_part(self, text: object) -> Item:
        """Its content."""
        return {"type": self.part, "text": text}

    def describe_text(self, text: object) -> Item:
        """Its text in a done event."""
        return {"text": text}

    def read_text(self, text: str) -> str:
        """Its text, from what the engine wrote."""
        return text


class TextBlock(ItemBlock):
    """A message."""

    event = "response.output_text"
    part = "output_text"
    delta_fields: Item = {"logprobs": []}  # noqa: RUF012

    def build_item(self, text: object, status: str) -> Item:
        """The item with so much text."""
        content = [] if status == "in_progress" else [self.build_part(text)]
        item: Item = {"id": self.item_id, "type": "message", "status": status}
        return item | {"role": "assistant", "content": content}

    def build_part(self, text: object) -> Item:
        """Its content."""
        return {"type": self.part, "text": text, "annotations": [], "logprobs": []}

    def describe_text(self, text: object) -> Item:
        """Its text in a done event."""
        return {"text": text, "logprobs": []}


class ReasoningBlock(ItemBlock):
    """What the model thought before."""

    event = "response.reasoning_text"
    part = "reasoning_text"

    def build_item(self, text: object, status: str) -> Item:
        """The item with so much text."""
        content = [] if status == "in_progress" else [self.build_part(text)]
        item: Item = {"id": self.item_id, "type": "reasoning", "status": status}
        return item | {"summary": [], "content": content}


class CallBlock(ItemBlock):
    """A call of a function, whose text is its arguments."""

    event = "response.function_call_arguments"

    def __init__(self, item_id: str, call_id: str, tool: ToolName) -> None:
        super().__init__(item_id)
        self._call_id = call_id
        self._tool = tool

    def build_item(self, text: object, status: str) -> Item:
        """The item with so much text."""
        item: Item = {"id": self.item_id, "type": "function_call", "status": status}
        if self._tool.namespace is not None:
            item["namespace"] = self._tool.namespace
        return item | {"call_id": self._call_id, "name": self._tool.name, "arguments": text}

    def describe_text(self, text: object) -> Item:
        """Its text in a done event."""
        return {"name": self._tool.name, "arguments": text}


class FreeTextBlock(CallBlock):
    """A call of a tool that takes free text, which the engine writes as an argument."""

    event = "response.custom_tool_call_input"
    is_buffered = True

    def build_item(self, text: object, status: str) -> Item:
        """The item with so much text."""
        item: Item = {"id": self.item_id, "type": "custom_tool_call", "status": status}
        return item | {"call_id": self._call_id, "name": self._tool.name, "input": text}

    def describe_text(self, text: object) -> Item:
        """Its text in a done event."""
        return {"input": text}

    def read_text(self, text: str) -> str:
        """Its text, from what the engine wrote."""
        try:
            return _decode_free_text(text).input
        except UNTRANSLATABLE:
            return text
