"""What `status` says of a gateway that does not serve."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cleave.local.status import GatewayHealth, get_gateway_health

Serve = Callable[[int, bytes], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Answers every GET with one status and body; gives its URL."""
    servers: list[HTTPServer] = []

    def start(status: int, body: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


async def test_a_gateway_that_serves_needs_no_reason(serve: Serve) -> None:
    assert await get_gateway_health(
        serve(200, b'{"status": "ok", "reasons": []}')
    ) == GatewayHealth(serving=True)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ({"status": "unavailable", "reasons": ["no instance of 'a'", "none of 'b'"]},
         "no instance of 'a'; none of 'b'"),
        ({"status": "draining", "reasons": [], "models": {"m": "x" * 500}}, "draining"),
    ],
)  # fmt: skip
async def test_the_reasons_of_an_unready_gateway_are_readable(
    serve: Serve, page: dict[str, object], reason: str
) -> None:
    assert await get_gateway_health(serve(503, json.dumps(page).encode())) == GatewayHealth(
        False, reason
    )


async def test_another_program_on_the_port_is_quoted_briefly(serve: Serve) -> None:
    health = await get_gateway_health(serve(503, b"out of order " * 100))
    assert not health.serving
    assert health.reason.startswith("out of order")
    assert len(health.reason) <= 200


async def test_no_answer_is_not_serving() -> None:
    health = await get_gateway_health("http://127.0.0.1:9")
    assert (health.serving, health.reason.startswith("no response")) == (False, True)
