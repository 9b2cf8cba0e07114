"""What a gateway checks as it starts; limits of open files in processes of their own."""

import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from cleave.gateway import main as main_module
from cleave.gateway.admission.api_keys import ApiKeys
from cleave.gateway.config import GatewayConfig
from cleave.gateway.context import GatewayContext
from cleave.gateway.main import OWN_FILES, limit_clients
from cleave.router.registry import InstanceRegistry
from cleave.router.router import Router

from tests.support.ports import find_free_port

SCRIPT = """
import logging, os, resource, sys
from cleave.gateway.main import limit_clients, raise_file_limit

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
soft, hard, clients = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(limit_clients(clients, raise_file_limit()))
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def run(soft: int, hard: int, clients: int) -> list[str]:
    command = [sys.executable, "-c", SCRIPT, *map(str, (soft, hard, clients))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_the_soft_limit_is_raised_to_the_hard_one_and_the_log_says_so() -> None:
    log = "up to 1000 files may be open instead of 64"
    assert run(64, 1_000, 400) == [log, "400", "1000 1000"]


def test_a_limit_that_is_as_high_as_it_may_be_stays_and_nothing_is_said() -> None:
    assert run(900, 900, 300) == ["300", "900 900"]


@pytest.mark.parametrize("soft", [64, 900])
def test_the_warning_about_too_few_files_names_the_remedy(soft: int) -> None:
    *_, warning, clients, limits = run(soft, 900, 16_384)
    assert warning.startswith("900 files may be open, too few for --max-clients 16384")
    assert "ulimit -Hn" in warning
    assert (clients, limits) == ("366", "900 900")


@pytest.mark.parametrize("files", [150, 200, 1_024, 20_000, 1 << 20])
def test_clients_their_engines_and_the_internal_port_have_files(files: int) -> None:
    clients = limit_clients(16_384, files)
    context = GatewayContext(
        GatewayConfig("", max_clients=clients), Router(InstanceRegistry()), ApiKeys(None)
    )
    own = 2 * clients + context.internal_limiter._limit + OWN_FILES
    assert 1 <= clients <= 16_384
    assert own <= files
    assert limit_clients(16_384, 0) == 1


@pytest.mark.interpreted
def test_idle_clients_leave_files_for_the_internal_port_and_for_others() -> None:
    port, internal_port = find_free_port(), find_free_port()
    limits = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)); "
    script = (
        limits + "import sys; from cleave.gateway.main import main; sys.exit(main(sys.argv[1:]))"
    )
    ports = ["--port", str(port), "--internal-port", str(internal_port)]
    gateway = subprocess.Popen(
        [sys.executable, "-c", script, "--agents", "127.0.0.1:1", *ports],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def ask(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), 30) as client:
            client.sendall(b"GET /livez HTTP/1.1\r\nHost: g\r\n\r\n")
            return client.recv(12)

    try:
        for _ in range(300):
            with suppress(OSError):
                ask(internal_port)
                break
            time.sleep(0.1)
        idle = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(400)]
        for _ in range(3):
            assert ask(internal_port) == b"HTTP/1.1 200"
            assert ask(port) == b"HTTP/1.1 404"
        for each in idle:
            each.close()
    finally:
        gateway.kill()
        gateway.wait()


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("host", "options", "warns"),
    [
        ("0.0.0.0", [], True),
        ("127.0.0.1,::", [], True),
        ("gateway.example", [], True),
        ("127.0.0.1,::1,localhost", [], True),
        ("127.0.0.1,::1,localhost", ["--allowed-hosts", "localhost"], False),
        ("0.0.0.0", ["--allowed-hosts", "localhost"], True),
        ("0.0.0.0", ["--api-keys", "keys"], False),
    ],
)
def test_a_gateway_that_everybody_may_use_warns(monkeypatch, caplog, host, options, warns) -> None:
    monkeypatch.setattr(main_module, "run", lambda config: 0)
    assert main_module.main(["--agents", "", "--host", host, *options]) == 0
    assert ("--api-keys" in caplog.text) == warns


def test_the_help_shows_defaults_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main_module.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for default in ("127.0.0.1", "8080", "PrefixAware", "16MiB", "30"):
        assert f"(default {default})" in text
    assert text.count("default: no authentication") == 1
