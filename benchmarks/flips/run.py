"""Flips: what they gain in moving traffic, what they cost plans that are right, and their time.

`python benchmarks/flips/run.py [simulated|planned|drawn|held-out|timed|vllm ...]`; without names
all but vllm, about 20 minutes. timed: emulated engines; vllm: real ones, on two cores of their own.
`--quick`: does everything work? Quote none of its figures.
"""

import argparse
import sys
from pathlib import Path

import measured
import planned
import simulated

sys.path.append(str(Path(__file__).parents[1]))

from result_table import show

PARTS = ["simulated", "planned", "drawn", "held-out", "timed", "vllm"]
FLIPS, VLLM_FLIPS, QUICK_FLIPS = 1_000, 200, 20


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="*", choices=[*PARTS, []])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    arguments = parser.parse_args()
    what = arguments.what or PARTS[:-1]
    found: dict[str, list[dict[str, object]]] = {}
    if "simulated" in what:
        found["simulated"] = list(simulated.run(arguments.quick))
    if "planned" in what:
        found["planned"] = list(planned.run(arguments.quick))
    if "drawn" in what:
        found["drawn"] = list(planned.run_drawn(arguments.quick))
    if "held-out" in what:
        found["held-out"] = list(planned.run_held_out(arguments.quick))
    if "timed" in what:
        found["timed"] = measured.run(QUICK_FLIPS if arguments.quick else FLIPS, vllm=False)
    if "vllm" in what:
        found["vllm"] = measured.run(QUICK_FLIPS if arguments.quick else VLLM_FLIPS, vllm=True)
    show(found, arguments.output, 120, _text)


def _text(_: str, value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
