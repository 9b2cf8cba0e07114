"""Output of commands: JSON, YAML, and tables in full width, whose lines a narrow terminal wraps."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_MAX_WIDTH = 1000


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
    """Print a table in its full width."""
    needed = console.measure(table, options=console.options.update(max_width=_MAX_WIDTH)).maximum
    width = console.width
    console.width = max(width, needed)
    console.print(table)
    console.width = width
