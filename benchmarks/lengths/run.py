"""How well outputs are predicted from what a gateway knows, and the gain.

`python benchmarks/lengths/run.py [accuracy|dispatch|admissions ...]`; without names all, about
a minute on one core. `--quick`: does everything work? Quote none of its figures.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import effects
import predictions
from classifier import GRANULARITIES

sys.path.append(str(Path(__file__).parents[1]))

from result_table import show

DATA = Path(__file__).parents[3] / "shared" / "data"


def accuracy(data: Path, quick: bool) -> Iterator[dict[str, object]]:
    """Every way on both services, prompts as counted and as estimated."""
    for service in predictions.SERVICES:
        for error in predictions.ERRORS[-1:] if quick else predictions.ERRORS:
            for by, score in predictions.predict_outputs(data, service, error).score().items():
                yield {
                    "trace": service,
                    "prompts": f"+-{error:.0%}" if error else "counted",
                    "foretold by": by,
                    **{
                        f"range of {width}": share
                        for width, share in zip(GRANULARITIES, score.accuracy, strict=True)
                    },
                    "tokens off": score.mean_absolute_error,
                    "sum gain": score.bias,
                }


def dispatch(data: Path, quick: bool) -> Iterator[dict[str, object]]:
    """Goodput."""
    yield from effects.dispatch(predictions.predict_outputs(data, "conversation", 0.2), quick)


def admissions(data: Path, quick: bool) -> Iterator[dict[str, object]]:
    """Completion times. An engine counts its prompts' tokens, so they are not blurred."""
    yield from effects.admissions(predictions.predict_outputs(data, "conversation", 0.0), quick)


WHAT: dict[str, Callable[[Path, bool], Iterator[dict[str, object]]]] = {
    "accuracy": accuracy,
    "dispatch": dispatch,
    "admissions": admissions,
}


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="*", choices=[*WHAT, []])
    parser.add_argument("--data", type=Path, default=DATA, help="folder of Azure's traces")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    arguments = parser.parse_args()
    found = {
        name: list(WHAT[name](arguments.data, arguments.quick)) for name in arguments.what or WHAT
    }
    show(found, arguments.output, 150, _text)


def _text(column: str, value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    if column.startswith("range of"):
        return f"{value:.1%}"
    if column.endswith("gain"):
        return f"{value:+.1%}"
    return f"{value:,.1f}" if value >= 10 else f"{value:.3f}"


if __name__ == "__main__":
    main()
