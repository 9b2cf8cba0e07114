"""No head of a request raises anything: absurd numbers, names, targets and bytes get an answer.

For a long run: pytest tests/gateway/app/test_fuzz_heads.py --hypothesis-profile=long
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.gateway.tracing.traceparent import read_trace_context

from tests.support.ambiguous_requests import BODY, LENGTH, build, whole
from tests.support.fuzzed_gateway import THOROUGH, FuzzedGateway, run_gateway

KEY = b"key-of-the-fuzzed-gateway"
NOISE = b"\0" * 70_000
"""Longer than a body may be, so that every open request ends in it."""
ANSWERS = {200, 400, 401, 403, 404, 405, 413, 415, 417, 421, 429, 431}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedGateway]:
    """With everything that reads headers, but for keys."""
    options = {"session_header": "x-session", "allowed_origins": ("https://a.example",)}
    with run_gateway(access_log=True, **options) as fuzzed_gateway:
        yield fuzzed_gateway


@pytest.fixture(scope="module")
def gateway_with_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedGateway]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_bytes(KEY)
    with run_gateway(api_keys=keys) as fuzzed_gateway:
        yield fuzzed_gateway


NUMBERS = [
    *(b"0" * 5_000 + b"5", b"9" * 5_000, b"9" * 19, b"9" * 20, b"0" * 19 + b"5", b"-1", b"+5"),
    *(b"1e999", b"0x10", b"1_0", b"NaN", b"Infinity", b"-0", b"5.0", b"\xd9\xa3", b"\xb2", b""),
    *(b"18446744073709551615", b"18446744073709551616", b"5, 5", b"5;q=1", b"5 5", LENGTH),
]
TEXTS = [
    *(b"%", b"%ff%00", b"%zz", b"\xff\xfe", b"\xed\xa0\x80", b"a" * 60_000, b"," * 9_000),
    *(
        b"Bearer",
        b"Bearer ",
        b"bearer \xff",
        b"Bearer " + b"x" * 50_000,
        b"Basic Og==",
        b"Bearer " + KEY,
    ),
    *(
        b"xn--a",
        b"xn--" + b"a" * 70,
        "ü.example".encode(),
        b"[::1",
        b"[::g]:80",
        b"a:99999",
        b"a:b:c",
    ),
    *(
        b"chunked",
        b"gzip, chunked",
        b"identity",
        b"100-continue",
        b"100-Continue ",
        b"upgrade",
        b"h2c",
    ),
    *(b"null", b"https://a.example", b"https://A.example:443", b"file://", b"cross-site", b"*"),
    *(
        b"bytes=0-",
        b"bytes=" + b"9" * 5_000 + b"-",
        b"Sun, 99 Foo 99999 99:99:99 GMT",
        b'W/""',
        b"\t",
    ),
    *(
        b"00-" + b"f" * 32 + b"-" + b"f" * 16 + b"-01",
        b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-ff",
    ),
]
FIELDS = [
    *(
        b"content-length",
        b"transfer-encoding",
        b"expect",
        b"connection",
        b"upgrade",
        b"host",
        b"te",
    ),
    *(b"authorization", b"x-api-key", b"x-request-id", b"x-session", b"traceparent", b"tracestate"),
    *(b"origin", b"access-control-request-method", b"access-control-request-headers", b"cookie"),
    *(b"content-encoding", b"content-type", b"accept", b"accept-encoding", b"range", b"date"),
    *(b"if-modified-since", b"if-none-match", b"retry-after", b"forwarded", b"x-forwarded-for"),
    *(b"sec-fetch-site", b"sec-fetch-mode", b"trailer", b"keep-alive", b"http2-settings"),
]
TARGETS = [
    *(
        b"/v1/completions",
        b"/v1/chat/completions",
        b"/health",
        b"/v1/models/m",
        b"/v1/models/%ff%00",
    ),
    *(
        b"/v1/models/%",
        b"/v1/models/" + b"%C3" * 9_000,
        b"*",
        b"/" + b"a" * 60_000,
        b"/?" + b"&" * 9_000,
    ),
    *(
        b"http://[::1/v1/completions",
        b"http://xn--/",
        b"http://",
        b"//",
        b"/..%2f",
        b"x:99999",
        b"://",
    ),
    *(
        b"http://" + b"a" * 300 + b"/v1/models",
        b"HTTPS://a:b@c:d/openapi.json",
        b"/openapi.json?a=\xff",
    ),
]
METHODS = [
    b"POST",
    b"GET",
    b"OPTIONS",
    b"PUT",
    b"CONNECT",
    b"TRACE",
    b"M-SEARCH",
    b"QUERY",
    b"post",
    b"X" * 40,
]
visible = st.binary(max_size=40).map(
    lambda raw: bytes(b for b in raw if b == 9 or (b >= 32 and b != 127))
)
values = st.sampled_from(NUMBERS) | st.sampled_from(TEXTS) | visible | st.binary(max_size=20)
names = st.sampled_from(FIELDS).flatmap(
    lambda name: st.sampled_from([name, name.title(), name.upper()])
)
lines = st.tuples(names | visible, values).map(lambda pair: b"%b: %b" % pair)
targets = st.sampled_from(TARGETS) | visible.map(
    lambda raw: b"/v1/models/" + raw.replace(b" ", b"")
)
versions = st.sampled_from(
    [b"HTTP/1.1"] * 6 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.99", b"RTSP/1.0"]
)
bodies = st.sampled_from(
    [
        b"",
        BODY,
        whole(BODY),
        b"9" * 5_000,
        b"f" * 17 + b"\r\n",
        b"0" * 5_000 + b"5\r\nabcde\r\n0\r\n\r\n",
    ]
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    first = b"%b %b %b" % (draw(st.sampled_from(METHODS)), draw(targets), draw(versions))
    fields = draw(st.lists(lines, max_size=8))
    if draw(st.integers(0, 30)) == 7:
        fields += [b"h%d: v" % number for number in range(draw(st.integers(500, 9_000)))]
    if draw(st.booleans()):
        fields.append(b"content-length: " + LENGTH)
    return build(fields, draw(bodies), first)


def check(gateway: FuzzedGateway, raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        statuses = gateway.send(
            [raw[i : i + 4_096] for i in range(0, len(raw), 4_096)] + [NOISE], None
        )
    assert statuses, "the gateway closed the connection without an answer"
    assert set(statuses) <= ANSWERS
    assert not gateway.engine.faults
    assert not caplog.records, caplog.text


@settings(THOROUGH, max_examples=6 * settings.default.max_examples)
@given(requests())
def test_any_head_gets_an_answer(gateway: FuzzedGateway, caplog, raw: bytes) -> None:
    check(gateway, raw, caplog)


@settings(THOROUGH, max_examples=2 * settings.default.max_examples)
@given(requests())
def test_any_head_gets_an_answer_where_keys_are_needed(
    gateway_with_keys: FuzzedGateway, caplog, raw: bytes
) -> None:
    check(gateway_with_keys, raw, caplog)
    # The prompt of a request without a key is seen by no engine.
    assert KEY in raw or not gateway_with_keys.engine.prompts


@pytest.mark.parametrize("field", FIELDS)
def test_every_absurd_value_of_every_header_gets_an_answer(
    gateway: FuzzedGateway, caplog, field: bytes
) -> None:
    for value in (*NUMBERS, *TEXTS):
        raw = b"".join(
            build([b"%b: %b" % (field, value), *more], body, b"POST %b HTTP/1.1" % target)
            for target in (b"/v1/completions", b"/v1/models/m")
            for more, body in (([], b""), ([b"content-length: " + LENGTH], BODY))
        )
        check(gateway, raw, caplog)


@pytest.mark.parametrize("length", [b"0" * 5_000 + b"5", b"0" * 4_301, b"0" * 20 + b"5"])
def test_a_length_of_thousands_of_digits_is_a_bad_request(
    gateway: FuzzedGateway, caplog, length: bytes
) -> None:
    for more in ([], [b"upgrade: h2c", b"connection: upgrade"], [b"expect: 100-continue"]):
        raw = build([b"content-length: " + length, *more], b"abcde")
        assert gateway.send([raw], 1) == [400]
    assert not caplog.records


def test_thousands_of_headers_are_too_many(gateway: FuzzedGateway) -> None:
    raw = build([b"h%d: v" % number for number in range(1_025)], b"", b"GET /health HTTP/1.1")
    assert gateway.send([raw], 1) == [431]
    raw = build([b"h%d: v" % number for number in range(1_000)], b"", b"GET /health HTTP/1.1")
    assert gateway.send([raw], 1) == [200]


@given(
    st.binary()
    | values
    | st.from_regex(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}.*", fullmatch=True)
)
def test_any_traceparent_is_read(value: bytes) -> None:
    trace = read_trace_context(value, 0.5)
    assert 0 < trace.trace_id < 1 << 128
