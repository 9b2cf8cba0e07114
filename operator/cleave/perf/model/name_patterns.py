"""Lists of names of layers, as checkpoints state which are quantised: exact, globs, expressions.

Called by cleave.perf.model.quantization. What is hard: the same layer has another prefix in each
kind of checkpoint, and a list may hold each layer by number, so names are compared from `layers.N`
on, and those of one layer are found by its number.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from itertools import pairwise

from cleave.perf.model.hf_config import REMEDY, ModelConfigError

_NUMBERED = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d[\d,-]*)(.*)$", re.DOTALL)
_EXPERT = re.compile(r"(experts\.)\d+")
_MAX_LAYER = 10_000
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "backbone.", "")
_PREFIX_WORDS = re.compile("mod|lang|back")
_ANYTHING = re.compile(r"(?<!\\)\.\*")
_CHOICE = re.compile(r"\((?:\?:)?((?:[\w\-|]|\\[.\-_/])*)\)(\??)")
_PLAIN = re.compile(rf"(?:[\w\-/.^$]|\\[.\-_/]|(?:\\d|\[0-9\])\+?|\[[\w\-]+\]|{_CHOICE.pattern})*")
"""A piece of an expression: names, digits, choices. With `_is_quick` no text can make it slow."""
_MAX_WAYS = 4
_MAX_COMPARISONS = 200_000
"""Of names of a list with those of layers, some tenths of a second; files need some thousands."""
_OTHER_PARTS = re.compile(r"mtp|vis|vit|image|audio|sound|encoder|projector|draft|eagle")
"""Parts with layers and numbers of their own."""
_OTHERS = re.compile(
    r"norm|router|embed|wte|wpe|bias|conv1d|visual|vision|audio|projector|multi_modal|image"
    r"|mtp|eh_proj|e_score|rotary|shared_head|nextn|sound|vit|img|(^|[.*])(lm_)?head|A_log|dt_"
    r"|gate($|[*.$])|shared_expert_gate|Attention$|index|embeddings"
)
"""Of modules that are no linear layers of the language model, or that no method quantises."""


class Matching(Enum):
    """How names of a list are compared."""

    EXACT = "the whole name"
    SUBSTRING = "a part of it"
    GLOB = "a part of it, or a glob (ModelOpt)"
    PARENT = "the name, or one below it"
    REGEX = "the name, or an expression behind re: (compressed-tensors)"


_PARTIAL = (Matching.SUBSTRING, Matching.GLOB)


@dataclass(frozen=True, slots=True)
class WeightModule:
    """A linear layer, or the routed experts of a layer."""

    layer: int
    """Its layer; -1: it is in none."""
    names: tuple[str, ...]
    """From behind `layers.N.` on: its name, and those of what it is joined with."""
    parameters: float
    is_plain: bool = False
    """Whether no method quantises it."""
    joined: tuple[str, ...] = ()
    """Names of the layers that engines load as one with it, its own among them."""


class NamePatterns:
    """A list of names, at `path` of the file. Notes which of them some layer has."""

    def __init__(self, path: str, patterns: Sequence[str], matching: Matching) -> None:
        """Raises ModelConfigError for expressions that are not simple."""
        self.path = path
        self._matching = matching
        self._expressions: dict[str, list[re.Pattern[str]]] = {}
        self._numbered: dict[int, list[tuple[str, str]]] = {}
        self._beginnings: list[tuple[str, str]] = []
        self._others: list[str] = []
        self._used: set[str] = set()
        self._left = _MAX_COMPARISONS
        for pattern in patterns:
            found = None if pattern.startswith("re:") else _NUMBERED.search(pattern)
            if found is not None and _OTHER_PARTS.search(pattern[: found.start(1)]):
                continue
            if found is None:
                self._others.append(pattern)
                if pattern.startswith("re:"):
                    self._expressions[pattern] = self._compile(pattern)
            else:
                rest = found[2].removeprefix(".")
                for number in _list_numbers(found[1]):
                    self._count(1)
                    self._numbered.setdefault(number, []).append((rest, pattern))
                if found[2] in ("", "*") and matching in _PARTIAL:
                    # `layers.1` is a part of `layers.10`, too.
                    self._beginnings.append((found[1], pattern))

    def matches(self, module: WeightModule) -> bool:
        """Whether a name of the list is the module's. Raises ModelConfigError for lists that are
        too long to be compared."""
        found, names = False, self._list_names(module)
        for rest, pattern in self._numbered.get(module.layer, ()):
            self._count(len(names))
            if any(self._fits(rest, name) for name in names):
                self._used.add(pattern)
                found = True
        for beginning, pattern in self._beginnings:
            if str(module.layer).startswith(beginning):
                self._used.add(pattern)
                found = True
        for pattern in self._others:
            full = self._list_full(module, pattern)
            self._count(len(full))
            if any(self._fits_anywhere(pattern, name) for name in full):
                self._used.add(pattern)
                found = True
        return found

    def find_unused(self, layers: int) -> str | None:
        """The first name in the list that no layer of `layers` has, and that is not known to be of
        something else."""
        for number, each in self._numbered.items():
            for _, pattern in each:
                if number < layers and pattern not in self._used and not _OTHERS.search(pattern):
                    return pattern
        unused = (each for each in self._others if each not in self._used)
        return next((each for each in unused if not _OTHERS.search(each)), None)

    def _compile(self, pattern: str) -> list[re.Pattern[str]]:
        """The pieces between `.*` of an expression."""
        pieces = _ANYTHING.split(pattern.removeprefix("re:"))
        try:
            if all(_PLAIN.fullmatch(each) and _is_quick(each) for each in pieces):
                return [re.compile(each) for each in pieces]
        except re.error:
            pass
        raise ModelConfigError(
            f"{self.path} has {pattern[:60]!r}; plans know names, .* and choices of names"
        )

    def _count(self, comparisons: int) -> None:
        self._left -= comparisons
        if self._left < 0:
            raise ModelConfigError(f"{self.path} has too many names to compare; {REMEDY}")

    def _list_full(self, module: WeightModule, pattern: str) -> list[str]:
        """The module's names from the beginning on, of which `pattern` may be one."""
        prefixes: Sequence[str] = _PREFIXES if module.layer >= 0 else ("language_model.", "")
        if pattern.startswith(("re:.*", "*")) and not _PREFIX_WORDS.search(pattern):
            prefixes = prefixes[:1]
        where = f"layers.{module.layer}." if module.layer >= 0 else ""
        names = self._list_names(module)
        return [f"{prefix}{where}{name}" for prefix in prefixes for name in names]

    def _list_names(self, module: WeightModule) -> Sequence[str]:
        """The names that are compared: vLLM looks for parts in that of all experts of a layer, so
        Mixtral's `gate` is its router, and no expert's gate_proj."""
        if self._matching is not Matching.SUBSTRING:
            return module.names
        return [name for name in module.names if not name.startswith(f"{module.names[0]}.")]

    def _fits(self, rest: str, name: str) -> bool:
        """Whether what a name has behind the number of its layer is that of a module."""
        if rest == name:
            return True
        match self._matching:
            case Matching.SUBSTRING:
                return name.startswith(rest)
            case Matching.GLOB:
                own = rest.removesuffix("*").removesuffix(".")
                return name.startswith(own) if "*" not in own else fnmatchcase(name, rest)
            case Matching.PARENT:
                return rest.startswith(f"{name}.") or name.startswith(f"{rest}.")
            case _:
                return False

    def _fits_anywhere(self, pattern: str, full: str) -> bool:
        if pattern.startswith("re:"):
            return self._matching is Matching.REGEX and _match(self._expressions[pattern], full)
        if pattern == full:
            return True
        match self._matching:
            case Matching.SUBSTRING:
                return pattern in full
            case Matching.GLOB:
                return pattern in full or fnmatchcase(full, pattern)
            case _:
                return False


def _is_quick(piece: str) -> bool:
    """Whether at each place of a text few ways to go on are tried: choices of a piece are rarely
    optional, or begin with another one, except for numbers, which are short."""
    ways = 0
    for found in _CHOICE.finditer(piece):
        each = sorted(found[1].split("|"))
        if not all(map(str.isdigit, each)):
            ways += sum(b.startswith(a) for a, b in pairwise(each))
        ways += bool(found[2])
    return ways <= _MAX_WAYS


def shorten_names(names: Sequence[str]) -> list[str]:
    """The same names, with one for all layers (`layers.0-3,7.mlp`) and experts that share the rest
    of theirs: lists of thousands of names become some tens."""
    groups: dict[tuple[str, str], list[int]] = {}
    others: dict[str, None] = {}
    for name in names:
        found = None if name.startswith("re:") else _NUMBERED.search(name)
        if found is None or not found[1].isdigit() or not found[2].strip(".*"):
            others[name] = None
            continue
        rest = _EXPERT.sub(r"\g<1>0", found[2])
        numbers = groups.setdefault((name[: found.start(1)], rest), [])
        if int(found[1]) not in numbers[-1:]:
            numbers.append(int(found[1]))
    joined = [f"{head}{_write_numbers(each)}{rest}" for (head, rest), each in groups.items()]
    return [*others, *joined]


def _write_numbers(numbers: Sequence[int]) -> str:
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def _list_numbers(text: str) -> Iterator[int]:
    """The numbers of `3`, or of ranges such as `0-3,7`; none in other texts."""
    for each in text.split(","):
        first, _, last = each.partition("-")
        if first.isdigit() and (last or first).isdigit():
            yield from range(int(first[:6]), min(int((last or first)[:6]), _MAX_LAYER) + 1)


def _match(pieces: Sequence[re.Pattern[str]], text: str) -> bool:
    """Whether a text begins with these pieces, with anything between them."""
    first = pieces[0].match(text)
    if first is None:
        return False
    end = first.end()
    for piece in pieces[1:]:
        found = piece.search(text, end)
        if found is None:
            return False
        end = found.end()
    return True
