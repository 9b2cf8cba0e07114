"""HTTP requests that two parsers could read differently, by kind of ambiguity."""

import json

CANARY = "smuggled"
"""The prompt of requests that must never reach an engine."""


def build_body(prompt: str) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt, "max_tokens": 3}).encode()


def build(
    lines: list[bytes], body: bytes, first: bytes = b"POST /v1/completions HTTP/1.1"
) -> bytes:
    return b"\r\n".join([first, b"host: x", *lines]) + b"\r\n\r\n" + body


def chunk(body: bytes, size: bytes | None = None, extension: bytes = b"") -> bytes:
    return b"%b%b\r\n%b\r\n" % (size or b"%x" % len(body), extension, body)


def whole(body: bytes) -> bytes:
    return chunk(body) + b"0\r\n\r\n"


BODY = build_body(CANARY)
LENGTH = b"%d" % len(BODY)
SIZE = b"%x" % len(BODY)
CHUNKED = b"transfer-encoding: chunked"


def measured(*lengths: bytes) -> list[bytes]:
    return [build([b"content-length:%b" % length], BODY) for length in lengths]


def chunks(*bodies: bytes) -> list[bytes]:
    return [build([CHUNKED], body) for body in bodies]


def coded(*lines: bytes) -> list[bytes]:
    return [build([line], whole(BODY)) for line in lines]


def headed(*lines: bytes) -> list[bytes]:
    return [build([line, b"content-length: " + LENGTH], BODY) for line in lines]


AMBIGUOUS = {
    "both lengths": [
        build([b"content-length: " + LENGTH, CHUNKED], whole(BODY)),
        build([CHUNKED, b"content-length: " + LENGTH], whole(BODY)),
        build([CHUNKED, b"content-length: 0"], whole(BODY)),
        build([b"content-length: 4", CHUNKED], whole(BODY)),
        build([b"transfer-encoding: identity", b"content-length: " + LENGTH], BODY),
        build([b"transfer-encoding:", b"content-length: " + LENGTH], BODY),
    ],
    "several lengths": [
        build([b"content-length: " + LENGTH, b"content-length: 5"], BODY),
        build([b"content-length: 5", b"content-length: " + LENGTH], BODY),
        build([b"content-length: " + LENGTH] * 2, BODY),
        *measured(b" %b, %b" % (LENGTH, LENGTH), b" %b,5" % LENGTH),
    ],
    "no number": measured(
        *(b"+" + LENGTH, b"-1", b"0x1f", LENGTH + b";", b"1 3", b"1_3", b"", b" ", b"NaN"),
        *(b"1" * 40, LENGTH + b"\x0b", b"\xd9\xa1", b"18446744073709551617", b"1e1", b"3."),
    ),
    "hidden coding": coded(
        b"transfer-encoding : chunked",
        b"transfer-encoding: chunked, identity",
        b"transfer-encoding: identity, chunked, identity",
        b"transfer-encoding: xchunked",
        b"transfer-encoding: chunkedx",
        b"transfer-encoding: chunked;q=1",
        b'transfer-encoding: "chunked"',
        b"transfer-encoding: \x0bchunked",
        b"transfer-encoding: chunked\x00",
        b"transfer-encoding: chun ked",
        b"transfer-encoding:\r\n chunked",
        b"transfer-encoding: chunked\r\ntransfer-encoding: identity",
        b"transfer-encoding: gzip",
        b" transfer-encoding: chunked",
        b"x: y\rtransfer-encoding: chunked",
        b"x: y\ntransfer-encoding: chunked",
        b"transfer\x00-encoding: chunked",
    ),
    "other codings": coded(
        b"transfer-encoding: gzip, chunked",
        b"transfer-encoding: identity, chunked",
        b"transfer-encoding: chunked, chunked",
        b"transfer-encoding: chunked\r\ntransfer-encoding: chunked",
        b"transfer-encoding: ,chunked",
    ),
    "chunk sizes": chunks(
        *(prefix + chunk(BODY) + b"0\r\n\r\n" for prefix in (b"0x", b"+", b"-", b" ", b"\t")),
        *(
            chunk(BODY, SIZE + suffix) + b"0\r\n\r\n"
            for suffix in (b" ", b"\t", b"g", b"\x00", b",")
        ),
        chunk(BODY, b"f" * 17) + b"0\r\n\r\n",
        chunk(BODY, b"1" + b"0" * 16) + b"0\r\n\r\n",
        b"\r\n" + whole(BODY),
        SIZE + b"\n" + BODY + b"\r\n0\r\n\r\n",
        SIZE + b"\r" + BODY + b"\r\n0\r\n\r\n",
        SIZE + b"\r\n" + BODY + b"0\r\n\r\n",
        SIZE + b"\r\n" + BODY + b"\n0\r\n\r\n",
        SIZE + b"\r\n" + BODY + b"xx0\r\n\r\n",
        chunk(BODY) + b"0\n\n",
        chunk(BODY) + b"0\r\n\n",
        chunk(BODY, extension=b";a\nb") + b"0\r\n\r\n",
        chunk(BODY, extension=b";a\x00b") + b"0\r\n\r\n",
        chunk(BODY, extension=b";a\rb") + b"0\r\n\r\n",
        chunk(BODY, extension=b" ;a=b") + b"0\r\n\r\n",
    ),
    "header lines": headed(
        *(
            b"a b: c",
            b"a : b",
            b" a: b",
            b"\ta: b",
            b": b",
            b"a",
            b"a\x00: b",
            b"a: b\x00",
            b"a(: b",
        ),
        *(
            b"a: b\rc",
            b"a: b\nc: d",
            b"a: b\r\n folded",
            b"a: b\r\n\tfolded",
            b"a: \x01",
            b"\xff: b",
        ),
        *(b"a: b\x7f", b"a\r\nb: c", b"a:\r\n\r", b'"a": b'),
    ),
    "request lines": [
        build([b"content-length: " + LENGTH], BODY, first)
        for first in (
            b"POST\t/v1/completions HTTP/1.1",
            b"POST /v1/completions HTTP/1.1 ",
            b"POST /v1/completions HTTP/1.1 x",
            b"POST /v1/completions HTTP/2.0",
            b"POST /v1/completions HTTP/1.2",
            b"POST /v1/completions HTTP/11",
            b"POST /v1/completions http/1.1",
            b"post /v1/completions HTTP/1.1",
            b"POST /v1/completions",
            b"POST /v1/comp\x00letions HTTP/1.1",
            b"POST /v1/comp\xffletions HTTP/1.1",
            b"POST /v1/comp\rletions HTTP/1.1",
            b" POST /v1/completions HTTP/1.1",
            b"PRI * HTTP/2.0",
        )
    ],
    "bare line feeds": [
        build([b"content-length: " + LENGTH], b"").replace(b"\r\n", b"\n") + BODY,
        build([b"content-length: " + LENGTH], b"").replace(b"\r\n\r\n", b"\n\n") + BODY,
        build([b"content-length: " + LENGTH], b"").replace(b"\r\n\r\n", b"\r\n\n") + BODY,
        build([b"content-length: " + LENGTH], b"").replace(b"\r\n", b"\n", 1) + BODY,
        build([CHUNKED], b"").replace(b"\r\nt", b"\nt") + whole(BODY),
    ],
    # After another request, a head may exceed the limit by one read, 256 KiB.
    "too much": [
        build([b"a: b"] * 100_000, BODY),
        build([b"a: " + b"b" * 400_000], BODY),
        build([], BODY, b"POST /" + b"a" * 400_000 + b" HTTP/1.1"),
        *measured(b"65537", b"9" * 18),
        *chunks(chunk(b"[" * 70_000)),
    ],
}
