"""Reads and changes the arguments of an engine, which the agent otherwise passes on unread.

As vLLM and argparse read them: `--name value`, `--name=value`, `--name first second`; `_` in a name
is `-`; the last of several counts; parts of an object as `--name.key value`. vLLM's parser is made
without abbreviations (`cleave_worker.vllm.parsed_arguments`).
"""

import json
import re
from collections.abc import Iterator, Sequence

_SHORT = {"-s": "--speculative-config", "-sc": "--speculative-config"}
"""Of the options that are read here; argparse completes names with one dash in any case."""
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")


def get_option(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of an option; None: it is not given, or has none."""
    values = get_values(arguments, name)
    return values[0] if values else None


def get_values(arguments: Sequence[str], name: str) -> list[str]:
    """Return the values of an option with several."""
    found: list[str] = []
    for option, values in split_options(arguments):
        if option == name:
            found = values
    return found


def get_settings(arguments: Sequence[str], name: str) -> dict[str, object]:
    """Return the object that an option has, as JSON or in parts: then the JSON does not count.
    Empty: it is not given, or the engine refuses it."""
    parts: dict[str, object] = {}
    for option, values in split_options(arguments):
        if option.startswith(f"{name}.") and values:
            *path, last = option.removeprefix(f"{name}.").split(".")
            owner = parts
            for key in path:
                child = owner.setdefault(key, {})
                owner = child if isinstance(child, dict) else {}
            owner[last] = _decode(values[0])
    return parts or decode_object(get_option(arguments, name))


def decode_object(text: str | None) -> dict[str, object]:
    """Return the object that a JSON text holds; empty: it holds none."""
    value = _decode(text or "{}")
    return value if isinstance(value, dict) else {}


def remove_option(arguments: Sequence[str], name: str) -> list[str]:
    """Return the arguments without an option that has one value."""
    kept: list[str] = []
    skips_value = False
    for argument in arguments:
        if skips_value:
            skips_value = False
        elif _normalize(argument.partition("=")[0]) == name:
            skips_value = "=" not in argument
        else:
            kept.append(argument)
    return kept


def split_options(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each option with its values."""
    option, values = "", list[str]()
    for argument in arguments:
        if not argument.startswith("-") or _NUMBER.fullmatch(argument):
            values.append(argument)
            continue
        if option:
            yield option, values
        name, has_value, value = argument.partition("=")
        option, values = _normalize(name), [value] if has_value else []
    if option:
        yield option, values


def _normalize(name: str) -> str:
    name, dot, keys = name.partition(".")
    if name.startswith("--"):
        name = name.replace("_", "-")
    return f"{_SHORT.get(name, name)}{dot}{keys}"


def _decode(text: str) -> object:
    """What a text is as JSON; itself where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
