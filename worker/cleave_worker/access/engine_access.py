"""Decides which requests an engine serves: those with its key.

Used by vLLM's API servers as an ASGI middleware (`--middleware`) and by the emulated engine. vLLM's
own `--api-key` guards a part of its paths only; others would still tokenize, classify or pause.
"""

import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from os import environ
from typing import Any

from cleave.rpc import engine_key

MIDDLEWARE = "cleave_worker.access.engine_access.EngineAccessMiddleware"
"""For vLLM's command line."""
REFUSAL = b'{"error":{"message":"The engine asks for its key.","type":"Unauthorized","code":401}}'
_HEADER = engine_key.HEADER.encode()
_OPEN_PATHS = frozenset({"/health", "/metrics", "/metrics/"})
"""For probes and Prometheus: they compute nothing and show no request."""

Scope = MutableMapping[str, Any]
AsgiApp = Callable[[Scope, Any, Any], Awaitable[None]]


class EngineAccess:
    """The key of this start of the engine."""

    def __init__(self, key: str) -> None:
        """`key`: empty: all requests are served."""
        self._key = key.encode()

    def is_allowed(self, path: str, presented: bytes) -> bool:
        """Whether to serve a request; `presented`: the key that it has."""
        return not self._key or hmac.compare_digest(presented, self._key) or path in _OPEN_PATHS


def read_access(env: Mapping[str, str]) -> EngineAccess:
    """The access that the agent has configured in the environment."""
    return EngineAccess(env.get(engine_key.ENV, ""))


class EngineAccessMiddleware:
    """Refuses HTTP requests and WebSockets without the key."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self._access = read_access(environ)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:  # noqa: ANN401 - ASGI
        """Pass a request on, or refuse it."""
        kind = scope["type"]
        if kind not in ("http", "websocket") or self._access.is_allowed(
            scope["path"], find_key(scope["headers"])
        ):
            await self._app(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})


def find_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key in the headers of a request; empty without one."""
    return next((value for name, value in headers if name == _HEADER), b"")
