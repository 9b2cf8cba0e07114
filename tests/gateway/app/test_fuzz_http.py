"""Under any bytes from a client, engines get whole, clear requests, and the gateway survives.

Requests are made from a grammar, in pipelines, cut anywhere. What is clear must reach the engine as
it is; what two parsers could read differently must be refused, with all that follows it. What the
engine gets is read by a second parser, h11, which is known to be strict; so are our answers.

For a long run: pytest tests/gateway/app/test_fuzz_http.py --hypothesis-profile=long
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.gateway.http.request_parser import RequestParser

from tests.support.ambiguous_requests import (
    AMBIGUOUS,
    BODY,
    CANARY,
    LENGTH,
    build,
    build_body,
    chunk,
)
from tests.support.fuzzed_gateway import THOROUGH, FuzzedGateway, run_gateway

REFUSALS = {400, 413, 417, 431}


@pytest.fixture(scope="module")
def gateway() -> Iterator[FuzzedGateway]:
    with run_gateway() as fuzzed_gateway:
        yield fuzzed_gateway


# --- the grammar ---


@dataclass(frozen=True)
class Sent:
    """A request, or what looks like one, and what must become of it."""

    raw: bytes
    prompt: str | None = None
    """Reaches the engine; None: nothing does."""
    status: int = 200


def in_any_case(name: bytes) -> st.SearchStrategy[bytes]:
    return st.sampled_from([name, name.upper(), name.title()])


spaces = st.sampled_from([b"", b" ", b"\t", b"  \t "])
targets = st.sampled_from(
    [b"/v1/completions", b"/v1/completions?a=b", b"http://h:1/v1/completions"]
)
extensions = st.sampled_from([b"", b";a", b";a=b", b';a="b c"', b";a=1;b=2"])
values = st.binary(max_size=40).map(
    lambda raw: bytes(b for b in raw if b == 9 or (b >= 32 and b != 127))
)
names = st.text("abcXYZ09!#$%&'*+-.^_`|~", min_size=1, max_size=20).map(lambda n: f"z{n}".encode())
others = st.lists(st.tuples(names, values), max_size=5).map(
    lambda pairs: [b"%b: %b" % pair for pair in pairs]
)


@st.composite
def clear_framing(draw: st.DrawFn, body: bytes) -> tuple[list[bytes], bytes]:
    """The header lines with a body's length, and the body as it goes over the wire."""
    before, after = draw(spaces), draw(spaces)
    if draw(st.booleans()):
        name = draw(in_any_case(b"content-length"))
        return [b"%b:%b%d%b" % (name, before, len(body), after)], body
    # The parser takes no tab after a coding, which is its right.
    after = after.replace(b"\t", b"")
    name, value = draw(in_any_case(b"transfer-encoding")), draw(in_any_case(b"chunked"))
    raw, rest = b"", body
    while rest:
        size = draw(st.integers(1, len(rest)))
        written = draw(st.sampled_from([b"%x", b"%X", b"00%x"])) % size
        raw += chunk(rest[:size], written, draw(extensions))
        rest = rest[size:]
    trailers = b"".join(line + b"\r\n" for line in draw(others))
    last = draw(st.sampled_from([b"0", b"000", b"0;a=b"]))
    return [b"%b:%b%b%b" % (name, before, value, after)], raw + last + b"\r\n" + trailers + b"\r\n"


@st.composite
def clear(draw: st.DrawFn) -> Sent:
    """A request that every parser reads alike."""
    prompt = draw(st.text(max_size=30))
    lines, raw = draw(clear_framing(build_body(prompt)))
    lines = [*draw(others), *lines, *draw(others)]
    first = draw(st.sampled_from([b"POST %b HTTP/1.1", b"POST  %b  HTTP/1.1"])) % draw(targets)
    return Sent(draw(st.sampled_from([b"", b"\r\n"])) + build(lines, raw, first), prompt)


ANSWERED_HERE = [
    (b"POST /v1/completions HTTP/1.1", b'{"model":', 400),
    (b"POST /v1/completions HTTP/1.1", b"\xff\x00", 400),
    (b"POST /v1/completions HTTP/1.1", b"[" * 50_000, 400),
    (b"POST /v1/completions HTTP/1.1", build_body(CANARY)[:-1], 400),
    (b"POST /v1/nowhere HTTP/1.1", b"", 404),
    (b"POST /v1/models/m HTTP/1.1", b"", 405),
    (b"GET /v1/models/%FF%00 HTTP/1.1", b"", 404),
    (b"PUT /v1/completions HTTP/1.1", b"", 405),
    (b"DELETE * HTTP/1.1", b"", 404),
    (b"CONNECT x:1 HTTP/1.1", b"", 404),
    (b"GET /health HTTP/1.1", build_body(CANARY), 200),
]


@st.composite
def answered_here(draw: st.DrawFn) -> Sent:
    """Good HTTP of which no engine hears; the connection goes on."""
    first, body, status = draw(st.sampled_from(ANSWERED_HERE))
    lines, raw = draw(clear_framing(body)) if body else ([], b"")
    return Sent(build([*draw(others), *lines], raw, first), None, status)


REFUSED_BY_HEAD = [(b"POST /v1/nowhere HTTP/1.1", 404), (b"PUT /v1/completions HTTP/1.1", 405)]


@st.composite
def refused_by_head(draw: st.DrawFn) -> Sent:
    """A body follows, which is not read unless it has come with the head."""
    first, status = draw(st.sampled_from(REFUSED_BY_HEAD))
    lines, raw = draw(clear_framing(build_body(CANARY)))
    return Sent(build(lines, raw, first), None, status)


ambiguous = st.sampled_from([(k, i) for k, raws in AMBIGUOUS.items() for i in range(len(raws))])
"""Where it is found; some are too long to be shown."""
follower = build([b"content-length: " + LENGTH], BODY)
NOISE = b"\0" * 70_000
"""Longer than any body may be, so that every open request ends in it."""
pieces_of = st.lists(st.integers(0, 3_000), max_size=12)


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    """Pieces; the places count from the front and from the back, where bodies end."""
    at = sorted({abs(place if place % 2 else len(raw) - place) for place in places})
    return [raw[a:b] for a, b in zip([0, *at], [*at, len(raw)], strict=True) if raw[a:b]]


# --- what must hold ---


@settings(THOROUGH, max_examples=4 * settings.default.max_examples)
@given(st.lists(clear() | answered_here(), min_size=1, max_size=6), pieces_of)
def test_clear_requests_reach_the_engine_as_they_are(gateway: FuzzedGateway, sent, places) -> None:
    statuses = gateway.send(cut(b"".join(one.raw for one in sent), places), len(sent))
    assert statuses == [one.status for one in sent]
    assert gateway.engine.prompts == [one.prompt for one in sent if one.prompt is not None]
    assert not gateway.engine.faults


@settings(THOROUGH, max_examples=2 * settings.default.max_examples)
@given(refused_by_head(), pieces_of)
def test_a_body_that_is_not_read_is_no_request(gateway: FuzzedGateway, refused, places) -> None:
    """Either all of it was there, and the next request is answered; or the connection ends."""
    status, *others = gateway.send([*cut(refused.raw + follower, places), NOISE], None)
    assert status == refused.status
    assert (others, gateway.engine.prompts) in (
        ([], []),
        ([200, 400], [json.loads(BODY)["prompt"]]),
    )


@settings(THOROUGH, max_examples=4 * settings.default.max_examples)
@given(st.lists(clear() | answered_here(), max_size=2), ambiguous, pieces_of)
def test_the_ambiguous_is_refused_with_all_that_follows(
    gateway: FuzzedGateway, sent, bad, places
) -> None:
    kind, index = bad
    raw = b"".join([*(one.raw for one in sent), AMBIGUOUS[kind][index], follower, follower])
    *statuses, refusal = gateway.send(cut(raw, places), None)
    assert refusal in REFUSALS
    assert statuses == [one.status for one in sent]
    assert gateway.engine.prompts == [one.prompt for one in sent if one.prompt is not None]
    assert not gateway.engine.faults


@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_every_known_ambiguity_is_refused(gateway: FuzzedGateway, kind: str) -> None:
    for raw in AMBIGUOUS[kind]:
        statuses = gateway.send([raw + follower], None)
        assert len(statuses) == 1, (raw[:300], statuses)
        assert statuses[0] in REFUSALS, raw[:300]
        assert gateway.engine.prompts == [], raw[:300]


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    """A pipeline of which some bytes were changed."""
    raw = bytearray(b"".join(one.raw for one in draw(st.lists(clear(), min_size=1, max_size=3))))
    strange = st.sampled_from(b"\r\n\0 \t:;,0159afAF\x7f\xff-+") | st.integers(0, 255)
    for _ in range(draw(st.integers(1, 6))):
        place = draw(st.integers(0, len(raw) - 1))
        how = draw(st.integers(0, 2))
        if how == 0:
            raw[place] = draw(strange)
        elif how == 1:
            raw.insert(place, draw(strange))
        else:
            del raw[place]
    return bytes(raw)


@settings(THOROUGH, max_examples=4 * settings.default.max_examples)
@given(spoilt(), pieces_of)
def test_no_spoilt_bytes_break_anything(gateway: FuzzedGateway, caplog, raw, places) -> None:
    with caplog.at_level(logging.WARNING):
        statuses = gateway.send([*cut(raw, places), NOISE], None)
    assert set(statuses) <= {200, 404, 405, *REFUSALS}
    assert not gateway.engine.faults
    assert not caplog.records


def read(pieces: list[bytes]) -> tuple[list[tuple[bytes, bytes]], bool]:
    reader = RequestParser(1 << 16, lambda request: None)
    for piece in pieces:
        if reader.error is None:
            reader.feed(piece)
    return [(one.path, one.body) for one in reader.ready], reader.error is not None


@settings(THOROUGH, max_examples=5 * settings.default.max_examples)
@given(spoilt(), pieces_of)
def test_where_bytes_are_cut_changes_nothing(raw, places) -> None:
    assert read(cut(raw, places)) == read([raw])


@settings(THOROUGH, max_examples=settings.default.max_examples)
@given(ambiguous, pieces_of)
def test_where_an_ambiguity_is_cut_changes_nothing(bad, places) -> None:
    raw = AMBIGUOUS[bad[0]][bad[1]] + follower
    assert read(cut(raw, places)) == read([raw])
