"""Options of a program: each is declared once, as a field with its flag, default and help.

A dataclass of settings declares its fields with `declare` and the like; `add_options` gives a
parser their flags, and `read_options` makes the dataclass from what was parsed. Pods are started
with the flags, and the reference is generated from the parsers.
"""

import argparse
import os
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Options = TypeVar("_Options", bound="DataclassInstance")
_MAX_COUNT = 1_000_000_000
_MAX_DURATION = 1e9
_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def declare(
    flag: str,
    default: object = MISSING,
    help_text: str = "",
    *,
    parse: Callable[[str], Any] | None = None,
    metavar: str | None = None,
    choices: Sequence[str] | None = None,
    env: str = "",
) -> Any:  # noqa: ANN401 - as dataclasses.field
    """Declare a field that `flag` sets; without a default it must be given. The parser of its value
    follows from the default's type. `env`: a variable with another default."""
    option = {"flag": flag, "help": help_text, "parse": parse, "metavar": metavar}
    return field(default=default, metadata={**option, "choices": choices, "env": env})


def declare_seconds(flag: str, default: float, help_text: str = "") -> Any:  # noqa: ANN401
    """Declare a number of seconds."""
    return declare(flag, default, help_text, metavar="S")


def declare_file(flag: str, help_text: str, *, env: str = "") -> Any:  # noqa: ANN401
    """Declare a file, which may be absent."""
    return declare(flag, None, help_text, parse=Path, metavar="FILE", env=env)


def declare_each(
    flag: str, help_text: str, *, parse: Callable[[str], Any] = str, metavar: str | None = None
) -> Any:  # noqa: ANN401
    """Declare a tuple of the values of a flag that may be repeated."""
    option = {"flag": flag, "help": f"{help_text}; repeatable", "parse": parse, "metavar": metavar}
    return field(default=(), metadata={**option, "repeats": True})


def add_options(
    parser: argparse.ArgumentParser,
    *kinds: type[Any],
    env: Mapping[str, str] = os.environ,
    only: Container[str] | None = None,
) -> None:
    """Add the flags that the dataclasses declare to `parser`. `only`: fields; None: all."""
    for each in (declared for kind in kinds for declared in fields(kind)):
        if each.metadata and (only is None or each.name in only):
            _add_option(parser, each, env)


def read_options(kind: type[_Options], parsed: argparse.Namespace, **others: object) -> _Options:
    """The dataclass with what was parsed; fields whose flags the parser does not have keep their
    defaults. `others`: its fields without a flag, or in place of one."""
    declared = [each for each in fields(kind) if each.metadata]
    names = [(each.name, _get_name(each)) for each in declared if _get_name(each) in parsed]
    values = {field_name: getattr(parsed, name) for field_name, name in names}
    repeated = {name: tuple(each) for name, each in values.items() if isinstance(each, list)}
    return kind(**{**values, **repeated, **others})


def _get_name(declared: Field[Any]) -> str:
    """Where a parser keeps a value, as argparse names it: two dataclasses may have fields alike."""
    flag: str = declared.metadata["flag"]
    return flag.removeprefix("--").replace("-", "_")


def _add_option(
    parser: argparse.ArgumentParser, declared: Field[Any], env: Mapping[str, str]
) -> None:
    option, default, text = declared.metadata, declared.default, declared.metadata["help"]
    if option.get("repeats"):
        parser.add_argument(
            option["flag"],
            action="append",
            default=[],
            type=option["parse"],
            metavar=option["metavar"],
            help=text,
        )
        return
    # An empty variable is an absent one, as everywhere else.
    given = (env.get(option["env"]) or None) if option["env"] else None
    if isinstance(default, bool):
        is_set = default or given in ("1", "true")
        parser.add_argument(option["flag"], action="store_true", default=is_set, help=text)
        return
    if default not in (None, "", 0, MISSING) and "default" not in text:
        text = f"{text} (default {_format_default(default)})".strip()
    parse, metavar = _select_parser(declared), option["metavar"]
    if isinstance(default, Enum):
        metavar = "{" + ",".join(each.value for each in type(default)) + "}"
    parser.add_argument(
        option["flag"],
        type=parse,
        # argparse parses a text as if it were given.
        default=given if given is not None else None if default is MISSING else default,
        required=default is MISSING and given is None,
        metavar=metavar,
        choices=option["choices"],
        help=text,
    )


def _select_parser(declared: Field[Any]) -> Callable[[str], Any]:
    parse: Callable[[str], Any] | None = declared.metadata["parse"]
    if parse is not None:
        return parse
    if isinstance(declared.default, Enum):
        return partial(_parse_choice, type(declared.default))
    if declared.default is MISSING or declared.default is None:
        return str
    # Their types themselves would take any number.
    kind = type(declared.default)
    return {int: parse_count, float: parse_duration}.get(kind, kind)


def _format_default(default: object) -> str:
    """A default as a user would write it."""
    if isinstance(default, Enum):
        return str(default.value)
    if isinstance(default, tuple):
        return ",".join(default)
    if isinstance(default, int) and default >= 1 << 20:
        return f"{default >> 20}MiB"
    return f"{default:g}" if isinstance(default, float) else str(default)


def parse_size(text: str) -> int:
    """Bytes of `16MiB`, `512Ki`, `1000`. Raises argparse.ArgumentTypeError."""
    match = re.fullmatch(r"(\d+)(Ki|Mi|Gi|)B?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 16MiB")
    return int(match[1]) * _UNITS[match[2]]


def parse_ratio(text: str) -> float:
    """A number from 0 to 1. Raises argparse.ArgumentTypeError."""
    ratio = _parse_float(text)
    if not 0 <= ratio <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return ratio


def parse_duration(text: str) -> float:
    """A number of seconds or milliseconds, 0 or more. Raises argparse.ArgumentTypeError."""
    duration = _parse_float(text)
    if not 0 <= duration <= _MAX_DURATION:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {_MAX_DURATION:,.0f}")
    return duration


def parse_count(text: str) -> int:
    """A whole number, 0 or more. Raises argparse.ArgumentTypeError."""
    if not (text.isascii() and text.isdigit() and int(text) <= _MAX_COUNT):
        raise argparse.ArgumentTypeError(
            f"{text} is not a whole number between 0 and {_MAX_COUNT:,}"
        )
    return int(text)


def parse_limit(text: str) -> int:
    """A whole number, 1 or more: 0 would let nothing through. Raises argparse.ArgumentTypeError."""
    if (limit := parse_count(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return limit


def parse_hosts(text: str) -> tuple[str, ...]:
    """Addresses or host names separated by commas. Raises argparse.ArgumentTypeError."""
    hosts = tuple(host.strip() for host in text.split(","))
    if not all(hosts):
        raise argparse.ArgumentTypeError(
            f"{text!r} contains an empty address: separate addresses by single commas"
        )
    return hosts


def parse_port(text: str) -> int:
    """A port; 0 where that has a meaning. Raises argparse.ArgumentTypeError. Some event loops would
    take the lower 16 bits of larger numbers and listen there."""
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text} is not a port: it must be from 0 to 65535")
    return int(text)


def parse_names(text: str) -> tuple[str, ...]:
    """Names separated by commas; none in an empty text."""
    return tuple(filter(None, text.split(",")))


def parse_as(parse: Callable[[str], Any], text: str) -> Any:  # noqa: ANN401
    """What `parse` makes of `text`; its ValueError as argparse.ArgumentTypeError, whose message a
    parser shows."""
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _parse_choice(kind: type[Enum], text: str) -> Enum:
    """A member of an enumeration. Raises argparse.ArgumentTypeError."""
    try:
        return kind(text)
    except ValueError:
        choices = ", ".join(each.value for each in kind)
        raise argparse.ArgumentTypeError(f"{text!r} is none of {choices}") from None
