"""Writes what is derived from the comments in the chart's values.yaml, for scripts/generate.

`python scripts/chart_values.py OUTDIR` writes README.md, with a table of all values, and
values.schema.json, the present schema with these texts as descriptions, which editors and Artifact
Hub show. What is hard: YAML parsers drop comments. So lines are read here; a comment describes the
key below it, and a mapping whose members have no comments is one value.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_CHART = Path(__file__).parent.parent / "charts" / "cleave"
_KEY = re.compile(r"( *)([A-Za-z]\w*):(?: |$)")
_README = """\
<!-- Generated from values.yaml by scripts/generate; changes here are lost. -->
# Cleave

{description}

```
helm install cleave charts/cleave -n cleave-system --create-namespace --set images.prefix=REGISTRY/
helm test cleave -n cleave-system
```

Needs Kubernetes {kubernetes}. `helm test` checks that an operator leads, that the API server admits
a deployment, and that it calls the webhook. [docs/install.md](../../docs/install.md) is the guide,
with a section on [OpenShift](../../docs/install.md#openshift).

## Values

| value | default | |
|---|---|---|
{rows}
"""


class ValuesError(ValueError):
    """A value has no comment, or is not in the schema; the message names it."""


@dataclass
class _Node:
    """One key of values.yaml."""

    path: tuple[str, ...]
    comment: str
    members: list["_Node"] = field(default_factory=list)

    @property
    def is_value(self) -> bool:
        """Whether it is documented as one value."""
        return not any(member.comment or not member.is_value for member in self.members)


def main(argv: Sequence[str]) -> int:
    """Write both files into the folder argv[0]; 1 when a value has no comment, 2 on bad usage."""
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        sys.stderr.write("usage: python scripts/chart_values.py OUTDIR\n")
        return 2
    text = (_CHART / "values.yaml").read_text()
    schema = json.loads((_CHART / "values.schema.json").read_text())
    try:
        values = list(read_values(text))
        for path, comment in values:
            _find_schema(schema, path)["description"] = comment
    except ValuesError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    (Path(argv[0]) / "README.md").write_text(build_readme(values, yaml.safe_load(text)))
    (Path(argv[0]) / "values.schema.json").write_text(json.dumps(schema, indent=2) + "\n")
    return 0


def read_values(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path, comment) of each value. Raises ValuesError."""
    for node in _parse(text):
        yield from _flatten(node)


def build_readme(values: Sequence[tuple[tuple[str, ...], str]], defaults: Any) -> str:  # noqa: ANN401
    """The page; `defaults`: the parsed values."""
    rows = []
    for path, comment in values:
        value = defaults
        for key in path:
            value = value[key]
        shown = json.dumps(value).replace("|", "\\|")
        rows.append(f"| `{'.'.join(path)}` | `{shown}` | {comment.replace('|', chr(92) + '|')} |")
    chart = yaml.safe_load((_CHART / "Chart.yaml").read_text())
    kubernetes = chart["kubeVersion"].removesuffix("-0").replace(">=", "") + " or newer"
    description = chart["description"]
    return _README.format(description=description, kubernetes=kubernetes, rows="\n".join(rows))


def _parse(text: str) -> list[_Node]:
    root = _Node((), "")
    open_nodes = [(-1, root)]
    comment: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            comment.append(line.lstrip().removeprefix("#").strip())
        elif (found := _KEY.match(line)) is not None:
            indent = len(found[1])
            while open_nodes[-1][0] >= indent:
                open_nodes.pop()
            parent = open_nodes[-1][1]
            node = _Node((*parent.path, found[2]), " ".join(comment))
            parent.members.append(node)
            open_nodes.append((indent, node))
            comment = []
        else:
            # An empty line ends a comment that describes no key.
            comment = []
    return root.members


def _flatten(node: _Node) -> Iterator[tuple[tuple[str, ...], str]]:
    if not node.is_value:
        for member in node.members:
            yield from _flatten(member)
    elif node.comment:
        yield node.path, node.comment
    else:
        raise ValuesError(
            f"charts/cleave/values.yaml: {'.'.join(node.path)} has no comment: add one"
        )


def _find_schema(schema: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The schema of a value. Raises ValuesError."""
    try:
        for key in path:
            schema = schema["properties"][key]
    except KeyError:
        raise ValuesError(f"values.schema.json has no {'.'.join(path)}: add it") from None
    return schema


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
