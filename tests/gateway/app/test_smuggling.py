"""Where a request ends: what two parsers could see differently is refused, not guessed."""

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.gateway.http.request_parser import RequestParser

BODY = b'{"model":"m"}'
SECOND = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"


def read(raw: bytes) -> tuple[list[tuple[bytes, bytes]], bool]:
    """((path, body) of each request, whether the rest is refused), as the gateway sees it."""
    reader = RequestParser(1 << 20, lambda request: None)
    reader.feed(raw)
    return [(one.path, one.body) for one in reader.ready], reader.error is not None


def read_again(raw: bytes) -> tuple[list[tuple[bytes, bytes]], bool]:
    """The same as another parser sees it, one that is known to be strict."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(raw)
    found: list[tuple[bytes, bytes]] = []
    try:
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED:
                return found, False
            if isinstance(event, h11.Request):
                path, body = event.target.partition(b"?")[0], b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                found.append((path, body))
                connection.send(h11.Response(status_code=200, headers=[(b"content-length", b"0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is h11.MUST_CLOSE:
                    return found, False
                connection.start_next_cycle()
            else:
                return found, False
    except h11.ProtocolError:
        return found, True


def post(*lines: bytes, body: bytes = BODY) -> bytes:
    head = b"\r\n".join([b"POST /v1/completions HTTP/1.1", b"host: x", *lines])
    return head + b"\r\n\r\n" + body


CHUNKED = b"d\r\n" + BODY + b"\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "raw",
    [
        post(b"content-length: 13", b"content-length: 5") + SECOND,
        post(b"content-length: 13, 5") + SECOND,
        post(b"content-length: +13") + SECOND,
        post(b"content-length: 0x0d") + SECOND,
        post(b"content-length: -1") + SECOND,
        post(b"content-length : 13") + SECOND,
        post(b"content-length: 13", b"transfer-encoding: chunked", body=CHUNKED) + SECOND,
        post(b"transfer-encoding: chunked", b"content-length: 13", body=CHUNKED) + SECOND,
        post(b"transfer-encoding: chunked, identity", body=CHUNKED) + SECOND,
        post(b"transfer-encoding : chunked", body=CHUNKED) + SECOND,
        post(b"transfer-encoding: chunked", body=b"d \r\n" + CHUNKED[3:]) + SECOND,
        post(b"transfer-encoding: chunked", body=b"0xd\r\n" + CHUNKED[3:]) + SECOND,
        post(b"transfer-encoding: chunked", body=b"d\r\n" + BODY + b"0\r\n\r\n") + SECOND,
        post(b" folded: line", b"content-length: 13") + SECOND,
        post(b"name\x00: value", b"content-length: 13") + SECOND,
        post(b"name: val\rue", b"content-length: 13") + SECOND,
    ],
    ids=range(16),
)
def test_ambiguous_framing_is_refused_and_nothing_after_it_is_read(raw: bytes) -> None:
    requests, refused = read(raw)
    assert refused
    assert requests == []


@pytest.mark.parametrize(
    "raw",
    [
        post(b"content-length: 13") + SECOND,
        post(b"Content-Length:13  ") + SECOND,
        post(b"transfer-encoding: chunked", body=CHUNKED) + SECOND,
        post(b"transfer-encoding: chunked", body=b"D;ext=1\r\n" + CHUNKED[3:]) + SECOND,
        post(b"transfer-encoding: chunked", body=CHUNKED[:-2] + b"trailer: 1\r\n\r\n") + SECOND,
    ],
    ids=range(5),
)
def test_clear_framing_gives_both_requests(raw: bytes) -> None:
    assert read(raw) == read_again(raw)
    assert [path for path, _ in read(raw)[0]] == [b"/v1/completions", b"/smuggled"]
    assert read(raw)[0][0][1] == BODY


pieces = st.sampled_from(
    [
        b"content-length: 13\r\n",
        b"content-length: 5\r\n",
        b"Content-Length: 013\r\n",
        b"transfer-encoding: chunked\r\n",
        b"transfer-encoding: gzip, chunked\r\n",
        b"connection: close\r\n",
        b"x: y\r\n",
        b"content-length:\t13\r\n",
        b"transfer-encoding:\tchunked\r\n",
        b"expect: 100-continue\r\n",
        b"\r\n",
        b"\n",
        BODY,
        CHUNKED,
        b"5\r\nhello\r\n",
        b"0\r\n\r\n",
        b"POST /a HTTP/1.1\r\nhost: x\r\n",
        SECOND,
    ]
)


@settings(max_examples=400)
@given(st.lists(pieces, max_size=9))
def test_another_parser_never_sees_a_request_that_this_one_takes_for_a_body(parts) -> None:
    """Requests that both take must be the same ones; either may refuse what the other takes."""
    raw = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + b"".join(parts)
    mine, _ = read(raw)
    theirs, _ = read_again(raw)
    both = min(len(mine), len(theirs))
    assert mine[:both] == theirs[:both]
