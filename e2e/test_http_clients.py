"""HTTP clients without an SDK against the gateway: answers, streams, errors over one connection."""

import json
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from e2e.support.clients_environment import CLIENTS, run
from e2e.support.deployments import Deployment, deployed, emulated

MODEL = "chat"
TOKENS = 24

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(emulated(MODEL, 1, 1), tmp_path_factory.mktemp("http"), 180) as deployment:
        yield deployment


class Relay:
    """A port that forwards bytes to another, and counts its connections."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                server = socket.create_connection(self._target)
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=_forward, args=(source, sink), daemon=True).start()

    def close(self) -> None:
        self._listener.close()


def _forward(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@contextmanager
def relayed(deployment: Deployment) -> Iterator[Relay]:
    relay = Relay(int(deployment.url.rpartition(":")[2]))
    try:
        yield relay
    finally:
        relay.close()


def build_command(client: str) -> list[str]:
    """The command of a client, without its arguments; skips where its language is not here."""
    language, _, arguments = client.partition(" ")
    program = sys.executable if language == "python" else shutil.which(language)
    if program is None:
        pytest.skip(f"no {language} here")
    *options, script = arguments.split()
    return [program, *options, str(CLIENTS / script)]


@pytest.mark.parametrize(
    "client",
    [
        "python httpx_client.py",
        "python aiohttp_client.py",
        "node fetch.mjs",
        "go run http_client.go",
    ],
)
def test_answers_streams_and_errors_come_over_one_connection(chat: Deployment, client: str) -> None:
    command = build_command(client)
    with relayed(chat) as relay:
        found = json.loads(run(*command, relay.url, MODEL))
        assert relay.connections == 1, "kept alive, also after a stream and before an error"
    assert found["whole"] == found["streamed"]
    assert len(found["whole"].split()) == TOKENS
    assert found["pieces"] == TOKENS, "an event for each"
    assert (found["status"], found["code"]) == (404, "model_not_found")


def test_curl_uses_its_connection_again_after_a_stream(chat: Deployment, tmp_path: Path) -> None:
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": TOKENS}
    files = {}
    for name, fields in (
        ("whole", {}),
        ("stream", {"stream": True}),
        ("error", {"model": "gpt-9"}),
    ):
        files[name] = tmp_path / name
        files[name].write_text(json.dumps(body | fields))
    url = f"{chat.url}/v1/completions"
    asks = []
    for file in files.values():
        output = ["--write-out", "\n%{http_code} %{num_connects}\n", url]
        asks += ["--next", "-sSN", "--json", f"@{file}", *output]
    lines = run("curl", *asks[1:]).splitlines()
    assert [line for line in lines if line in ("200 0", "200 1", "404 0", "404 1")] == [
        "200 1", "200 0", "404 0",
    ]  # fmt: skip
    events = [line for line in lines if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert len(events) == TOKENS + 1
