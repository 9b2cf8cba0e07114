"""Rules over parts of a pod, each in two forms: in Python, and in CEL for the API server. Pure.

Used by `cleave.controller.author_policy.pod_table`, which is made of them. A rule says what is
allowed; everything else is a fault. What the chart adds to a rule it reads from `AllowLists`; in
CEL these are the variables NAME and NAMEPrefixes, which the chart's template sets.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

AllowLists = Mapping[str, tuple[str, ...]]
"""Entries by the name of their list, as in the chart's `policy.allow`. One that ends with * stands
for all that begin so."""

_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True)
class PodFault:
    """Something in a pod that is not allowed."""

    path: str
    """Such as spec.volumes[data].nfs; entries of lists by their name."""
    found: str
    """What is there; empty: the path says it."""
    allow_list: str = ""
    """The list of the chart that can allow it; empty: none can."""
    entry: str = ""
    """What that list would have to hold."""


class PodRule(Protocol):
    """What is allowed at one place of a pod."""

    def list_faults(self, value: Any, path: str, lists: AllowLists) -> Iterator[PodFault]:  # noqa: ANN401 - any JSON
        """Yield what is not allowed in `value`."""

    def to_cel(self, value: str, depth: int = 0) -> str:
        """The same in CEL: true if all of `value`, an expression, is allowed. `depth`: of macros
        around it, as each needs a variable of its own."""


@dataclass(frozen=True, slots=True)
class AnyValue:
    """Everything: it is Cleave's or the API server's own, or harmless."""

    def list_faults(self, value: Any, path: str, lists: AllowLists) -> Iterator[PodFault]:  # noqa: ANN401
        """None."""
        del value, path, lists
        return iter(())

    def to_cel(self, value: str, depth: int = 0) -> str:
        """Always true."""
        del value, depth
        return "true"


ANY = AnyValue()


@dataclass(frozen=True)
class OneOf:
    """These values."""

    values: tuple[object, ...]

    def list_faults(self, value: Any, path: str, lists: AllowLists) -> Iterator[PodFault]:  # noqa: ANN401
        """One, if it is another value."""
        del lists
        if not any(type(value) is type(each) and value == each for each in self.values):
            yield PodFault(path, _show(value))

    def to_cel(self, value: str, depth: int = 0) -> str:
        """Whether the value is one of them."""
        del depth
        return f"{value} in {json.dumps(self.values)}"


def accept(*values: object) -> OneOf:
    """The rule that allows these values."""
    return OneOf(values)


@dataclass(frozen=True, slots=True)
class Listed:
    """Text that Cleave itself uses (`own`), or that a list of the chart holds."""

    allow_list: str = ""
    """Empty: no list of the chart adds to it."""
    own: tuple[str, ...] = ()

    def list_faults(self, value: Any, path: str, lists: AllowLists) -> Iterator[PodFault]:  # noqa: ANN401
        """One, if no entry matches."""
        entries = self.own + lists.get(self.allow_list, ())
        if not (isinstance(value, str) and matches(value, entries)):
            yield PodFault(path, _show(value), self.allow_list, _show(value))

    def to_cel(self, value: str, depth: int = 0) -> str:
        """Whether an entry matches."""
        prefixes = [each.removesuffix("*") for each in self.own if each.endswith("*")]
        ways = [f"{value}.startsWith({json.dumps(each)})" for each in prefixes]
        if exact := [each for each in self.own if not each.endswith("*")]:
            ways.append(f"{value} in {json.dumps(exact)}")
        if self.allow_list:
            each, name = f"v{depth}", f"variables.{self.allow_list}"
            ways.append(f"{value} in {name}")
            ways.append(f"{name}Prefixes.exists({each}, {value}.startsWith({each}))")
        return f"({' || '.join(ways)})"


def matches(text: str, entries: tuple[str, ...]) -> bool:
    """Whether an entry is this text, or ends with * and is the beginning of it."""
    return any(
        text.startswith(each[:-1]) if each.endswith("*") else text == each for each in entries
    )


@dataclass(frozen=True, slots=True)
class Folder:
    """A path inside one of Cleave's folders (`own`) or of the chart's list."""

    allow_list: str
    own: tuple[str, ...] = ()

    def list_faults(self, value: Any, path: str, lists: AllowLists) -> Iterator[PodFault]:  # noqa: ANN401
        """One, if it is outside, or may lead outside."""
        folders = self.own + lists.get(self.allow_list, ())
        if not isinstance(value, str) or ".." in value:
            yield PodFault(path, _show(value))
        elif not any(value == each or value.startswith(f"{each}/") for each in folders):
            yield PodFault(path, _show(value), self.allow_list, _show(value))

    def to_cel(self, value: str, depth: int = 0) -> str:
        """Whether it is inside."""
        each, folders = f"v{depth}", f"({json.dumps(self.own)} + variables.{self.allow_list})"
        inside = f"{folders}.exists({each}, {value} == {each} || {value}.startsWith({each} + '/'))"
        return f"(!{value}.contains('..') && {inside})"


@dataclass(frozen=True, slots=True)
class Gated:
    """What `rule` allows, if the chart's list holds `entry`."""

    allow_list: str
    entry: str
    rule: PodRule = ANY

    def list_faults(self, value: Any, path: str, lists: AllowLists) -> Iterator[PodFault]:  # noqa: ANN401
        """One if the list has no such entry, else those of the rule."""
        if not matches(self.entry, lists.get(self.allow_list, ())):
            yield PodFault(path, "", self.allow_list, self.entry)
        else:
            yield from self.rule.list_faults(value, path, lists)

    def to_cel(self, value: str, depth: int = 0) -> str:
        """Whether the list has the entry, and the rule allows the value."""
        gate = Listed(self.allow_list).to_cel(json.dumps(self.entry), depth)
        return f"({gate} && {self.rule.to_cel(value, depth)})"


@dataclass(frozen=True)
class AnyOf:
    """What one of the rules allows; the last one says what is wrong otherwise."""

    rules: tuple[PodRule, ...]

    def list_faults(self, value: Any, path: str, lists: AllowLists) -> Iterator[PodFault]:  # noqa: ANN401
        """Those of the last rule, unless another one has none."""
        found: list[PodFault] = []
        for rule in self.rules:
            found = list(rule.list_faults(value, path, lists))
            if not found:
                return
        yield from found

    def to_cel(self, value: str, depth: int = 0) -> str:
        """Whether one of them allows it."""
        return f"({' || '.join(rule.to_cel(value, depth) for rule in self.rules)})"


@dataclass(frozen=True)
class Fields:
    """An object with these fields only, each with its rule."""

    rules: Mapping[str, PodRule]
    required: tuple[str, ...] = ()

    def list_faults(self, value: Any, path: str, lists: AllowLists) -> Iterator[PodFault]:  # noqa: ANN401
        """Those of the fields, and one for each field that is unknown or missing."""
        if not isinstance(value, dict):
            yield PodFault(path, _show(value))
            return
        for name in self.required:
            if name not in value:
                yield PodFault(f"{path}.{name}", "nothing")
        for name, each in value.items():
            if rule := self.rules.get(name):
                yield from rule.list_faults(each, f"{path}.{name}", lists)
            else:
                yield PodFault(f"{path}.{name}", "")

    def to_cel(self, value: str, depth: int = 0) -> str:
        """Whether all its fields are known, and allowed."""
        each = f"v{depth}"
        parts = [f"{value}.all({each}, {each} in {json.dumps([*self.rules])})"]
        parts += [f"has({value}.{name})" for name in self.required]
        for name, rule in self.rules.items():
            if not isinstance(rule, AnyValue):
                inner = f"{value}.{name}"
                parts.append(f"(!has({inner}) || {rule.to_cel(inner, depth)})")
        return f"({' && '.join(parts)})"


@dataclass(frozen=True, slots=True)
class Items:
    """A list of which each entry has `rule`; `by_name`: those of entries with this name."""

    rule: PodRule
    by_name: Mapping[str, PodRule] = field(default_factory=dict)

    def list_faults(self, value: Any, path: str, lists: AllowLists) -> Iterator[PodFault]:  # noqa: ANN401
        """Those of the entries."""
        if not isinstance(value, list):
            yield PodFault(path, _show(value))
            return
        for index, each in enumerate(value):
            name = each.get("name", "") if isinstance(each, dict) else ""
            rule = self.by_name.get(name, self.rule)
            yield from rule.list_faults(each, f"{path}[{name or index}]", lists)

    def to_cel(self, value: str, depth: int = 0) -> str:
        """Whether all entries are allowed."""
        each = f"v{depth}"
        expression = self.rule.to_cel(each, depth + 1)
        for name, rule in self.by_name.items():
            test = f"{each}.name == {json.dumps(name)}"
            expression = f"({test} ? {rule.to_cel(each, depth + 1)} : {expression})"
        return f"{value}.all({each}, {expression})"


@dataclass(frozen=True)
class Keys:
    """An object with free keys: `rules` are those of values by key, `other` that of other keys."""

    other: PodRule
    rules: Mapping[str, PodRule] = field(default_factory=dict)

    def list_faults(self, value: Any, path: str, lists: AllowLists) -> Iterator[PodFault]:  # noqa: ANN401
        """Those of keys and values."""
        if not isinstance(value, dict):
            yield PodFault(path, _show(value))
            return
        for key, each in value.items():
            inner = f"{path}[{key}]"
            if rule := self.rules.get(key):
                yield from rule.list_faults(each, inner, lists)
            else:
                yield from self.other.list_faults(key, inner, lists)

    def to_cel(self, value: str, depth: int = 0) -> str:
        """Whether all keys, and the values of known ones, are allowed."""
        key = f"v{depth}"
        expression = self.other.to_cel(key, depth + 1)
        for name, rule in self.rules.items():
            known = rule.to_cel(f"{value}[{key}]", depth + 1)
            expression = f"({key} == {json.dumps(name)} ? {known} : {expression})"
        return f"{value}.all({key}, {expression})"


def _show(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
