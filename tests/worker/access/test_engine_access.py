"""An engine serves requests with its key, and probes."""

from typing import Any

import pytest

from cleave.rpc.engine_key import ENV, HEADER
from cleave_worker.access.engine_access import EngineAccess, EngineAccessMiddleware, find_key

HTTP, KEY = "http", b"right"
COMPUTING = [
    *("/v1/completions", "/v1/models", "/tokenize", "/pooling", "/pause", "/invocations"),
    *("/metrics/x", "/health/../tokenize", "//health", "/version", "/docs"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
]


@pytest.mark.parametrize("path", COMPUTING)
@pytest.mark.parametrize("presented", [b"", b"wrong", b"right ", b"Right", b"\xff"])
def test_nothing_is_served_without_the_key(path: str, presented: bytes) -> None:
    assert not EngineAccess("right").is_allowed(path, presented)
    assert EngineAccess("right").is_allowed(path, KEY)


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_probes_and_prometheus_need_no_key(path: str) -> None:
    assert EngineAccess("right").is_allowed(path, b"")


def test_an_engine_without_a_key_serves_all() -> None:
    assert EngineAccess("").is_allowed("/v1/completions", b"")


class FakeServer:
    """An ASGI server and the application behind the middleware."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.passed: list[str] = []

    async def app(self, scope: Any, receive: object, send: object) -> None:
        self.passed.append(scope["type"])

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def ask(self, middleware: EngineAccessMiddleware, kind: str, *headers: Any) -> None:
        scope = {"type": kind, "path": "/v1/completions", "headers": list(headers)}
        await middleware(scope, None, self.send)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    monkeypatch.setenv(ENV, "right")
    return FakeServer()


async def test_the_middleware_refuses_requests_and_web_sockets(server: FakeServer) -> None:
    middleware = EngineAccessMiddleware(server.app)
    for kind in (HTTP, "websocket"):
        await server.ask(middleware, kind, (b"authorization", b"Bearer right"))
    assert server.passed == []
    assert [each.get("status", each.get("code")) for each in server.sent] == [401, None, 1008]
    for kind in (HTTP, "websocket"):
        await server.ask(middleware, kind, (HEADER.encode(), KEY))
    await middleware({"type": "lifespan"}, None, server.send)
    assert server.passed == [HTTP, "websocket", "lifespan"]


def test_the_first_of_several_keys_counts() -> None:
    name = HEADER.encode()
    assert find_key([(b"x", b"y"), (name, b"a"), (name, b"b")]) == b"a"
    assert find_key([]) == b""
