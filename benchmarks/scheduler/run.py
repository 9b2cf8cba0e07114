"""What the engine's scheduling gains: orders of prompts, chunks, admission to decode batches.

`python benchmarks/scheduler/run.py [orders|chunks|admissions|overload|goodput ...]`; without names
all, half a minute. The simulator and the emulated engine's scheduler call the same functions in
policy/. `--quick`: does everything work? Quote none of its figures.
"""

import argparse
import sys
from pathlib import Path

import gains_measured as measured
import overload

sys.path.append(str(Path(__file__).parents[1]))

from result_table import show

WHAT = {
    "orders": measured.orders,
    "chunks": measured.chunks,
    "admissions": measured.admissions,
    "overload": overload.overload,
    "goodput": overload.goodput,
}


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="*", choices=[*WHAT, []])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    arguments = parser.parse_args()
    found = {name: list(WHAT[name](arguments.quick)) for name in arguments.what or WHAT}
    show(found, arguments.output, 160, _text)


def _text(column: str, value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    if column.endswith("share"):
        return f"{value:.1%}"
    if column.endswith("gain"):
        return f"{value:+.1%}"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


if __name__ == "__main__":
    main()
