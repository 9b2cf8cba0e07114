"""What the engine's scheduling gains: orders of prompts, chunks, admission to decode batches.

`python benchmarks/scheduler/run.py [orders|chunks|admissions ...]`; without names all, about a
minute. The simulator and the emulated engine's scheduler call the same functions in policy/.
`--quick`: does everything work? Quote none of its figures.
"""

import argparse
import json

import gains_measured as measured
from rich.console import Console
from rich.table import Table

WHAT = {"orders": measured.orders, "chunks": measured.chunks, "admissions": measured.admissions}


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="*", choices=[*WHAT, []])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    stated = parser.parse_args()
    found = {name: list(WHAT[name](stated.quick)) for name in stated.what or WHAT}
    if stated.output == "json":
        print(json.dumps(found, indent=2))
        return
    for name, rows in found.items():
        table = Table(title=name)
        for column in rows[0]:
            table.add_column(column)
        for row in rows:
            table.add_row(*(_text(column, value) for column, value in row.items()))
        Console(width=160).print(table)


def _text(column: str, value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:+.1%}" if column.endswith("gain") else f"{value:,.0f}"


if __name__ == "__main__":
    main()
