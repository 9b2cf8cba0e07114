"""The client of a request that was translated: it receives another API's answer.

Made by the handlers between a proxied request and the client's connection. The proxied request
handles a chat completion like any other, splits, resumes and meters it, and knows nothing of the
translation. What is hard: it writes the bytes of a response, so the head is changed here: a stream
is framed again, and a response that is not streamed is sent once all of it has come.
"""

import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import cast

from cleave.gateway.http.buffer_budget import BufferBudget
from cleave.gateway.http.errors import RESPONSE_TOO_LONG, GatewayError, build_engine_error
from cleave.gateway.http.headers import LAST_CHUNK, MAX_JOINED_BYTES, REASONS, encode_chunk
from cleave.gateway.proxy.client_stream import ClientStream
from cleave.gateway.translation.answer import (
    NO_ROOM,
    UNREADABLE,
    Answer,
    StreamedAnswer,
    StreamTranslator,
)
from cleave.gateway.translation.chat_types import UNTRANSLATABLE

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 << 10
"""Of an answer that is translated in one go; longer ones can be streamed."""
FREE_BYTES = ROOM_BYTES = 16 << 10
"""More kept bytes of a stream count toward the buffer budget, so many at a time."""
PIECE_BYTES = 64 << 10
"""Short pieces of events are joined to about so many bytes."""

_HEAD_END = b"\r\n\r\n"
_LENGTH = b"\r\ncontent-length: "
_CHUNKED = b"\r\ntransfer-encoding: chunked"
_STATUS = slice(len(b"HTTP/1.1 "), len(b"HTTP/1.1 200"))


class TranslatedClient:
    """Translates one response on its way to the client."""

    chunked = False
    """The proxied request writes plain events; chunks are made of what they become."""

    def __init__(
        self,
        client: ClientStream,
        answer: Answer,
        budget: BufferBudget,
        count_prompt: Callable[[], int] = int,
        send_again: Callable[[], bool] = bool,
    ) -> None:
        """`budget`: for what a stream keeps. `count_prompt`: counts the tokens of the prompt, once
        a stream has begun. `send_again`: translates a request that was refused in another way;
        returns whether there is one."""
        self._client = client
        self._answer = answer
        self._count_prompt = count_prompt
        self._send_again = send_again
        self._budget = budget
        self._room = FREE_BYTES
        """Bytes that may be kept without a further reservation."""
        self._head = b""
        """Of a response that is not streamed, without its length and its end."""
        self._body: list[bytes | memoryview] = []
        self._translator: StreamTranslator | None = None
        """None: the response is not streamed, or its head has not come."""

    @property
    def keep_alive(self) -> bool:
        """Whether the client may send another request over its connection."""
        return self._client.keep_alive

    @property
    def blocked(self) -> bool:
        """Whether the client takes bytes more slowly than they come."""
        return self._client.blocked

    def write(self, data: bytes | memoryview) -> None:
        """Take bytes of the engine's response, first its head, which comes in one piece."""
        if not self._head:
            head, _, data = bytes(data).partition(_HEAD_END)
            self._begin(head)
        if not data:
            return
        if self._translator is None:
            self._body.append(data)
        else:
            self._convert(self._translator, bytes(data))

    def write_pieces(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Take many bytes."""
        for piece in pieces:
            self.write(piece)

    def end(self, reusable: bool) -> None:
        """The response is complete."""
        if self._translator is None:
            if int(self._head[_STATUS]) == HTTPStatus.BAD_REQUEST and self._send_again():
                return
            self._respond()
        else:
            self._send(self._translator.fail(UNREADABLE))
            if self._client.chunked:
                self._client.write(LAST_CHUNK)
        self._release()
        self._client.end(reusable)

    def drop(self) -> None:
        """Close the connection at once."""
        self._release()
        self._client.drop()

    def _begin(self, head: bytes) -> None:
        self._head, is_complete, _ = head.rpartition(_LENGTH)
        if not is_complete:
            self._head = head
            streamed = cast("StreamedAnswer", self._answer)
            self._translator = StreamTranslator(streamed, self._count_prompt)
            self._client.write(head + (_CHUNKED if self._client.chunked else b"") + _HEAD_END)

    def _convert(self, translator: StreamTranslator, events: bytes) -> None:
        """Raises GatewayError when the stream cannot go on."""
        if translator.has_ended:
            return
        pieces = translator.convert(events)
        if translator.text_bytes > self._room and not self._make_room(translator.text_bytes):
            pieces += translator.fail(NO_ROOM)
        self._send(pieces)
        if translator.fault is not None:
            raise build_engine_error(HTTPStatus.BAD_GATEWAY, translator.fault.message)

    def _make_room(self, kept: int) -> bool:
        growth = max(kept - self._room, ROOM_BYTES)
        is_reserved = self._budget.reserve(growth)
        self._room += growth if is_reserved else 0
        return is_reserved

    def _send(self, pieces: Sequence[bytes]) -> None:
        """Send events as a chunk, long ones as the client takes them."""
        client, size = self._client, sum(map(len, pieces))
        if size <= MAX_JOINED_BYTES:
            if events := b"".join(pieces):
                client.write(encode_chunk(events) if client.chunked else events)
            return
        if client.chunked:
            pieces = [b"%x\r\n" % size, *pieces, b"\r\n"]
        client.write_pieces(_join_short(pieces))

    def _release(self) -> None:
        self._budget.release(self._room - FREE_BYTES)
        self._room = FREE_BYTES

    def _respond(self) -> None:
        head, body = self._head, self._build_body()
        if isinstance(body, GatewayError):
            status = body.status
            body = self._answer.build_error(status, body.to_json())
            head = b"HTTP/1.1 %d %b\r\n%b" % (status, REASONS[status], head.partition(b"\r\n")[2])
        head = b"%b%b%d%b" % (head, _LENGTH, len(body), _HEAD_END)
        if len(body) <= MAX_JOINED_BYTES:
            self._client.write(head + body)
        else:
            self._client.write_pieces([head, body])

    def _build_body(self) -> bytes | GatewayError:
        """The answer in the other API, or why there is none."""
        pieces, self._body = self._body, []
        if sum(map(len, pieces)) > MAX_BODY_BYTES:
            return RESPONSE_TOO_LONG
        status, body = int(self._head[_STATUS]), b"".join(pieces)
        try:
            if status == HTTPStatus.OK:
                return self._answer.build_body(body)
            return self._answer.build_error(status, body)
        except UNTRANSLATABLE as error:
            log.warning("an engine's response cannot be translated: %s", error)
            return build_engine_error(HTTPStatus.BAD_GATEWAY, UNREADABLE.message)


def _join_short(pieces: Sequence[bytes]) -> Sequence[bytes]:
    """The same bytes in few pieces: each costs a call of the kernel, and long ones a copy."""
    joined: list[bytes] = []
    short, size = list[bytes](), 0
    for piece in pieces:
        if size > PIECE_BYTES or len(piece) > MAX_JOINED_BYTES:
            joined.append(b"".join(short))
            short, size = [], 0
        if len(piece) > MAX_JOINED_BYTES:
            joined.append(piece)
        else:
            short.append(piece)
            size += len(piece)
    return [*joined, b"".join(short)]
