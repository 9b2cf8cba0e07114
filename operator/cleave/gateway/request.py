"""Reads requests out of the bytes of one connection. Used by the client's connection; no I/O.

What is hard: bytes come cut anywhere, several requests may come at once, and a bad one may follow
good ones, whose answers it must not cost. So whole requests queue in `ready`, and what is wrong
with the next one waits in `refusal` until they are answered.
"""

from collections import deque
from collections.abc import Callable
from http import HTTPStatus

import httptools
import msgspec

from cleave.gateway.errors import ApiError, refuse

MAX_HEAD_BYTES = 64 << 10

_READ = frozenset(
    (b"authorization", b"content-length", b"expect", b"transfer-encoding", b"x-request-id")
)
_LENGTHS = frozenset(map(len, _READ))

_TOO_LONG_HEAD = ApiError(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"the request's head is longer than {MAX_HEAD_BYTES} bytes",
    "invalid_request_error",
)
_UNKNOWN_EXPECTATION = ApiError(
    HTTPStatus.EXPECTATION_FAILED, "unknown expectation", "invalid_request_error"
)


class Request(msgspec.Struct, gc=False):
    """One request, read completely."""

    method: bytes
    path: bytes
    headers: dict[bytes, bytes]
    """Only those that the gateway reads."""
    http11: bool
    keep_alive: bool
    body: bytes = b""


class RequestReader:
    """The reading side of one connection. Its on_ methods are httptools' callbacks."""

    def __init__(
        self,
        max_body_bytes: int,
        check: Callable[[Request], ApiError | None],
        also_read: frozenset[bytes] = frozenset(),
    ) -> None:
        """`check` looks at a request whose body is still to come; an error refuses it unread.

        `also_read`: more headers to be kept, in small letters.
        """
        self._names = _READ | also_read if also_read else _READ
        self._lengths = _LENGTHS.union(map(len, also_read)) if also_read else _LENGTHS
        self.ready: deque[Request] = deque()
        """Whole requests, oldest first."""
        self.refusal: ApiError | None = None
        """What is wrong with the one after them; nothing is read any more."""
        self.wants_continue = False
        """The client waits to be asked for the body (Expect: 100-continue)."""
        self._max_body_bytes = max_body_bytes
        self._check = check
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._unfinished_bytes = 0
        self._request: Request | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._raw_body_left = 0

    @property
    def reading_body(self) -> bool:
        """A head is whole, its body is not."""
        return self._request is not None

    def feed(self, data: bytes) -> None:
        """Read on; `ready`, `refusal` and `wants_continue` tell what has come of it."""
        rest = data
        try:
            while rest and self.refusal is None and self._parser is not None:
                if self._raw_body_left:
                    rest = self._take_raw_body(rest)
                    continue
                try:
                    self._parser.feed_data(rest)
                    rest = b""
                except httptools.HttpParserUpgrade as upgrade:
                    rest = rest[upgrade.args[0] :]
        except httptools.HttpParserCallbackError:
            raise
        except httptools.HttpParserError:
            self.refusal = refuse("the request is not valid HTTP")
        if self._request is None and not self.ready:
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > MAX_HEAD_BYTES:
                self.refusal = self.refusal or _TOO_LONG_HEAD

    def close(self) -> None:
        """Let go of the parser, which holds this object as this object holds it."""
        self._parser = None
        self.ready.clear()

    def on_url(self, url: bytes) -> None:
        """The request target, perhaps in pieces."""
        self._url += url
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line, or a trailer."""
        self._head_bytes += len(name) + len(value)
        if len(name) in self._lengths and self._request is None:
            name = name.lower()
            if name in self._names:
                self._headers[name] = value

    def on_headers_complete(self) -> None:
        """The head is whole: look at it before the body comes."""
        parser = self._parser
        assert parser is not None
        headers = self._headers
        request = Request(
            parser.get_method(),
            self._url.partition(b"?")[0],
            headers,
            parser.get_http_version() == "1.1",
            parser.should_keep_alive(),
        )
        self._request = request
        self._url, self._headers, self._unfinished_bytes = b"", {}, 0
        if self._head_bytes > MAX_HEAD_BYTES:
            self.refusal = _TOO_LONG_HEAD
        elif int(headers.get(b"content-length", b"0")) > self._max_body_bytes:
            self.refusal = self._explain_size()
        elif parser.should_upgrade():
            self._expect_raw_body(request)
        elif b"expect" in headers:
            self._expect(request)

    def on_body(self, piece: bytes) -> None:
        """A piece of the body, its chunk framing already taken off."""
        self._body_bytes += len(piece)
        if self.refusal is not None:
            return
        if self._body_bytes <= self._max_body_bytes:
            self._body.append(piece)
        else:
            self._body.clear()
            self.refusal = self._explain_size()

    def on_message_complete(self) -> None:
        """A request is whole."""
        if self._raw_body_left:
            return
        request, self._request = self._request, None
        assert request is not None
        request.body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._body_bytes = self._head_bytes = 0
        self.wants_continue = False
        if self.refusal is None:
            self.ready.append(request)

    def _expect(self, request: Request) -> None:
        if request.headers[b"expect"].lower() != b"100-continue":
            self.refusal = _UNKNOWN_EXPECTATION
            return
        self.refusal = self._check(request)
        self.wants_continue = self.refusal is None

    def _expect_raw_body(self, request: Request) -> None:
        """An offer to upgrade (JDK's HttpClient makes it) is ignored and the request served.

        The parser takes what follows such a head for another protocol: the body is read here.
        """
        if b"transfer-encoding" in request.headers:
            self.refusal = refuse("an offer to upgrade cannot come with a chunked body")
        self._raw_body_left = int(request.headers.get(b"content-length", b"0"))

    def _take_raw_body(self, data: bytes) -> bytes:
        piece, rest = data[: self._raw_body_left], data[self._raw_body_left :]
        self._raw_body_left -= len(piece)
        self.on_body(piece)
        if not self._raw_body_left:
            self.on_message_complete()
        return rest

    def _explain_size(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than {self._max_body_bytes} bytes",
            "invalid_request_error",
            code="body_too_large",
        )
