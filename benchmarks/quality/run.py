"""Split against whole on a model that speaks: tokens, log-probabilities and perplexity.

.venv/bin/python benchmarks/quality/run.py              # README.md explains the tables
.venv/bin/python benchmarks/quality/run.py --every 8    # whether it works
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cleave.local.smollm2.preparation import get_or_prepare
from cleave_worker.transfer.transport import Transport

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parent))

from answers import Comparison, Output, compare
from quality_requests import ADAPTER, ADAPTERS, MODEL, Case, list_cases
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
    parser.add_argument("--every", type=int, default=1, help="N: only each Nth request of a kind")
    args = parser.parse_args()
    model = args.model or get_or_prepare(lambda *_: None)
    cases = list_cases(OUTPUT_TOKENS)
    kinds = dict.fromkeys(case.kind for case in cases)
    cases = [c for kind in kinds for c in [c for c in cases if c.kind == kind][:: args.every]]
    streams = [case for case in list_cases(RESUMED_TOKENS) if case.kind == "continuation"][:RESUMED]
    # On CPU vLLM's steps take ten times as long beside adapters, so these have a pair of their own.
    plain = [case for case in cases if case.kind != ADAPTER]
    beside = [case for case in cases if case.kind in (ADAPTER, "question")]
    rows: list[str] = []
    is_right = True
    for connector in args.connectors:
        with serve(model, connector, args.dtype, has_adapters=False) as pair:
            for way, found in pair.measure_perplexity(model, args.every).items():
                print(f"{connector}: perplexity {way} {found:.6f}", flush=True)
            judged = collect(compare_all(pair, connector, plain, streams))
        with serve(model, connector, args.dtype, has_adapters=True) as pair:
            judged |= collect(compare_beside_adapters(pair, beside))
        own = [tabulate(connector, kind, found) for kind, found in judged.items()]
        print(*own, sep="\n", flush=True)
        rows += own
        is_right &= all(each.verdict != "other" for found in judged.values() for each in found)
    print(f"\n| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *rows, sep="\n")
    sys.exit(not is_right)


@contextmanager
def serve(model: Path, connector: str, dtype: str, *, has_adapters: bool) -> Iterator[Pair]:
    """A pair that serves the model."""
    with tempfile.TemporaryDirectory() as folder:
        manifest = build_manifest(model, connector, dtype, has_adapters, Path(folder))
        with deployed(manifest, Path(folder), timeout_s=START_S) as deployment:
            yield wait_for(deployment, {MODEL, *(ADAPTERS if has_adapters else ())})


Judged = Iterator[tuple[str, Case, Comparison]]


def compare_all(
    pair: Pair, connector: str, cases: Sequence[Case], streams: Sequence[Case]
) -> Judged:
    """Each answer beside that of one engine, with its kind. `streams`: those to be resumed."""
    whole = pair.whole(cases)
    yield from judge("", cases, whole, pair.split(cases))
    yield from judge("whole, again", cases, whole, pair.whole(cases))
    long = [n for n, case in enumerate(cases) if case.prompt_tokens]
    some = range(0, len(cases), 3)
    if connector.startswith("Cleave"):
        yield from judge_some("prefix pulled", cases, whole, long, pair.pulled)
    yield from judge_some("roles flip meanwhile", cases, whole, some, pair.flipped)
    yield from judge("stream resumed", streams, pair.whole(streams), pair.resumed(streams))


def compare_beside_adapters(pair: Pair, cases: Sequence[Case]) -> Judged:
    """The same of requests to adapters, and to the model beside them."""
    for kind, case, comparison in judge("", cases, pair.whole(cases), pair.split(cases)):
        yield kind if kind == ADAPTER else f"{kind} beside adapters", case, comparison


def judge_some(
    kind: str,
    cases: Sequence[Case],
    whole: Sequence[Output],
    numbers: Sequence[int],
    ask: Callable[[Sequence[Case]], list[Output]],
) -> Judged:
    """`judge` of a part of the cases."""
    some = [cases[n] for n in numbers]
    return judge(kind, some, [whole[n] for n in numbers], ask(some))


def judge(
    kind: str, cases: Sequence[Case], whole: Sequence[Output], found: Sequence[Output]
) -> Judged:
    """Each answer beside the right one; `kind` empty: that of the request."""
    for case, right, output in zip(cases, whole, found, strict=True):
        yield kind or case.kind, case, compare(right, output)


def collect(judged: Judged) -> dict[str, list[Comparison]]:
    """By kind; what differs by more than arithmetic is printed."""
    found: dict[str, list[Comparison]] = {}
    for kind, case, comparison in judged:
        found.setdefault(kind, []).append(comparison)
        if comparison.verdict == "other":
            print(f"{kind}: {comparison} {case.body}", file=sys.stderr, flush=True)
    return found


def tabulate(connector: str, kind: str, found: Sequence[Comparison]) -> str:
    """A row of the table."""
    verdicts = [each.verdict for each in found]
    counts = [verdicts.count(verdict) for verdict in ("equal", "near tie", "other")]
    shift = max(each.shift for each in found)
    return f"| {' | '.join(map(str, (connector, kind, len(found), *counts)))} | {shift:.1e} |"


if __name__ == "__main__":
    main()
