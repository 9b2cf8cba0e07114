"""Output of commands: JSON, YAML, and tables in full width, whose lines a narrow terminal wraps.

Scripts read this output, too. Keys are in camelCase, as those of resources, and a table that does
not go to a terminal is plain: headings and rows, without rules, blank lines or trailing blanks.
"""

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_MAX_WIDTH = 1000
_COLUMN_GAP = 3
"""Cells between two columns of a plain table, as kubectl leaves."""


def convert_keys(document: Any) -> Any:  # noqa: ANN401 - JSON has no narrower type
    """The document with keys in camelCase instead of snake_case, in every object within it."""
    if isinstance(document, dict):
        return {_to_camel_case(key): convert_keys(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [convert_keys(each) for each in document]
    return document


def _to_camel_case(key: str) -> str:
    return re.sub(r"(?<=.)_([a-z0-9])", lambda match: match[1].upper(), key)


def print_json(document: object) -> None:
    """Print a document as indented JSON."""
    typer.echo(json.dumps(document, indent=2))


def print_yaml(document: object) -> None:
    """Print a document as YAML, keys in their order."""
    import yaml

    typer.echo(yaml.safe_dump(document, sort_keys=False), nl=False)


def print_line(console: "Console", line: str, style: str | None = None) -> None:
    """Print without markup, as engines print brackets, and without wrapping."""
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def build_plain_table(texts: Sequence[str], figures: Sequence[str]) -> "Table":
    """A table with a line under its headings: left-aligned texts, then right-aligned figures."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading in texts:
        table.add_column(heading, no_wrap=True)
    for heading in figures:
        table.add_column(heading, no_wrap=True, justify="right")
    return table


def print_full_width(console: "Console", table: "Table") -> None:
    """Print a table in its full width; plain where the console is no terminal."""
    if not console.is_terminal:
        _print_plain(console, table)
        return
    needed = console.measure(table, options=console.options.update(max_width=_MAX_WIDTH)).maximum
    width = console.width
    console.width = max(width, needed)
    console.print(table)
    console.width = width


def _print_plain(console: "Console", table: "Table") -> None:
    table.box, table.pad_edge, table.padding = None, False, (0, _COLUMN_GAP, 0, 0)
    options = console.options.update(max_width=_MAX_WIDTH)
    options = options.update(width=console.measure(table, options=options).maximum)
    for line in console.render_lines(table, options, pad=False):
        text = "".join(segment.text for segment in line if not segment.control)
        typer.echo(text.rstrip(), file=console.file)
