"""Results that are rows of named values, as tables or JSON.

Used by flips/run.py and scheduler/run.py.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table


def show(
    found: Mapping[str, Sequence[Mapping[str, object]]],
    output: str,
    width: int,
    text: Callable[[str, object], str],
) -> None:
    """Print a table for each name, or all as JSON; `text`: the cell for a column's value."""
    if output == "json":
        print(json.dumps(found, indent=2))
        return
    for name, rows in found.items():
        table = Table(*rows[0], title=name)
        for row in rows:
            table.add_row(*(text(column, value) for column, value in row.items()))
        Console(width=width).print(table)
