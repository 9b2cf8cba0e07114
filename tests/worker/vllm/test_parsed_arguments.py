"""Options of vLLM count by their whole names, as agents and admission policies read them."""

import argparse
import json
import sys
from types import SimpleNamespace

import pytest

from cleave_worker.agent.weights.engine_arguments import get_settings
from cleave_worker.vllm.parsed_arguments import parse_arguments

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def add_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Some of vLLM's; to import all of them takes ten seconds of a core."""
    parser.add_argument("--tokenizer")
    parser.add_argument("--lora-modules", nargs="+")
    parser.add_argument("--speculative-config", "-sc", type=json.loads)
    return parser


@pytest.fixture(autouse=True)
def options(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="needs the group worker-cpu")
    for module, name, function in (
        ("launchers.cli_args", "make_arg_parser", add_options),
        ("serve.utils.api_utils", "cli_env_setup", lambda: None),
    ):
        stub = SimpleNamespace(**{name: function})
        monkeypatch.setitem(sys.modules, f"vllm.entrypoints.{module}", stub)


@pytest.mark.parametrize("option", ["--tokeniz", "--lora-mod", "--speculative-conf"])
def test_a_part_of_a_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["api_server.py", option, "x"])
    with pytest.raises(SystemExit):
        parse_arguments()
    assert f"unrecognized arguments: {option}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("-sc", '{"model": "/d"}'),
        ("-s", '{"model": "/d"}'),
        ("-sc.model", "/d", "-sc.parts.a_b=1"),
        ("--speculative_config.model=/d", "--lora_modules", "a=/a", "-sc", '{"model": "/e"}'),
        ("-sc", '{"model": "/d"}', "--speculative-config={}"),
    ],
)
def test_the_agent_reads_an_object_as_vllm_does(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "argv", ["api_server.py", *arguments])
    parsed = parse_arguments().speculative_config
    assert get_settings(arguments, "--speculative-config") == parsed
