"""Pages of allowed origins read every response, pages of others none."""

import pytest

from cleave.gateway.app.client_connection import ClientConnection
from cleave.gateway.app.cors import CorsConnection, CorsPolicy
from cleave.gateway.config import GatewayConfig

ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}
CHAT = "https://chat.example.com"
OTHER = "https://evil.example.com"
ALLOWED = "access-control-allow-origin"


def preflight(path: str, origin: str, method: str = "POST") -> bytes:
    return (
        f"OPTIONS {path} HTTP/1.1\r\nHost: g\r\nOrigin: {origin}\r\n"
        f"Access-Control-Request-Method: {method}\r\n"
        "Access-Control-Request-Headers: authorization,content-type,x-stainless-os\r\n\r\n"
    ).encode()


@pytest.fixture
async def stage(make_stage):
    return await make_stage({"x": "mixed"}, allowed_origins=(CHAT, "http://localhost:3000"))


async def test_a_preflight_of_an_allowed_origin_is_granted_without_a_key(
    make_stage, tmp_path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-of-preflights\n")
    stage = await make_stage({"x": "mixed"}, allowed_origins=(CHAT,), api_keys=keys)
    client = await stage.connect()
    client.writer.write(preflight("/v1/chat/completions", CHAT))
    response = await client.read()
    assert (response.status, response.body) == (200, b"")
    assert response.headers[ALLOWED] == CHAT
    assert response.headers["vary"] == "origin"
    assert "POST" in response.headers["access-control-allow-methods"]
    # For browsers `*` does not stand for Authorization.
    assert response.headers["access-control-allow-headers"] == "authorization, *"
    assert int(response.headers["access-control-max-age"]) > 0
    answer = await client.ask(ASK, Origin=CHAT, Authorization="Bearer secret-of-preflights")
    assert (answer.status, answer.headers[ALLOWED]) == (200, CHAT), "the connection goes on"


@pytest.mark.parametrize(
    "origin", [OTHER, "http://chat.example.com", f"{CHAT}:8443", f"{CHAT}.evil.com", "null"]
)
async def test_a_preflight_of_another_origin_is_refused(stage, origin: str) -> None:
    client = await stage.connect()
    client.writer.write(preflight("/v1/chat/completions", origin))
    response = await client.read()
    assert (response.status, response.error["code"]) == (403, "origin_not_allowed")
    assert "allowedOrigins" in response.error["message"]
    assert ALLOWED not in response.headers
    answer = await client.ask(ASK, Origin=origin)
    assert (answer.status, answer.headers.get(ALLOWED)) == (200, None)
    assert answer.headers["vary"] == "origin", "caches keep the two apart"


@pytest.mark.parametrize(
    ("body", "path", "status"),
    [
        (ASK, "/v1/completions", 200),
        (ASK | {"stream": True}, "/v1/completions", 200),
        (None, "/v1/models", 200),
        (None, "/health", 200),
        (ASK | {"model": "none"}, "/v1/completions", 404),
        (None, "/nowhere", 404),
        (None, "/v1/completions", 405),
        (b"{", "/v1/completions", 400),
    ],
)
async def test_every_response_names_the_origin_once(stage, body, path, status) -> None:
    client = await stage.connect()
    for origin, expected in ((CHAT, CHAT), (OTHER, None), (CHAT, CHAT)):
        client.send(body, path, Origin=origin)
        raw = await client.reader.readuntil(b"\r\n\r\n")
        assert raw.startswith(b"HTTP/1.1 %d " % status)
        assert raw.lower().count(b"access-control-allow-origin") == bool(expected)
        client.close()
        client = await stage.connect()
        response = await client.ask(body, path, Origin=origin)
        assert (response.status, response.headers.get(ALLOWED)) == (status, expected)


async def test_errors_of_engines_name_the_origin_and_engines_own_headers_are_dropped(stage) -> None:
    async def refuse(engine, request, writer):
        writer.write(
            b"HTTP/1.1 400 X\r\ncontent-type: application/json\r\naccess-control-allow-origin: *"
            b'\r\ncontent-length: 17\r\n\r\n{"detail": "no" }'
        )

    stage.engines["x"].script = refuse
    response = await stage.ask(ASK, Origin=CHAT)
    assert (response.status, response.headers[ALLOWED]) == (400, CHAT)
    assert response.error["message"] == "no"


async def test_a_body_that_is_too_large_is_refused_readably(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, allowed_origins=(CHAT,), max_body_bytes=1_000)
    response = await stage.ask(b"x" * 2_000, Origin=CHAT)
    assert (response.status, response.headers[ALLOWED]) == (413, CHAT)
    client = await stage.connect()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: g\r\nOrigin: {CHAT}\r\n"
    client.writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
    client.writer.write(b"7d0\r\n" + b"x" * 2_000 + b"\r\n0\r\n\r\n")
    response = await client.read()
    assert (response.status, response.headers[ALLOWED]) == (413, CHAT)


async def test_a_request_without_room_is_refused_readably(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, allowed_origins=(CHAT,), max_body_bytes=100_000)
    stage.context.buffer_budget.reserve(stage.context.config.max_buffered_bytes)
    try:
        response = await stage.ask(b"x" * 50_000, Origin=CHAT)
    finally:
        stage.context.buffer_budget.release(stage.context.config.max_buffered_bytes)
    assert (response.status, response.headers[ALLOWED]) == (503, CHAT)


async def test_a_request_that_is_too_late_is_refused_readably(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, allowed_origins=(CHAT,), idle_s=0.2)
    client = await stage.connect()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: g\r\nOrigin: {CHAT}\r\n"
    client.writer.write(f"{head}Content-Length: 9\r\n\r\n{{".encode())
    response = await client.read()
    assert (response.status, response.headers[ALLOWED]) == (408, CHAT)


async def test_all_origins_may_be_allowed(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, allowed_origins=("*",))
    for response in (
        await stage.ask(ASK, Origin=OTHER),
        await stage.ask(ASK),
        await stage.ask(None, "/nowhere", Origin=OTHER),
    ):
        assert response.headers[ALLOWED] == "*"
        assert "vary" not in response.headers
    client = await stage.connect()
    client.writer.write(b"nonsense\r\n\r\n")
    assert (await client.read()).headers[ALLOWED] == "*"


async def test_a_request_to_go_on_gets_no_origin_but_its_response_does(stage) -> None:
    client = await stage.connect()
    client.writer.write(
        f"POST /v1/completions HTTP/1.1\r\nHost: g\r\nOrigin: {CHAT}\r\nExpect: 100-continue\r\n"
        "Content-Length: 2\r\n\r\n".encode()
    )
    assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.writer.write(b"[]")
    response = await client.read()
    assert (response.status, response.headers[ALLOWED]) == (400, CHAT)


async def test_options_without_an_origin_is_no_preflight(stage) -> None:
    client = await stage.connect()
    client.writer.write(b"OPTIONS /v1/completions HTTP/1.1\r\nHost: g\r\n\r\n")
    assert (await client.read()).status == 405


async def test_without_the_option_there_is_no_trace_of_it(pair, internal_port) -> None:
    assert GatewayConfig("").allowed_origins == ()
    client = await pair.connect()
    client.writer.write(preflight("/v1/completions", CHAT))
    assert (await client.read()).status == 405
    response = await client.ask(ASK, Origin=CHAT)
    assert not {ALLOWED, "vary"} & response.headers.keys()
    await pair.until(lambda: bool(pair.context.clients), "the client is known")
    assert {type(client) for client in pair.context.clients} == {ClientConnection}


async def test_the_internal_port_is_not_for_pages(make_stage, internal_port: int) -> None:
    stage = await make_stage({"x": "mixed"}, allowed_origins=("*",), internal_port=internal_port)
    await stage.connect()
    await stage.until(lambda: bool(stage.context.clients), "the client is known")
    assert {type(client) for client in stage.context.clients} == {CorsConnection}
    stage.gateway.port = internal_port
    assert ALLOWED not in (await stage.ask(None, "/health", Origin=CHAT)).headers


def test_origins_are_compared_as_a_whole() -> None:
    policy = CorsPolicy((CHAT,))
    assert policy.allows(CHAT.encode())
    assert not policy.allows(CHAT.upper().encode())
    assert not policy.allows(b"")
