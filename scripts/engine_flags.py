"""Writes the flags of both engines: `.venv/bin/python scripts/engine_flags.py`.

From the parsers of the installed vLLM and of the emulated engine into
`operator/cleave/api/pods/engine_flags.json`, which `cleave.api.pods.engine_flags` loads; run it
when vLLM's version changes. What a flag takes is found out by calling its type with texts: vLLM
makes most of its types inside functions.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

OUTPUT = Path("operator/cleave/api/pods/engine_flags.json")
_VALUES = {0: 0, None: 1, "?": "?", "+": "+"}
_LIMITS = ("gt", "ge", "lt", "le")
_OBJECTS = ("config", "kwargs", "overrides", "limit-mm-per-prompt")
"""Ends of the names of flags that take a JSON object, where the parser takes any JSON."""


def main() -> None:
    """Write the file."""
    import vllm

    engines = {
        "vLLM": {"version": vllm.__version__, "flags": describe_vllm()},
        "Emulated": {"version": "", "flags": describe(build_emulator_parser())},
    }
    lines = []
    for engine, each in engines.items():
        flags = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in each["flags"].items())
        head = f'{json.dumps(engine)}: {{"version": {json.dumps(each["version"])}, "flags": {{'
        lines.append(f"{head}\n{flags}\n }}}}")
    OUTPUT.write_text("{" + ",\n".join(lines) + "}\n")


def build_vllm_parser() -> argparse.ArgumentParser:
    """The parser of `vllm serve`."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser(exit_on_error=False))


def describe_vllm() -> dict[str, dict[str, Any]]:
    """What each flag of vLLM takes, with the `names` and `bounds` that it compares values with at
    its start."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    flags = describe(build_vllm_parser())
    flags["--tool-call-parser"]["names"] = ToolParserManager.list_registered()
    flags["--reasoning-parser"]["names"] = ReasoningParserManager.list_registered()
    for name, bounds in _list_bounds().items():
        if name in flags and len(bounds) == 1:
            flags[name]["bounds"] = bounds[0]
    return flags


def _list_bounds() -> dict[str, list[list[list[Any]]]]:
    """By flag the limits of the field that takes its value, in each of vLLM's configs that has it:
    pairs of gt, ge, lt or le and a number."""
    import vllm.config

    found: dict[str, list[list[list[Any]]]] = {}
    for config in vars(vllm.config).values():
        for name, field in getattr(config, "__pydantic_fields__", {}).items():
            kinds = [(type(each).__name__.lower(), each) for each in field.metadata]
            own = [[kind, getattr(each, kind)] for kind, each in kinds if kind in _LIMITS]
            if own and isinstance(config, type):
                found.setdefault(f"--{name.replace('_', '-')}", []).append(own)
    return found


def build_emulator_parser() -> argparse.ArgumentParser:
    """The parser of the emulated engine."""
    from cleave_worker.emulator.main import build_parser

    return build_parser()


def describe(parser: argparse.ArgumentParser) -> dict[str, dict[str, Any]]:
    """What each flag takes, by name: `values` 0, 1, "?" or "+", `kind` of a value unless it is any
    text, `choices`, `negated` where there is `--no-NAME`, `optional` where the text None may
    stand for a value."""
    return dict(sorted(_list_flags(parser)))


def _list_flags(parser: argparse.ArgumentParser) -> Iterator[tuple[str, dict[str, Any]]]:
    for action in parser._actions:
        for name in list_names(action):
            if name == "--help":
                continue
            flag: dict[str, Any] = {"values": _VALUES[action.nargs]}
            if isinstance(action, argparse.BooleanOptionalAction):
                flag["negated"] = True
            if kind := _find_kind(name, action.type):
                flag["kind"] = kind
            choices = [each for each in action.choices or () if isinstance(each, str)]
            # A function may spell a value otherwise before it is compared.
            if choices and (action.type in (None, str) or _changes_nothing(action.type, choices)):
                flag["choices"] = choices
            if action.type and action.type is not str and _takes(action.type, "None"):
                flag["optional"] = True
            yield name, flag


def list_names(action: argparse.Action) -> list[str]:
    """The full names of a flag, without that of its negation."""
    long = [name for name in action.option_strings if name.startswith("--")]
    return [name for name in long if not (name.startswith("--no-") and len(long) > 1)]


def _find_kind(name: str, convert: Any) -> str:  # noqa: ANN401 - a type or a function
    if convert is None or convert is str:
        return ""
    if _takes(convert, "x"):
        # Text, or JSON where braces are around it.
        return "" if _takes(convert, "{'a': 1}") else "objectOrText"
    if _takes(convert, "{}"):
        is_any = _takes(convert, "[]") and not name.endswith(_OBJECTS)
        return "json" if is_any else "object"
    if _takes(convert, "0.5"):
        return "float"
    return "humanInt" if _takes(convert, "1k") else "int"


def _takes(convert: Callable[[str], object], text: str) -> bool:
    try:
        convert(text)
    except Exception:  # noqa: BLE001 - types of vLLM raise many kinds
        return False
    return True


def _changes_nothing(convert: Callable[[str], object], choices: list[str]) -> bool:
    others = [each.upper().replace("_", "-") for each in choices]
    return all(convert(each) == each for each in (*choices, *others))


if __name__ == "__main__":
    main()
