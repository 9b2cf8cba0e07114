"""`cleave top` in front of a gateway that answers from a script."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from cleave.cli.main import app
from cleave.gateway.metrics.gateway_metrics import GatewayMetrics, SloTargets
from cleave.local import state
from cleave.local.state import DeploymentSnapshot
from cleave.rpc.fleet_status import FleetInstance, FleetStatus

from tests.support.metrics_page import write_gateway_page

COMMAND = [sys.executable, "-m", "cleave.cli.main", "top"]
FLEET = FleetStatus(
    (
        FleetInstance("chat-prefill-0", "chat", "m", role="prefill", home="prefill", state="ready"),
        FleetInstance("chat-decode-0", "chat", "m", role="mixed", home="decode", state="ready"),
    )
)
OF_ITS_OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
PATIENCE_S = 30


class Gateway:
    """Counts an answer at each look."""

    def __init__(self) -> None:
        self.metrics = GatewayMetrics(SloTargets(0.4, 0.04))
        self.pages = {
            "/fleet": lambda: msgspec.json.encode(FLEET),
            "/metrics": self._render_metrics,
        }
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def _render_metrics(self) -> bytes:
        self.metrics.requests["m", "ok"] += 1
        self.metrics.slo_results["m", ""] += 1
        self.metrics.models["m"].ttft["prefill"].observe(0.15)
        return write_gateway_page(self.metrics)

    def start(self) -> None:
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = gateway.pages.get(self.path)
                body = page() if page else b"no such path"
                self.send_response(200 if page else 404)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.stop()


def test_once_is_one_table_with_what_happened_between_two_looks(
    cli: CliRunner, gateway: Gateway
) -> None:
    done = cli.invoke(app, ["top", "--gateway", gateway.url, "--once", "--interval", "0.2"])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("chat  m\n")
    assert done.stdout.count("INSTANCE") == 1
    lines = [line.split() for line in done.stdout.splitlines()]
    window = lines[lines.index(next(line for line in lines if line[:1] == ["WINDOW"])) + 1]
    assert (window[4], window[6]) == ("100.0%", "150")
    assert ["chat-decode-0", "decode→mixed"] in [line[:2] for line in lines]


def test_programs_get_an_object(cli: CliRunner, gateway: Gateway) -> None:
    arguments = ["top", "chat", "--gateway", f"{gateway.url}/", "--once", "--interval", "0.2"]
    done = cli.invoke(app, [*arguments, "-o", "json"])
    assert done.exit_code == 0, done.stderr
    (line,) = done.stdout.splitlines()
    output = json.loads(line)
    assert output["deployments"] == ["chat"]
    assert output["slo"] == {"ttftMs": 400, "tpotMs": 40}
    assert output["minute"]["sloAttainment"] == 1.0
    assert output["minute"]["tpotP50Ms"] is None
    assert [each["home"] for each in output["instances"]] == ["prefill", "decode"]


def test_of_a_deployment_on_this_machine_the_gateway_is_known(
    cli: CliRunner, gateway: Gateway
) -> None:
    folder = state.get_folder("chat")
    with folder.lock():
        folder.write(DeploymentSnapshot("chat", os.getpid(), "http://127.0.0.1:1"))
        done = cli.invoke(app, ["top", "--once"])
        assert (done.exit_code, "try again" in done.stderr) == (1, True)
        folder.write(
            DeploymentSnapshot("chat", os.getpid(), "http://127.0.0.1:1", internal_url=gateway.url)
        )
        done = cli.invoke(app, ["top", "--once", "--interval", "0.2"])
    assert (done.exit_code, done.stdout.startswith("chat  m\n")) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 1, "no deployments running on this machine"),
        (["chat"], 1, "chat is not running on this machine"),
        (
            ["--gateway", "127.0.0.1:8081"],
            2,
            "--gateway 127.0.0.1:8081: must be a URL such as http://",
        ),
        (["--gateway", "https://g:8081"], 2, "must be a URL such as http://"),
        (["--gateway", "http://g:port"], 2, "must be a URL such as http://"),
        (["--gateway", "http://127.0.0.1:9"], 1, "gateway at http://127.0.0.1:9: "),
    ],
)
def test_what_cannot_be_watched_is_a_line_and_a_code(
    cli: CliRunner, arguments: list[str], code: int, said: str
) -> None:
    done = cli.invoke(app, ["top", "--once", *arguments])
    assert (done.exit_code, len(done.stderr.splitlines())) == (code, 1)
    assert done.stderr.startswith("error: ")
    assert said in done.stderr


def test_the_client_port_is_recognized(cli: CliRunner, gateway: Gateway) -> None:
    del gateway.pages["/fleet"]
    done = cli.invoke(app, ["top", "--gateway", gateway.url])
    assert done.exit_code == 1
    assert "/fleet answers 404; --gateway needs its internal port, 8081" in done.stderr


def test_another_server_and_another_deployment_are_reported(
    cli: CliRunner, gateway: Gateway
) -> None:
    done = cli.invoke(app, ["top", "llama", "--gateway", gateway.url])
    assert (done.exit_code, "serves chat, not llama" in done.stderr) == (1, True)
    gateway.pages["/metrics"] = lambda: b"<html>"
    done = cli.invoke(app, ["top", "--gateway", gateway.url])
    assert done.exit_code == 1
    assert "not that of a gateway: a page without metrics of a gateway" in done.stderr


def test_a_gateway_may_go_away_and_come_back(gateway: Gateway) -> None:
    command = [*COMMAND, "--gateway", gateway.url, "--interval", "0.2", "-o", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as top:
        try:
            assert top.stdout is not None
            looks = (json.loads(line) for line in top.stdout)
            assert next(look for look in looks if look["now"])["fault"] is None
            gateway.stop()
            gone = next(look for look in looks if look["fault"])
            assert len(gone["instances"]) == 2, "what it said last"
            gateway.start()
            assert next(look for look in looks if not look["fault"])["minute"]
            top.send_signal(signal.SIGINT)
            assert top.wait(PATIENCE_S) == 130
        finally:
            top.kill()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, b"q"])
def test_the_terminal_is_left_as_it_was(
    gateway: Gateway, end: signal.Signals | bytes, tmp_path: Path
) -> None:
    ours, its = pty.openpty()
    before = termios.tcgetattr(ours)
    environment = os.environ | {"TERM": "xterm-256color", "CLEAVE_STATE_DIR": str(tmp_path)}
    command = [*COMMAND, "--gateway", gateway.url, "--interval", "0.2"]
    wrapped = [sys.executable, "-c", OF_ITS_OWN_TERMINAL, *command]
    with subprocess.Popen(
        wrapped, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True
    ) as top:
        os.close(its)
        try:
            seen = read_until(ours, b"", b"chat-decode-0")
            assert b"\x1b[?1049h" in seen, "a screen of its own"
            if isinstance(end, bytes):
                os.write(ours, b"x" + end)
            else:
                top.send_signal(end)
            seen = read_until(ours, seen, b"\x1b[?1049l")
            assert top.wait(PATIENCE_S) == (0 if end == b"q" else 130)
            seen = read_until(ours, seen, b"\x1b[?25h")
            assert termios.tcgetattr(ours) == before
            assert b"Traceback" not in seen
        finally:
            top.kill()
            os.close(ours)


def read_until(terminal: int, seen: bytes, expected: bytes) -> bytes:
    while expected not in seen:
        assert select.select([terminal], [], [], PATIENCE_S)[0], f"not shown: {expected!r}"
        seen += os.read(terminal, 1 << 16)
    return seen
