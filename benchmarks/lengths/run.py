"""How well outputs are predicted from what a gateway knows, the cost and the gain.

`python benchmarks/lengths/run.py [accuracy|dispatch|admissions|cost ...]`; without names all, about
a minute on one core. `--quick`: does everything work? Quote none of its figures.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import effects
import predictions

sys.path.append(str(Path(__file__).parents[1]))

from result_table import show

from cleave.policy import output_length
from cleave.policy.output_length import ConditionalMean, LengthPredictor
from cleave.traffic.length_file import GRANULARITIES

DATA = Path(__file__).parents[3] / "shared" / "data"
CALLS = 2_000
ROUNDS = 50


def accuracy(data: Path, quick: bool) -> Iterator[dict[str, object]]:
    """Every way on both services, prompts as counted and as estimated."""
    for service in predictions.SERVICES:
        for error in predictions.ERRORS[-1:] if quick else predictions.ERRORS:
            found, scores = predictions.score(data, service, error)
            for by, score in scores.items():
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
                    "used": by == "classifier" and found.scores.is_better,
                }


def dispatch(data: Path, quick: bool) -> Iterator[dict[str, object]]:
    """Goodput."""
    yield from effects.dispatch(predictions.predict_outputs(data, "conversation", 0.2), quick)


def admissions(data: Path, quick: bool) -> Iterator[dict[str, object]]:
    """Completion times. An engine counts its prompts' tokens, so they are not blurred."""
    yield from effects.admissions(predictions.predict_outputs(data, "conversation", 0.0), quick)


def cost(data: Path, quick: bool) -> Iterator[dict[str, object]]:
    """CPU time of one prediction, least of some rounds."""
    found, _ = predictions.score(data, "conversation", 0.2)
    mean = ConditionalMean(256)
    is_compiled = not (output_length.__file__ or "").endswith(".py")
    for by, predictor in (("classifier", found.tree), ("mean by prompt length", mean)):
        yield {
            "foretold by": by,
            "compiled": is_compiled,
            "leaves": found.below.count(0) if by == "classifier" else 24,
            "us": min(_time(predictor) for _ in range(2 if quick else ROUNDS)),
        }


def _time(predictor: LengthPredictor) -> float:
    predict = predictor.predict
    prompts = [31 * number % 4_000 for number in range(CALLS)]
    start = time.process_time()
    for prompt in prompts:
        predict(prompt, 0)
    return (time.process_time() - start) / CALLS * 1e6


WHAT: dict[str, Callable[[Path, bool], Iterator[dict[str, object]]]] = {
    "accuracy": accuracy,
    "dispatch": dispatch,
    "admissions": admissions,
    "cost": cost,
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
