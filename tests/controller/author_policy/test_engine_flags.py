"""The flags of engines, compared with the parsers that read them."""

import argparse
import contextlib
import io
import random
from typing import Any

import pytest

from cleave.controller.author_policy.commands import COMMAND
from cleave.controller.author_policy.engine_flags import HARMLESS, RISKS, count_values, find_risk

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

SEED, TRIES = 7, 3000
_UNSET = object()


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """vLLM's own, of `vllm serve`."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser(exit_on_error=False))


def list_names(action: argparse.Action) -> list[str]:
    long = [name for name in action.option_strings if name.startswith("--")]
    return [name for name in long if not (name.startswith("--no-") and len(long) > 1)]


@pytest.mark.vllm
def test_every_flag_of_vllms_parser_is_known_with_its_number_of_values(
    parser: argparse.ArgumentParser,
) -> None:
    flags = {
        name: action
        for action in parser._actions
        for name in list_names(action)
        if name != "--help"
    }
    assert len(flags) > 300
    assert not {*flags} - {*HARMLESS, *RISKS}
    emulated = {"--latency", "--time-scale", "--kv-bandwidth-gbps", "--kv-latency-ms"}
    assert {*HARMLESS, *RISKS} - {*flags} == emulated | {"--fault-injection"}
    for name, action in flags.items():
        expected = {0: 0, None: 1, "?": 1, "+": 1 << 16}[action.nargs]
        assert count_values(name) == expected, name
        if isinstance(action, argparse.BooleanOptionalAction):
            assert find_risk(name.replace("--", "--no-", 1)) == find_risk(name)


@pytest.mark.vllm
def test_what_vllm_reads_from_judged_arguments_is_harmless(parser: argparse.ArgumentParser) -> None:
    """Random arguments; vLLM's own parser says what it understood of those that are allowed."""
    picks = random.Random(SEED)
    risky = {
        action.dest
        for action in parser._actions
        if any(name in RISKS for name in list_names(action)) or not action.option_strings
    }
    accepted = 0
    for _ in range(TRIES):
        arguments = [_draw(picks) for _ in range(picks.randint(1, 4))]
        command = ["python", "-m", "cleave_worker.agent.main", "--name", "x", "--", *arguments]
        if next(COMMAND.list_faults(command, "", {}), None) is not None:
            continue
        understood = _parse(parser, arguments)
        if understood is None:
            continue
        accepted += 1
        # A positional argument that is absent is None.
        changed = {name for name, value in understood.items() if value not in (_UNSET, None)}
        assert not changed & risky, arguments
    assert accepted > 100


def _parse(parser: argparse.ArgumentParser, arguments: list[str]) -> dict[str, Any] | None:
    """What the parser sets; None: it refuses the arguments."""
    space = argparse.Namespace(**{action.dest: _UNSET for action in parser._actions})
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return vars(parser.parse_args(arguments, space))
    except (argparse.ArgumentError, argparse.ArgumentTypeError, SystemExit, ValueError):
        return None
    except Exception:  # noqa: BLE001 - faults of vLLM's parser are its own
        return None


def _draw(picks: random.Random) -> str:
    # Only Cleave sets those of emulated engines, which vLLM would take for a model.
    harmless = [*{*HARMLESS} - {"--latency", "--time-scale"}]
    flag = picks.choice(
        sorted(harmless) * 2 + [*RISKS, "-O", "-tp", "-q", "--", "-1", "-0.5", "2", "x"]
    )
    flag = picks.choice([flag, flag, flag, flag.replace("-", "_").replace("__", "--", 1)])
    if picks.random() < 0.1:
        flag = flag[: picks.randint(2, len(flag))] if len(flag) > 2 else flag
    if picks.random() < 0.1:
        flag = flag.replace("--", "--no-", 1)
    if picks.random() < 0.05:
        flag += picks.choice([".x", ".x.y", "+", ".x+"])
    if picks.random() < 0.6:
        values = ["1", "x", "auto", "{}", "[]", "--worker-cls", "/data", "true", '{"a": 1}', "-1"]
        flag += "=" + picks.choice(values)
    return flag


@pytest.mark.parametrize(
    ("flag", "risk"),
    [
        ("--seed", ""),
        ("--enforce-eager", ""),
        ("--no-enable-prefix-caching", ""),
        ("--no-seed", "is not known to this version of Cleave"),
        ("--trust-remote-code", "may load code"),
        ("--no-trust-remote-code", "may load code"),
        ("--Seed", "is not known to this version of Cleave"),
        ("--", "is not known to this version of Cleave"),
        ("--port", "is Cleave's to set"),
    ],
)
def test_a_flag_is_known_in_full_only(flag: str, risk: str) -> None:
    assert find_risk(flag) == risk


def test_no_flag_is_in_two_classes() -> None:
    assert not {*HARMLESS} & {*RISKS}
