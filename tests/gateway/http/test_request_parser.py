"""How much of a request is buffered, and which line counts; test_smuggling.py tests the framing."""

import tracemalloc
from http import HTTPStatus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.http.errors import GatewayError
from cleave.gateway.http.request_parser import MAX_FRAMING_RUN_BYTES, HttpRequest, RequestParser

MAX_BODY_BYTES = 1 << 20
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
SIZED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
NO_KEY = GatewayError(HTTPStatus.UNAUTHORIZED, "no key", "invalid_request_error")


def accept(request: HttpRequest) -> GatewayError | None:
    return None


@pytest.fixture
def reader() -> RequestParser:
    return RequestParser(MAX_BODY_BYTES, accept)


def count_until_refused(reader: RequestParser, piece: bytes, most_bytes: int) -> int:
    """Bytes that it reads before it refuses."""
    sent = 0
    while reader.error is None:
        assert sent < most_bytes, f"{sent} bytes were read and none refused"
        reader.feed(piece)
        sent += len(piece)
    return sent


@pytest.mark.parametrize(
    "begun",
    [b"0\r\nX: ", b"0\r\n", b"3\r\nabc\r\n0\r\nX: a\r\nY: ", b"1;a=", b"3\r\nabc\r\n1;a="],
    ids=["trailer", "trailer's name", "second trailer", "extension", "second extension"],
)
@pytest.mark.parametrize("piece", [b"a" * 1_000, b"aaa"], ids=["large reads", "small reads"])
def test_trailers_and_extensions_without_an_end_are_refused(
    reader: RequestParser, begun: bytes, piece: bytes
) -> None:
    reader.feed(CHUNKED)
    reader.feed(begun)
    assert count_until_refused(reader, piece, 64 << 10) <= MAX_FRAMING_RUN_BYTES + len(piece)
    assert reader.error.status == 400
    assert "trailers" in reader.error.message


def test_many_short_trailers_are_refused(reader: RequestParser) -> None:
    reader.feed(CHUNKED + b"0\r\n")
    assert count_until_refused(reader, b"name: value\r\n", 64 << 10) < 2 * MAX_FRAMING_RUN_BYTES


def test_extensions_between_bytes_of_content_are_bounded_by_the_largest_body(
    reader: RequestParser,
) -> None:
    reader.feed(CHUNKED)
    piece = b"1;" + b"a" * 4_000 + b"\r\nx\r\n"
    assert count_until_refused(reader, piece, 4 << 20) < MAX_BODY_BYTES + 2 * len(piece)


def test_a_body_in_chunks_of_one_byte_is_read(reader: RequestParser) -> None:
    reader.feed(CHUNKED)
    for _ in range(100_000):
        reader.feed(b"1\r\nx\r\n")
    reader.feed(b"0\r\n\r\n")
    assert reader.error is None
    assert reader.ready[0].body == b"x" * 100_000


def test_a_long_head_and_an_extension_do_not_add_up(reader: RequestParser) -> None:
    reader.feed(CHUNKED[:-2] + b"a: " + b"x" * 20_000 + b"\r\n\r\n")
    reader.feed(b"3;a=b\r\n")
    reader.feed(b"abc\r\n0\r\nt: u\r\n\r\n")
    assert reader.error is None
    assert reader.ready[0].body == b"abc"


def test_a_body_in_small_reads_takes_its_own_size(reader: RequestParser) -> None:
    reader.feed(SIZED)
    tracemalloc.start()
    try:
        for _ in range(100_000):
            reader.feed(b"abc")
        allocated_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert reader.buffered_bytes == 300_000
    assert allocated_bytes < 400_000


def test_the_head_is_checked_before_the_body_is_buffered() -> None:
    seen: list[bytes] = []

    def check(request: HttpRequest) -> GatewayError | None:
        seen.append(request.path)
        return NO_KEY

    reader = RequestParser(MAX_BODY_BYTES, check)
    reader.feed(SIZED[:-2])
    assert reader.error is None
    reader.feed(b"\r\nabc")
    assert seen == [b"/v1/completions"]
    assert reader.error is NO_KEY
    reader.feed(b"abc" * 1_000)
    assert reader.buffered_bytes == 0
    assert not reader.reading_body


def test_a_request_that_has_come_whole_is_looked_at_by_who_answers_it() -> None:
    reader = RequestParser(MAX_BODY_BYTES, lambda request: NO_KEY)
    reader.feed(SIZED.replace(b"1000000", b"3") + b"abc")
    assert reader.error is None
    assert reader.ready[0].body == b"abc"


def test_a_head_in_parts_counts_with_what_its_lines_take(reader: RequestParser) -> None:
    reader.feed(b"GET / HTTP/1.1\r\n" + b"".join(b"%x:\r\n" % i for i in range(1_000)))
    assert reader.buffered_bytes > 100_000
    reader.feed(b"\r\n")
    assert reader.buffered_bytes == 0
    assert len(reader.ready) == 1


def test_what_is_refused_is_let_go_of(reader: RequestParser) -> None:
    reader.feed(SIZED + b"abc")
    reader.reject(NO_KEY)
    reader.feed(b"abc")
    assert (reader.buffered_bytes, reader.error) == (0, NO_KEY)


def test_the_body_of_a_rejected_request_is_freed(reader: RequestParser) -> None:
    reader.feed(CHUNKED)
    reader.feed(b"%x\r\n%b\r\n0\r\n\r\n" % (MAX_BODY_BYTES + 1, b"x" * (MAX_BODY_BYTES + 1)))
    assert reader.error.status == 413
    assert reader.rejected.body == b""


@given(
    lines=st.lists(
        st.tuples(
            st.sampled_from([b"X-Forwarded-For", b"x-forwarded-for", b"X-API-Key", b"x-api-key"]),
            st.sampled_from([b"a", b"b, c", b"d"]),
        ),
        max_size=6,
    ),
    cut=st.integers(0, 200),
)
def test_a_proxys_line_counts_and_of_other_headers_the_first(lines, cut: int) -> None:
    reader = RequestParser(MAX_BODY_BYTES, accept)
    head = b"".join(b"%b: %b\r\n" % line for line in lines)
    raw = b"GET / HTTP/1.1\r\nhost: x\r\n%b\r\n" % head
    reader.feed(raw[:cut])
    reader.feed(raw[cut:])
    (request,) = reader.ready
    of = {key: [v for name, v in lines if name.lower() == key] for key in request.headers}
    assert request.headers.get(b"x-forwarded-for") == (of.get(b"x-forwarded-for") or [None])[-1]
    assert request.headers.get(b"x-api-key") == (of.get(b"x-api-key") or [None])[0]
    assert len(request.headers) == len({name.lower() for name, _ in lines})


def test_a_trailer_counts_for_no_request(reader: RequestParser) -> None:
    reader.feed(CHUNKED + b"0\r\nx-forwarded-for: a\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert [b"x-forwarded-for" in request.headers for request in reader.ready] == [False, False]
