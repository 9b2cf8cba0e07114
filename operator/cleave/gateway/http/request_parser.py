"""Parses the requests of one connection. Used by the client connection; no I/O.

What is hard: requests arrive in arbitrary pieces, several may arrive at once, and an invalid one
may follow valid ones, which must still be answered. So complete requests queue in `ready`, and the
error of the next one stays in `error` until they are answered. And a client may send without end:
every part of a request that is buffered, here or in httptools, has a limit in bytes.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

import httptools

from cleave.gateway.http.byte_buffer import ByteBuffer
from cleave.gateway.http.completion_request import Body
from cleave.gateway.http.errors import (
    INTERNAL_FAULT,
    GatewayError,
    build_bad_request,
    build_payload_too_large,
)
from cleave.gateway.http.headers import FORWARDED_FOR

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 1_024
MAX_LENGTH_DIGITS = 19
MAX_FRAMING_RUN_BYTES = 8 << 10
"""Limit of bytes of a chunked body without content: a chunk's extensions, or all trailers."""
MIN_BODY_RATE = 64 << 10
"""Bytes per second; a body may take the idle timeout plus its transfer time at this rate."""
_FORWARDED_FOR_BYTES = len(FORWARDED_FOR)
_OBJECT_BYTES = 128
"""Memory of a header's name and value, or of a piece of the path, besides their text."""

_READ_HEADERS = frozenset(
    (
        b"authorization", b"content-encoding", b"content-length", b"expect", b"transfer-encoding",
        b"x-api-key", FORWARDED_FOR, b"x-request-id",
    )
)  # fmt: skip

_TOO_LONG_HEAD = GatewayError(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"the request's head is longer than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers",
)
_TOO_MUCH_FRAMING = build_bad_request(
    f"a chunk's extensions, or the trailers, are longer than {MAX_FRAMING_RUN_BYTES} bytes, or all "
    "of a body's framing is longer than a body may be"
)
_NO_LENGTH = build_bad_request(f"Content-Length has more than {MAX_LENGTH_DIGITS} digits")
_UNKNOWN_VERSION = build_bad_request("only HTTP/1.0 and HTTP/1.1 are supported")
_UNKNOWN_CODING = build_bad_request("the only supported transfer coding is chunked, once")
_UNKNOWN_EXPECTATION = GatewayError(HTTPStatus.EXPECTATION_FAILED, "unknown expectation")
_CHUNKED_UPGRADE = build_bad_request("a request with an Upgrade header cannot have a chunked body")


class HttpRequest:
    """A complete request."""

    __slots__ = ("body", "headers", "http11", "keep_alive", "method", "path")

    def __init__(
        self,
        method: bytes,
        path: bytes,
        headers: dict[bytes, bytes],
        http11: bool,
        keep_alive: bool,
    ) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        """Lowercase names and values of the headers that the gateway reads."""
        self.http11 = http11
        self.keep_alive = keep_alive
        self.body: Body = b""


class RequestParser:
    """Parser of one connection. Its on_ methods are httptools' callbacks.
    Callbacks that run several times per request do little, as that of a list instead of a Python
    method; the collected parts are processed later."""

    def __init__(
        self,
        max_body_bytes: int,
        check: Callable[[HttpRequest], GatewayError | None],
        extra_headers: frozenset[bytes] = frozenset(),
    ) -> None:
        """`check`: validates a head before its body; an error rejects the request and discards the
        body. `extra_headers`: lowercase names of more headers to keep."""
        self._header_names = _READ_HEADERS | extra_headers if extra_headers else _READ_HEADERS
        self.ready: list[HttpRequest] = []
        """Complete requests, oldest first."""
        self.error: GatewayError | None = None
        """Error of the request after them; parsing has stopped."""
        self.rejected: HttpRequest | None = None
        """The request of `error` as far as it was read; None: not even its head was."""
        self.expects_continue = False
        """The client waits for `100 Continue` before it sends the body."""
        self._max_body_bytes = max_body_bytes
        self._check = check
        self._url: list[bytes] = []
        self._raw_headers: dict[bytes, bytes] = {}
        """Headers, of duplicates the first, but the last X-Forwarded-For; or trailers, which are
        ignored."""
        self._body_pieces: list[bytes] = []
        """Pieces of the body from the latest read."""
        self.on_url = self._url.append
        self.on_body = self._body_pieces.append
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._data = b""
        """The data being parsed."""
        self._head_bytes = 0
        """Upper bound of the bytes so far of an incomplete head."""
        self._request: HttpRequest | None = None
        self._is_checked = False
        self._body: ByteBuffer | None = None
        """Of a body that comes in several reads."""
        self._body_bytes_read = 0
        """Bytes of the body so far, framing included."""
        self._framing_run_bytes = 0
        """Bytes of framing since the last content."""
        self._raw_body_remaining = 0

    @property
    def reading_body(self) -> bool:
        """Whether a head is complete and its body is not."""
        return self._request is not None

    @property
    def body_bytes(self) -> int:
        """Content bytes of an incomplete body."""
        return len(self._body or b"")

    @property
    def buffered_bytes(self) -> int:
        """Approximate memory of an incomplete request."""
        if self._request is not None:
            return self.body_bytes
        return self._head_bytes + _OBJECT_BYTES * (len(self._raw_headers) + len(self._url))

    def feed(self, data: bytes) -> None:
        """Parse more data; the results are in `ready`, `error` and `expects_continue`."""
        rest = self._data = data
        self._head_bytes += len(data)
        try:
            while rest and self.error is None and self._parser is not None:
                if self._raw_body_remaining:
                    rest = self._take_raw_body(rest)
                    continue
                try:
                    self._parser.feed_data(rest)
                    rest = b""
                except httptools.HttpParserUpgrade as upgrade:
                    rest = rest[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            self.error = build_bad_request("the request is not valid HTTP")
            if isinstance(error, httptools.HttpParserCallbackError):
                self.error = INTERNAL_FAULT
                asyncio.get_running_loop().call_exception_handler({"exception": error})
        self._data = b""
        if self.error is None:
            if self._request is not None:
                self._collect_body(self._request, len(data))
            elif self._head_bytes > MAX_HEAD_BYTES and not self.ready:
                self.error = _TOO_LONG_HEAD
        if self.error is not None:
            self._discard()

    def reject(self, error: GatewayError) -> None:
        """Stop parsing; the incomplete request is discarded and rejected after those in `ready`."""
        self.error = self.error or error
        self._discard()

    def close(self) -> None:
        """Free the buffers and the httptools parser, which has a reference cycle with this one."""
        self._discard()
        self.ready.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line, or a trailer."""
        if len(name) == _FORWARDED_FOR_BYTES and name.lower() == FORWARDED_FOR:
            # A proxy may append a line of its own after those that the client has sent.
            self._raw_headers[FORWARDED_FOR] = value
        else:
            self._raw_headers.setdefault(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete: validate it before the body arrives."""
        parser = self._parser
        assert parser is not None
        names, raw, version = self._header_names, self._raw_headers, parser.get_http_version()
        is_too_long = len(raw) > MAX_HEADERS
        if is_too_long:
            raw.clear()
        # In reverse, so that the first one counts of names that differ only in case, too.
        headers = {
            low: value for name, value in reversed(raw.items()) if (low := name.lower()) in names
        }
        request = HttpRequest(
            parser.get_method(),
            b"".join(self._url).partition(b"?")[0],
            headers,
            version == "1.1",
            parser.should_keep_alive(),
        )
        self._request = request
        self._is_checked = False
        # The read that contains the end of the head does not count.
        self._body_bytes_read = self._framing_run_bytes = -len(self._data)
        self._url.clear()
        raw.clear()
        length = headers.get(b"content-length")
        if self._head_bytes > MAX_HEAD_BYTES:
            is_too_long = is_too_long or self._measure_head() > MAX_HEAD_BYTES
        if is_too_long:
            self.error = _TOO_LONG_HEAD
        elif not request.http11 and version != "1.0":
            self.error = _UNKNOWN_VERSION
        elif length is None and not _is_chunked_only(headers.get(b"transfer-encoding", b"chunked")):
            self.error = _UNKNOWN_CODING
        elif length is not None and len(length.strip()) > MAX_LENGTH_DIGITS:
            self.error = _NO_LENGTH
        elif length is not None and int(length) > self._max_body_bytes:
            self.error = build_payload_too_large(self._max_body_bytes)
        elif parser.should_upgrade():
            self._start_raw_body(request)
        elif b"expect" in headers:
            self._handle_expect(request)

    def on_message_complete(self) -> None:
        """A request is complete."""
        if self._raw_body_remaining:
            return
        request, self._request = self._request, None
        assert request is not None
        if self._body is not None or len(self._body_pieces) != 1:
            request.body = self._add_pieces().take()
            self._body = None
        else:
            request.body = self._body_pieces.pop()
        if len(request.body) > self._max_body_bytes:
            self.error = self.error or build_payload_too_large(self._max_body_bytes)
            # Not counted as buffered, while the connection lingers.
            request.body = b""
            self.rejected = request
        self._raw_headers.clear()
        self._head_bytes = 0
        self.expects_continue = False
        if self.error is None:
            self.ready.append(request)

    def _collect_body(self, request: HttpRequest, read_bytes: int) -> None:
        """Append the body's pieces to one buffer: many small objects take far more memory."""
        if not self._is_checked:
            self._is_checked = True
            self.error = self._check(request)
            if self.error is not None:
                return
        self._raw_headers.clear()
        self._head_bytes = 0
        self._body_bytes_read += read_bytes
        self._framing_run_bytes = 0 if self._body_pieces else self._framing_run_bytes + read_bytes
        size, limit, run = len(self._add_pieces()), self._max_body_bytes, self._framing_run_bytes
        if size > limit:
            self.error = build_payload_too_large(limit)
        elif run > MAX_FRAMING_RUN_BYTES or self._body_bytes_read - size > limit:
            self.error = _TOO_MUCH_FRAMING

    def _add_pieces(self) -> ByteBuffer:
        """Append the pieces from the latest read to the body."""
        if self._body is None:
            self._body = ByteBuffer()
        # Chunks may be of one byte each.
        self._body.add(b"".join(self._body_pieces))
        self._body_pieces.clear()
        return self._body

    def _discard(self) -> None:
        """Stop parsing; free the incomplete request and the httptools parser."""
        self.rejected = self.rejected or self._request
        self._parser = self._request = None
        self._body = None
        self._head_bytes = 0
        self._body_pieces.clear()
        self._raw_headers.clear()
        self._url.clear()

    def _measure_head(self) -> int:
        """Bytes of a complete head; the rest of the data read with it is body."""
        return self._head_bytes - len(self._data) + self._data.find(b"\r\n\r\n")

    def _handle_expect(self, request: HttpRequest) -> None:
        self.expects_continue = request.headers[b"expect"].lower() == b"100-continue"
        if not self.expects_continue:
            self.error = _UNKNOWN_EXPECTATION

    def _start_raw_body(self, request: HttpRequest) -> None:
        """Ignore an Upgrade header, as JDK's HttpClient sends it, and serve the request.
        httptools treats the data after such a head as another protocol: the body is read here."""
        if b"transfer-encoding" in request.headers:
            self.error = _CHUNKED_UPGRADE
        self._raw_body_remaining = int(request.headers.get(b"content-length", b"0"))

    def _take_raw_body(self, data: bytes) -> bytes:
        piece, rest = data[: self._raw_body_remaining], data[self._raw_body_remaining :]
        self._raw_body_remaining -= len(piece)
        self.on_body(piece)
        if not self._raw_body_remaining:
            self.on_message_complete()
        return rest


def _is_chunked_only(coding: bytes) -> bool:
    """Whether chunked is the only coding: httptools accepts others before it, undecoded."""
    return coding.strip(b" \t").lower() == b"chunked"
