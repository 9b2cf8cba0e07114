"""Translates turns of Anthropic's Messages API, and their blocks, into messages of a chat. Pure.

Used by `messages_request`. Results of tools are messages of their own, which contain text only;
what else they have follows them, or is named in its place.
"""

from collections.abc import Iterable

import msgspec

from cleave.gateway.http.errors import build_bad_request
from cleave.gateway.translation.request_fields import (
    EMPTY_TEXT,
    JoinedText,
    JsonText,
    ObjectReader,
    Piece,
    build_unsupported,
    check_text,
    encode_raw,
    is_list,
    is_null,
    is_text,
    read_list,
)
from cleave.time_slices import Steps

_DOCUMENTS = ("text", "content")
"""Kinds of documents that are text; others are files."""
_NAME_LENGTH = 80


class ImageSource(msgspec.Struct, gc=False):
    """An image, or the text of a document."""

    type: str
    media_type: str = "image/jpeg"
    data: msgspec.Raw = EMPTY_TEXT
    url: msgspec.Raw = EMPTY_TEXT
    content: msgspec.Raw = EMPTY_TEXT


class Block(msgspec.Struct, gc=False):
    """A block of content, of any type."""

    type: str
    text: msgspec.Raw = EMPTY_TEXT
    thinking: msgspec.Raw = EMPTY_TEXT
    title: msgspec.Raw = EMPTY_TEXT
    source: msgspec.Raw = msgspec.Raw(b"null")
    id: msgspec.Raw = EMPTY_TEXT
    name: msgspec.Raw = EMPTY_TEXT
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: msgspec.Raw = EMPTY_TEXT
    tool_name: msgspec.Raw = EMPTY_TEXT
    tool: msgspec.Raw = msgspec.Raw(b"null")
    content: msgspec.Raw = EMPTY_TEXT


class ConversationTurn(msgspec.Struct, gc=False):
    """A turn of the conversation."""

    role: str
    content: msgspec.Raw


BLOCKS, _SOURCES = ObjectReader(Block), ObjectReader(ImageSource)
TURNS = ObjectReader(ConversationTurn)


def add_turn(chat: JsonText, turn: ConversationTurn, path: str) -> Steps[None]:
    """Add the messages of one turn: results of tools are messages of their own."""
    content, place = turn.content, f"{path}.content"
    if turn.role not in ("user", "assistant"):
        raise build_unsupported(f"{path}.role", turn.role, "user, assistant or system")
    elif not is_list(content):
        if not is_text(content):
            raise build_bad_request(f"{place} must be a text or a list of blocks", place)
        head = b'{"role":"%b","content":' % turn.role.encode()
        yield from chat.add(head, content, b"},")
    elif turn.role == "assistant":
        yield from _add_assistant_blocks(chat, content, place)
    else:
        yield from _add_user_blocks(chat, content, place)


def _add_assistant_blocks(chat: JsonText, content: msgspec.Raw, path: str) -> Steps[None]:
    text, thought, calls = JoinedText(), JoinedText(), JsonText(b"[")
    blocks = yield from read_list(content, path)
    for number in range(len(blocks)):
        place = f"{path}[{number}]"
        block = yield from BLOCKS.read(blocks[number], place)
        if block.type == "text":
            yield from text.add(check_text(block.text, f"{place}.text"))
        elif block.type == "tool_use":
            yield from calls.add(b'{"id":', check_text(block.id, f"{place}.id"))
            name = check_text(block.name, f"{place}.name")
            yield from calls.add(b',"type":"function","function":{"name":', name)
            yield from calls.add_quoted(b',"arguments":', block.input, b"}},")
        elif block.type == "thinking":
            yield from thought.add(check_text(block.thinking, f"{place}.thinking"))
        elif block.type != "redacted_thinking":
            raise build_unsupported(f"{place}.type", block.type, "text, thinking or tool_use")
        yield
    yield from chat.add(b'{"role":"assistant"')
    if text.count or len(calls) == 1:
        yield from chat.add(b',"content":', text.to_raw())
    if thought.count:
        yield from chat.add(b',"reasoning":', thought.to_raw())
    if len(calls) > 1:
        yield from chat.add(b',"tool_calls":', calls.end_list())
    yield from chat.add(b"},")


def _add_user_blocks(chat: JsonText, content: msgspec.Raw, path: str) -> Steps[None]:
    parts, num_parts, has_results = JsonText(b"["), 0, False
    text: msgspec.Raw | None = None
    blocks = yield from read_list(content, path)
    for number in range(len(blocks)):
        place = f"{path}[{number}]"
        block = yield from BLOCKS.read(blocks[number], place)
        if len(blocks) == 1 and block.type == "text":
            text = check_text(block.text, f"{place}.text")
            num_parts = 1
        elif block.type == "tool_result":
            has_results = True
            num_parts += yield from _add_tool_result(chat, parts, block, place)
        else:
            part, text = yield from _convert_part(block, place)
            num_parts += 1
            yield from parts.add(*part, b",")
        yield
    if num_parts == 1 and text is not None:
        yield from chat.add(b'{"role":"user","content":', text, b"},")
    elif num_parts or not has_results:
        yield from chat.add(b'{"role":"user","content":', parts.end_list(), b"},")


def _add_tool_result(chat: JsonText, parts: JsonText, block: Block, path: str) -> Steps[int]:
    """Add the message of a tool's result, and its images to the user's parts, because the messages
    of tools contain text only; the number of images. What engines leave out of results of any tool
    is named in its place."""
    text, references, images = JoinedText(b"\\n"), JsonText(b"["), 0
    if not is_list(block.content):
        yield from text.add(check_text(block.content, f"{path}.content"))
    else:
        results = yield from read_list(block.content, f"{path}.content")
        for number in range(len(results)):
            place = f"{path}.content[{number}]"
            result = yield from BLOCKS.read(results[number], place)
            if result.type == "tool_reference":
                name = check_text(result.tool_name, f"{place}.tool_name")
                name = name if name != EMPTY_TEXT else check_text(result.name, f"{place}.name")
                yield from references.add(b'{"type":"tool_reference","name":', name, b"},")
                continue
            if not (yield from _is_readable(result, place)):
                yield from text.add(encode_raw(f"[{result.type[:_NAME_LENGTH]} left out]"))
                continue
            part, part_text = yield from _convert_part(result, place)
            if part_text is not None:
                yield from text.add(part_text)
            else:
                images += 1
                yield from parts.add(*part, b",")
            yield
    call_id = check_text(block.tool_use_id, f"{path}.tool_use_id")
    yield from chat.add(b'{"role":"tool","tool_call_id":', call_id)
    yield from chat.add(b',"content":', text.to_raw(), b"},")
    if len(references) > 1:
        yield from chat.add(b'{"role":"tool","tool_call_id":', call_id)
        yield from chat.add(b',"content":', references.end_list(), b"},")
    return images


def _is_readable(block: Block, path: str) -> Steps[bool]:
    """Whether a block of a tool's result is one that models read."""
    if block.type != "document" or is_null(block.source):
        return block.type in ("text", "image", "search_result")
    source = yield from _SOURCES.read(block.source, f"{path}.source")
    return source.type in _DOCUMENTS


def _convert_part(block: Block, path: str) -> Steps[tuple[list[Piece], msgspec.Raw | None]]:
    """(a part of a message, its text); the text is None of an image."""
    if block.type == "text":
        return _build_text_part(check_text(block.text, f"{path}.text"))
    if block.type == "search_result":
        heads = (each for each in (block.title, block.source) if is_text(each))
        return _build_text_part((yield from _join_texts(heads, block.content, f"{path}.content")))
    if block.type not in ("image", "document") or is_null(block.source):
        raise build_unsupported(
            f"{path}.type", block.type, "text, image, document, search_result or tool_result"
        )
    path += ".source"
    source = yield from _SOURCES.read(block.source, path)
    if block.type == "document" and source.type == "text":
        return _build_text_part(check_text(source.data, f"{path}.data"))
    if block.type == "document" and source.type == "content":
        return _build_text_part((yield from _join_texts((), source.content, f"{path}.content")))
    before, after = b'{"type":"image_url","image_url":{"url":', b"}}"
    if block.type == "image" and source.type == "url":
        return [before, check_text(source.url, f"{path}.url"), after], None
    if block.type == "image" and source.type == "base64":
        begin = encode_raw(f"data:{source.media_type};base64,")
        data = memoryview(check_text(source.data, f"{path}.data"))[1:]
        return [before, memoryview(begin)[:-1], data, after], None
    raise build_unsupported(
        f"{path}.type", source.type, "base64 or url for images, text or content for documents"
    )


def _join_texts(
    heads: Iterable[msgspec.Raw], content: msgspec.Raw, path: str
) -> Steps[msgspec.Raw]:
    """Texts that are not empty and those of content, a line each."""
    text = JoinedText(b"\\n")
    for head in heads:
        if head != EMPTY_TEXT:
            yield from text.add(head)
    if not is_list(content):
        yield from text.add(check_text(content, path))
        return text.to_raw()
    blocks = yield from read_list(content, path)
    for number in range(len(blocks)):
        place = f"{path}[{number}]"
        block = yield from BLOCKS.read(blocks[number], place)
        if block.type != "text":
            raise build_unsupported(f"{place}.type", block.type, "text")
        yield from text.add(check_text(block.text, f"{place}.text"))
        yield
    return text.to_raw()


def _build_text_part(text: msgspec.Raw) -> tuple[list[Piece], msgspec.Raw | None]:
    return [b'{"type":"text","text":', text, b"}"], text
