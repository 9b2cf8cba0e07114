"""Reads and changes the arguments of an engine, which the agent otherwise passes on unread.

As vLLM and argparse read them: `--name value`, `--name=value`, `--name first second`; `_` in a name
is `-`; the last of several counts.
"""

from collections.abc import Iterator, Sequence


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
        if not argument.startswith("--"):
            values.append(argument)
            continue
        if option:
            yield option, values
        name, has_value, value = argument.partition("=")
        option, values = _normalize(name), [value] if has_value else []
    if option:
        yield option, values


def _normalize(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name
