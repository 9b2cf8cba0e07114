"""Split against whole on a model that speaks: tokens, log-probabilities and perplexity.

.venv/bin/python benchmarks/quality/run.py              # README.md explains the tables
.venv/bin/python benchmarks/quality/run.py --quick      # whether it works
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from cleave.local.smollm2.preparation import get_or_prepare
from cleave_worker.transfer.transport import Transport

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parent))

from answers import Comparison, Output, compare
from quality_requests import LENGTHS, Case, list_cases
from ways import Pair, build_manifest, wait_for

from e2e.support.deployments import deployed

CONNECTORS = ("Nixl", *(f"Cleave/{way}" for way in (Transport.SHARED_MEMORY, Transport.GLOO)))
OUTPUT_TOKENS, RESUMED_TOKENS = 32, 150
RESUMED = 8
"""Streams of an engine that is killed."""
START_S = 600
COLUMNS = ("connector", "request", "number", "equal", "near tie", "other", "greatest shift, nats")


def main() -> None:
    """Print the tables; exit code 1 when an answer differs by more than arithmetic."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder; default: the demo's model")
    parser.add_argument("--connectors", nargs="*", choices=CONNECTORS, default=CONNECTORS)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--quick", action="store_true", help="every eighth request")
    args = parser.parse_args()
    model = args.model or get_or_prepare(lambda *_: None)
    rows: list[str] = []
    faults = 0
    for connector in args.connectors:
        with tempfile.TemporaryDirectory() as folder:
            manifest = build_manifest(model, connector, args.dtype, args.quick, Path(folder))
            with deployed(manifest, Path(folder), timeout_s=START_S) as deployment:
                pair = wait_for(deployment)
                print(f"{connector}: the pair serves", file=sys.stderr, flush=True)
                perplexities = pair.measure_perplexity(model, 20 if args.quick else None)
                found: dict[str, list[Comparison]] = {}
                for kind, case, comparison in compare_all(pair, connector, args.quick):
                    found.setdefault(kind, []).append(comparison)
                    if comparison.verdict == "other":
                        faults += 1
                        print(f"{kind}: {comparison} {case.body}", file=sys.stderr)
        print(connector, *(f"perplexity {way} {perplexities[way]:.6f}" for way in perplexities))
        rows += [tabulate(connector, kind, found[kind]) for kind in found]
        print(*rows[-len(found) :], sep="\n", flush=True)
    print(f"\n| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *rows, sep="\n")
    sys.exit(faults > 0)


def compare_all(
    pair: Pair, connector: str, is_quick: bool
) -> Iterator[tuple[str, Case, Comparison]]:
    """Each answer beside that of one engine, with its kind."""
    every = 8 if is_quick else 1
    cases = [case for kind in group(list_cases(OUTPUT_TOKENS)) for case in kind[::every]]
    if is_quick:
        cases = [case for case in cases if case.prompt_tokens <= min(LENGTHS)]
    whole = dict(zip(map(id, cases), pair.whole(cases), strict=True))

    def judge(
        kind: str, some: Sequence[Case], found: Sequence[Output]
    ) -> Iterator[tuple[str, Case, Comparison]]:
        for case, output in zip(some, found, strict=True):
            yield kind or case.kind, case, compare(whole[id(case)], output)

    yield from judge("", cases, pair.split(cases))
    yield from judge("whole, again", cases, pair.whole(cases))
    if connector.startswith("Cleave"):
        long = [case for case in cases if case.prompt_tokens]
        yield from judge("prefix pulled", long, pair.pulled(long))
    some = cases[::3]
    yield from judge("roles flip meanwhile", some, pair.flipped(some))
    streams = [case for case in list_cases(RESUMED_TOKENS) if case.kind == "continuation"][:RESUMED]
    whole |= zip(map(id, streams), pair.whole(streams), strict=True)
    yield from judge("stream resumed", streams, pair.resumed(streams))


def group(cases: Sequence[Case]) -> list[list[Case]]:
    """By kind."""
    kinds = dict.fromkeys(case.kind for case in cases)
    return [[case for case in cases if case.kind == kind] for kind in kinds]


def tabulate(connector: str, kind: str, found: Sequence[Comparison]) -> str:
    """A row of the table."""
    verdicts = [each.verdict for each in found]
    counts = [verdicts.count(verdict) for verdict in ("equal", "near tie", "other")]
    shift = max(each.shift for each in found)
    return f"| {' | '.join(map(str, (connector, kind, len(found), *counts)))} | {shift:.1e} |"


if __name__ == "__main__":
    main()
