"""The command-line flags of both engines, and whether arguments are what their parsers take.

From engine_flags.json, which `scripts/engine_flags.py` writes from the parsers themselves. Read
before an image is pulled whose engine would end with these arguments. Pure but for the file.
"""

import functools
import json
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from cleave.api.faults import format_value

_FILE = Path(__file__).with_name("engine_flags.json")
_HUMAN_INT = re.compile(r"-?\d+|\d+(\.\d+)?[kmgt]|\d+[KMGT]")
"""vLLM's numbers such as 8k (8,000) and 8K (8,192)."""
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_REFERENCE = "$("
"""Begins a variable, which Kubernetes replaces later."""
_NOTHING = ("", "None")
_LISTS = ("choices", "names", "bounds")
_LIMITS = {
    "gt": ("above", operator.gt),
    "ge": ("at least", operator.ge),
    "lt": ("below", operator.lt),
    "le": ("at most", operator.le),
}

_REPLACED = {
    "--disable-log-requests": "remove it: requests are logged with --enable-log-requests only",
    "--rope-scaling": 'write --hf-overrides {"rope_parameters": {...}}',
    "--rope-theta": 'write --hf-overrides {"rope_parameters": {"rope_theta": ...}}',
    "--guided-decoding-backend": 'write --structured-outputs-config {"backend": ...}',
    "--speculative-model": "write --speculative-config",
    "--num-speculative-tokens": "write --speculative-config",
    "--cuda-graph-sizes": "write --cudagraph-capture-sizes",
    "--max-seq-len-to-capture": "write --max-cudagraph-capture-size",
    "--enable-reasoning": "remove it: --reasoning-parser enables it",
    "--task": "write --runner and --convert",
    "--swap-space": "remove it; spec.engine.kvOffloadingGib keeps KV in host memory",
}
"""Flags of earlier versions of vLLM, and what there is now."""

MANAGED = {
    "--config": "options in a file would pass by these checks; write them into args",
    "--api-key": "engines ask for a key of their agent; gateways check clients' keys",
    **dict.fromkeys(
        ("--uds", "--grpc", "--grpc-port", "--api-server-count", "--master-port", "--root-path"),
        "Cleave decides where engines listen",
    ),
    **dict.fromkeys(
        ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers",
         "--enable-ssl-refresh"),
        "agents and gateways speak plain HTTP with engines; spec.gateway.tlsSecret is for clients",
    ),
}  # fmt: skip
"""Flags that would take from Cleave what it manages, and why; others than RESERVED_FLAGS of
`cleave.api.engine`, which Cleave sets itself."""


@dataclass(frozen=True, slots=True)
class EngineFlag:
    """A flag of an engine's parser."""

    values: int | str
    """Number of values: 0, 1, "?" for one or none, "+" for one or more."""
    kind: str = ""
    """What a value is: int, humanInt, float, json, object, objectOrText; empty: any text."""
    choices: tuple[str, ...] = ()
    """The only values; empty: any."""
    bounds: tuple[tuple[str, float], ...] = ()
    """Limits of a number, each with its kind: gt, ge, lt or le."""
    names: tuple[str, ...] = ()
    """The only values without plug-ins; empty: any."""
    negated: bool = False
    """Whether there is `--no-NAME` as well."""
    optional: bool = False
    """Whether the text None may stand for a value."""


@dataclass(frozen=True, slots=True)
class EngineParser:
    """All flags of one engine."""

    engine: str
    """Name and version, for messages."""
    flags: Mapping[str, EngineFlag]
    """By name, with dashes."""

    def find(self, name: str) -> EngineFlag | None:
        """Return the flag of a full name with hyphens; None: there is none."""
        positive = f"--{name.removeprefix('--no-')}"
        if name.startswith("--no-") and (flag := self.flags.get(positive)) and flag.negated:
            return flag
        return self.flags.get(name)


@functools.cache
def load_parser(engine: str) -> EngineParser:
    """Load the parser of an engine, vLLM or Emulated, of the version that Cleave's images have."""
    written = json.loads(_FILE.read_text(encoding="utf-8"))[engine]
    name = f"vLLM {written['version']}" if written["version"] else "the emulated engine"
    flags = {
        flag: EngineFlag(**parts | {each: tuple(parts.get(each, ())) for each in _LISTS})
        for flag, parts in written["flags"].items()
    }
    return EngineParser(name, flags)


def list_unknown(args: Sequence[str], parser: EngineParser) -> Iterator[str]:
    """Yield a line `FLAG: what is wrong` for each flag, or name as its value, that the engine does
    not have."""
    has_plugins = any(name.endswith("-plugin") for name in list_names(args))
    for arg, following in zip(args, [*args[1:], ""], strict=False):
        if not _is_flag(arg):
            continue
        name, flag = _get_name(arg), parser.find(_get_name(arg))
        value = arg.partition("=")[2] if "=" in arg else following
        if flag is None:
            yield f"{name}: {parser.engine} has no such flag{_suggest(name, parser)}"
        elif flag.names and not has_plugins and _is_unknown_name(flag, value):
            yield f"{name}: {parser.engine} has no {value[:100]}; {_list_near(value, flag.names)}"


def list_names(args: Sequence[str]) -> Iterator[str]:
    """Yield the name of each flag, with hyphens."""
    return map(_get_name, filter(_is_flag, args))


def list_managed(args: Sequence[str]) -> Iterator[str]:
    """Yield a line `FLAG: why` for each flag of MANAGED."""
    for name in list_names(args):
        if name in MANAGED:
            yield f"{name}: {MANAGED[name]}"


def list_wrong_values(args: Sequence[str], parser: EngineParser) -> Iterator[str]:
    """Yield a line `FLAG: what is wrong` for each value that the parser would refuse."""
    flag, name, taken = None, "", 0
    for arg, following in zip(args, [*args[1:], None], strict=False):
        if _is_flag(arg):
            name, taken, flag = _get_name(arg), 0, parser.find(_get_name(arg))
            if flag is None:
                continue
            _, has_value, value = arg.partition("=")
            if has_value:
                taken = 1
                yield from _check_value(name, flag, value)
            elif flag.values in (1, "+") and (following is None or _is_flag(following)):
                yield f"{name}: needs a value"
        elif flag is not None or not name:  # an unknown flag may take values
            taken += 1
            if flag is None or (taken > 1 and flag.values != "+"):
                where = f"{name} takes no more" if name else "no flag takes it"
                yield f"{format_value(arg)}: {where}: engines take it for the name of a model"
            else:
                yield from _check_value(name, flag, arg)


def _is_flag(arg: str) -> bool:
    return arg.startswith("--") and len(arg) > len("--")


def _get_name(arg: str) -> str:
    return arg.split("=")[0].replace("_", "-")


def _is_unknown_name(flag: EngineFlag, value: str) -> bool:
    is_name = value not in _NOTHING and not _is_flag(value) and _REFERENCE not in value
    return is_name and value not in flag.names


def _list_near(value: str, names: Sequence[str]) -> str:
    close = get_close_matches(value[:100], names, n=1)
    return f"did you mean {close[0]}?" if close else f"it has {', '.join(names)}"


def _suggest(name: str, parser: EngineParser) -> str:
    if name in _REPLACED:
        return f"; {_REPLACED[name]}"
    close = get_close_matches(name[:100], parser.flags, n=1)
    return f"; did you mean {close[0]}?" if close else "; remove it"


def _check_value(name: str, flag: EngineFlag, value: str) -> Iterator[str]:
    if _REFERENCE in value or (flag.optional and value in _NOTHING):
        return
    got = f" (got {format_value(value)})"
    if flag.values == 0:
        yield f"{name}: takes no value{got}"
    elif flag.choices and value not in flag.choices:
        close = get_close_matches(value[:100], flag.choices, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        yield f"{name}: must be one of {', '.join(flag.choices)}{hint}{got}"
    elif flag.kind in ("json", "object", "objectOrText"):
        is_text = flag.kind == "objectOrText" and not re.fullmatch(r"(?s)\s*\{.*\}\s*", value)
        if not is_text and (fault := _find_json_fault(value, is_object=flag.kind != "json")):
            yield f"{name}: {fault}{got}"
    elif fault := _find_number_fault(flag.kind, value) or _find_excess(flag, value):
        yield f"{name}: {fault}{got}"


def _find_json_fault(value: str, *, is_object: bool) -> str:
    try:
        read = json.loads(value)
    except json.JSONDecodeError as error:
        hint = "; JSON has double quotes" if "'" in value and '"' not in value else ""
        return f"is not JSON: {error.msg} at character {error.pos + 1}{hint}"
    except (ValueError, RecursionError):
        return "is not JSON that can be read"
    return (
        'must be a JSON object, as in {"name": 1}' if is_object and type(read) is not dict else ""
    )


def _find_number_fault(kind: str, value: str) -> str:
    try:
        match kind:
            case "int":
                int(value)
            case "float":
                float(value)
            case "humanInt" if not _HUMAN_INT.fullmatch(value):
                return "must be a whole number, such as 8192 or 8k"
    except ValueError:
        return "must be a whole number" if kind == "int" else "must be a number"
    return ""


def _find_excess(flag: EngineFlag, value: str) -> str:
    if not flag.bounds or not value.lstrip("-").replace(".", "", 1).isdecimal():
        return ""
    limits = [(*_LIMITS[kind], limit) for kind, limit in flag.bounds]
    if all(is_within(float(value), limit) for _, is_within, limit in limits):
        return ""
    return "must be " + " and ".join(f"{words} {limit:g}" for words, _, limit in limits)
