"""What a gateway checks as it starts; limits of open files in processes of their own."""

import subprocess
import sys

import pytest

from cleave.gateway import main as main_module

SCRIPT = """
import logging, os, resource, sys
from cleave.gateway.main import raise_open_file_limit

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
soft, hard, clients = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
raise_open_file_limit(clients)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def run(soft: int, hard: int, clients: int) -> list[str]:
    command = [sys.executable, "-c", SCRIPT, *map(str, (soft, hard, clients))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


def test_the_soft_limit_is_raised_to_the_hard_one_and_the_log_says_so() -> None:
    assert run(64, 1_000, 500) == ["up to 1000 files may be open instead of 64", "1000 1000"]


def test_a_limit_that_is_as_high_as_it_may_be_stays_and_nothing_is_said() -> None:
    assert run(900, 900, 500) == ["900 900"]


@pytest.mark.parametrize("soft", [64, 900])
def test_the_warning_about_too_few_files_names_the_remedy(soft: int) -> None:
    *_, warning, limits = run(soft, 900, 16_384)
    assert warning.startswith("900 files may be open, too few for --max-clients 16384")
    assert "ulimit -Hn" in warning
    assert limits == "900 900"


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
    for default in ("127.0.0.1", "8080", "PrefixAware", "16MiB", "30.0"):
        assert f"(default {default})" in text
    assert text.count("default: no authentication") == 1
