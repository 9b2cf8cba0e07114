"""Heads of HTTP messages as bytes. Pure; one formatting operation per head, for speed."""

import http
import re

REASONS = {status.value: status.phrase.encode() for status in http.HTTPStatus}

TRACEPARENT = b"traceparent"
FORWARDED_FOR = b"x-forwarded-for"
ORIGIN = b"origin"
REQUESTED_METHOD = b"access-control-request-method"
CORS_REQUEST_HEADERS = frozenset((ORIGIN, REQUESTED_METHOD))
"""What browsers send with requests of pages of other origins."""
HOST = b"host"
FETCH_SITE = b"sec-fetch-site"
FETCH_MODE = b"sec-fetch-mode"

JSON_CONTENT = b"content-type: application/json\r\n"
TEXT_CONTENT = b"content-type: text/plain; charset=utf-8\r\n"
CONNECTION_CLOSE = b"connection: close\r\n"
STREAM_CONTENT = b"content-type: text/event-stream; charset=utf-8\r\n"
UNBUFFERED = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
"""Of streams: caches and nginx pass each event on as it comes."""
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE_RESPONSE = b"HTTP/1.1 100 Continue\r\n\r\n"

MAX_JOINED_BYTES = 16 << 10
"""Longer bodies are not copied behind their head: that takes memory and time."""

CONTENT_TYPE = b"content-type"
JSON_TYPE = b"application/json"
BYTES_TYPE = b"application/octet-stream"
STREAM_TYPE = b"text/event-stream"
CROSS_SITE_HEADERS = frozenset((HOST, ORIGIN, FETCH_SITE, FETCH_MODE, CONTENT_TYPE))
"""What tells pages of other sites from other clients."""
ENGINE_HEADERS = frozenset((CONTENT_TYPE, b"metadata"))
"""Headers of engines that clients receive; `metadata` describes embeddings that come as bytes."""
_REQUEST_ID_BYTES = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:/+=@-"
_REQUEST_ID_TABLE = bytes(byte if byte in _REQUEST_ID_BYTES else byte ^ 255 for byte in range(256))
"""Changes every byte that is not allowed."""
_MAX_REQUEST_ID_BYTES = 128
_UNSAFE = re.compile(rb"[^\x21-\x7e]")

Headers = dict[bytes, bytes]


def build_request_head(
    path: bytes, host: bytes, request_id: bytes, length: int, fields: bytes = b""
) -> bytes:
    """The head of a request to an engine; nothing of the client's head is copied.
    `fields`: additional header lines, each with its line end."""
    return (
        b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n"
        b"x-request-id: %b\r\n%bcontent-length: %d\r\n\r\n"
        % (path, host, request_id, fields, length)
    )


def build_get_head(path: bytes, host: bytes, request_id: bytes, fields: bytes = b"") -> bytes:
    """The head of a request to an engine without a body; `fields` as above."""
    head = b"GET %b HTTP/1.1\r\nhost: %b\r\nx-request-id: %b\r\n%bcontent-length: 0\r\n\r\n"
    return head % (path, host, request_id, fields)


def build_response_head(status: int, fields: bytes, request_id: bytes, length: int) -> bytes:
    """The head of a response of known length; `fields` are header lines with their line ends."""
    reason = REASONS.get(status, b"Unknown")
    head = b"HTTP/1.1 %d %b\r\n%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (status, reason, fields, request_id, length)


def build_stream_head(status: int, fields: bytes, request_id: bytes, chunked: bool) -> bytes:
    """The head of a response whose length is unknown."""
    coding = b"transfer-encoding: chunked\r\n" if chunked else b""
    head = b"HTTP/1.1 %d %b\r\n%b%bx-request-id: %b\r\n%b\r\n"
    reason = REASONS.get(status, b"Unknown")
    return head % (status, reason, fields, UNBUFFERED, request_id, coding)


def build_forwarded_headers(headers: Headers) -> bytes:
    """An engine's header lines for the client; `headers`: some of ENGINE_HEADERS."""
    return b"".join([b"%b: %b\r\n" % field for field in headers.items() if field[1].isascii()])


def encode_chunk(piece: bytes) -> bytes:
    """One chunk of a chunked body; `piece` must not be empty, since that would end the body."""
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def is_valid_request_id(value: bytes) -> bool:
    """Whether a client's X-Request-Id is safe to send back."""
    return 0 < len(value) <= _MAX_REQUEST_ID_BYTES and value.translate(_REQUEST_ID_TABLE) == value


def build_header_line(name: str, value: str) -> bytes:
    """One header line with its line end; unsafe bytes of the value are replaced by `?`."""
    return b"%b: %b\r\n" % (name.encode(), sanitize_header_value(value))


def sanitize_header_value(text: str) -> bytes:
    """A name as a header value, unsafe bytes replaced by `?`."""
    return _UNSAFE.sub(b"?", text.encode())
