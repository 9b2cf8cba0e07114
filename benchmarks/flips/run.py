"""Flips: what they gain while traffic moves (simulated), and how long one takes.

`python benchmarks/flips/run.py [simulated|timed|vllm ...]`; without names the first two, about
three minutes. timed: emulated engines; vllm: real ones, on two cores of their own.
`--quick`: does everything work? Quote none of its figures.
"""

import argparse
import json

import simulated
import timed
from rich.console import Console
from rich.table import Table

FLIPS, VLLM_FLIPS, QUICK_FLIPS = 1_000, 200, 20


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="*", choices=["simulated", "timed", "vllm", []])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    stated = parser.parse_args()
    what = stated.what or ["simulated", "timed"]
    found: dict[str, list[dict[str, object]]] = {}
    if "simulated" in what:
        found["simulated"] = list(simulated.run(stated.quick))
    if "timed" in what:
        found["timed"] = timed.run(QUICK_FLIPS if stated.quick else FLIPS, vllm=False)
    if "vllm" in what:
        found["vllm"] = timed.run(QUICK_FLIPS if stated.quick else VLLM_FLIPS, vllm=True)
    if stated.output == "json":
        print(json.dumps(found, indent=2))
        return
    for name, rows in found.items():
        table = Table(title=name)
        for column in rows[0]:
            table.add_column(column)
        for row in rows:
            table.add_row(*(f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.values()))
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
