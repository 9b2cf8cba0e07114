"""Split against whole on a model that speaks: tokens, log-probabilities and perplexity.

    .venv/bin/python benchmarks/quality/run.py              # README.md explains the tables
    .venv/bin/python benchmarks/quality/run.py --quick      # whether it works

A prefill and a decode engine of vLLM on CPU for each connector. Each request goes through the
gateway, which splits it, and twice to the prefill engine alone: the second time shows what an
engine's own arithmetic does, as most of the prompt is in its cache.
"""

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cleave.local.smollm2.preparation import get_or_prepare
from cleave.policy.pair_trust import TIE_NATS
from cleave_worker.transfer.transport import Transport

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parent))

from quality_requests import MODEL, Case, list_cases

from e2e.support.deployments import Deployment, deployed, start_fast, tiny_vllm
from e2e.support.engine_keys import headers_for
from e2e.support.handoffs import tiny_with_connector
from e2e.support.vllm_prompts import engine_url, metric

TEXT = Path(__file__).parent / "gettysburg.txt"
CONNECTORS = ("Nixl", *(f"Cleave/{way}" for way in (Transport.SHARED_MEMORY, Transport.GLOO)))
SPLIT, WHOLE, AGAIN = "split", "whole", "whole again"
LENGTHS, QUICK_LENGTHS = (300, 1000, 3000), (300,)
OUTPUT_TOKENS, QUICK_OUTPUT_TOKENS = 48, 8
START_S, BOUND_S = 420, 300.0
HANDOFFS = "cleave_gateway_handoffs_total"


@dataclass(frozen=True)
class Output:
    """The tokens of an answer, and of each its log-probability and that of the likeliest other."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]


@dataclass(frozen=True)
class Comparison:
    """Two answers to one request."""

    common: int
    """Equal tokens before the first that differs."""
    length: int
    shift: float
    """Greatest difference of the log-probabilities of equal tokens, nats."""
    gap: float
    """Between the two likeliest tokens where the answers part, nats; 0: they do not."""

    @property
    def verdict(self) -> str:
        if self.common == self.length:
            return "equal"
        return "near tie" if self.gap <= TIE_NATS else "other"


def main() -> None:
    """Print the tables; exit code 1 when an answer differs by more than arithmetic."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder; default: the demo's model")
    parser.add_argument("--connectors", nargs="*", choices=CONNECTORS, default=CONNECTORS)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--positions", type=int, help="tokens of the text; default: all")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--answers", type=Path, help="write all answers to this file, as JSON")
    args = parser.parse_args()
    model = args.model or get_or_prepare(lambda *_: None)
    lengths = QUICK_LENGTHS if args.quick else tuple(args.lengths)
    cases = list_cases(lengths, QUICK_OUTPUT_TOKENS if args.quick else OUTPUT_TOKENS)
    positions = 20 if args.quick else args.positions
    rows, answers, is_right = [], {}, True
    for connector in args.connectors:
        with tempfile.TemporaryDirectory() as folder:
            manifest = build_manifest(model, connector, args.dtype, max(lengths))
            with deployed(manifest, Path(folder), timeout_s=START_S) as pair:
                outputs = ask_all(pair, cases)
                perplexities = measure_perplexity(pair, model, positions)
        found = [compare(*both) for both in zip(outputs[WHOLE], outputs[SPLIT], strict=True)]
        own = [compare(*both) for both in zip(outputs[WHOLE], outputs[AGAIN], strict=True)]
        rows += tabulate(connector, cases, found, own)
        answers[connector] = [vars(each) for each in found]
        print(f"{connector}: perplexity {perplexities[WHOLE]:.6f} whole, ", end="")
        print(f"{perplexities[SPLIT]:.6f} split", flush=True)
        is_right &= all(each.verdict != "other" for each in found)
    print("\n| connector | kind | requests | equal | near tie | other | equal to itself |", end="")
    print(" greatest shift | of itself |\n|---|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    if args.answers:
        args.answers.write_text(json.dumps(answers))
    sys.exit(not is_right)


def build_manifest(model: Path, connector: str, dtype: str, longest: int) -> dict[str, Any]:
    """A prefill and a decode instance."""
    name, _, way = connector.partition("/")
    manifest: dict[str, Any] = (
        tiny_with_connector(model, way, checksums=True)
        if way
        else tiny_vllm(model, engine=start_fast(connector=name))
    )
    # Engines test each other with as long a prompt as fits when they start.
    lengths = {"dtype": dtype, "maxModelLen": max(1024, 256 + longest * 5 // 4)}
    manifest["spec"]["model"] |= lengths
    manifest["spec"]["pools"] = {"flipping": "Off"}
    return manifest


def ask_all(pair: Deployment, cases: Sequence[Case]) -> dict[str, list[Output]]:
    """The answers, by way. Raises RuntimeError when one was not split."""
    prefill = engine_url(pair, "prefill")
    outputs: dict[str, list[Output]] = {SPLIT: [], WHOLE: [], AGAIN: []}
    before = metric(pair.url, HANDOFFS)
    for case in cases:
        outputs[SPLIT].append(read_output(post(pair.url, case.path, case.body)))
        # A prefix of the prompt must not be cached when it is computed whole.
        alone = case.body | {"cache_salt": "whole"}
        outputs[WHOLE].append(read_output(post(prefill, case.path, alone)))
        outputs[AGAIN].append(read_output(post(prefill, case.path, alone)))
    if (split := metric(pair.url, HANDOFFS) - before) < len(cases):
        raise RuntimeError(f"{split:.0f} of {len(cases)} requests were split")
    return outputs


def measure_perplexity(pair: Deployment, model: Path, positions: int | None) -> dict[str, float]:
    """Of the text, by way: each token is computed from a prompt of all before it."""
    from tokenizers import Tokenizer

    tokens = Tokenizer.from_file(str(model / "tokenizer.json")).encode(TEXT.read_text()).ids
    tokens = tokens[:positions]
    urls = {SPLIT: pair.url, WHOLE: engine_url(pair, "prefill")}
    sums = dict.fromkeys(urls, 0.0)
    for end in range(1, len(tokens)):
        # Only this token may be sampled; log-probabilities are those before that.
        body = {"model": MODEL, "prompt": tokens[:end], "max_tokens": 1, "temperature": 0}
        body |= {"logprobs": 1, "allowed_token_ids": [tokens[end]]}
        for way, url in urls.items():
            own = body | ({"cache_salt": "whole"} if way == WHOLE else {})
            choice = post(url, "/v1/completions", own)["choices"][0]
            sums[way] += choice["logprobs"]["token_logprobs"][0]
    return {way: math.exp(-total / (len(tokens) - 1)) for way, total in sums.items()}


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer. Raises RuntimeError for another status than 200."""
    answer = httpx.post(url + path, json=body, headers=headers_for(url), timeout=BOUND_S)
    if answer.status_code != httpx.codes.OK:
        raise RuntimeError(f"{path}: status {answer.status_code}: {answer.text[:500]}")
    found: dict[str, Any] = answer.json()
    return found


def read_output(answer: dict[str, Any]) -> Output:
    """The tokens and log-probabilities of a chat or a completion."""
    choice = answer["choices"][0]
    found = choice["logprobs"]
    if "content" in found:
        logprobs = [each["logprob"] for each in found["content"]]
        tops = [[top["logprob"] for top in each["top_logprobs"]] for each in found["content"]]
    else:
        logprobs = found["token_logprobs"]
        tops = [[*each.values()] for each in found["top_logprobs"]]
    gaps = [max(top) - min(sorted(top)[-2:]) for top in tops]
    return Output(choice["token_ids"], logprobs, gaps)


def compare(reference: Output, other: Output) -> Comparison:
    """Where they part, and by how much the log-probabilities before that differ."""
    pairs = zip(reference.tokens, other.tokens, strict=False)
    length = max(len(reference.tokens), len(other.tokens))
    common = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
    if common is None:
        common = min(len(reference.tokens), len(other.tokens))
    both = zip(reference.logprobs[:common], other.logprobs[:common], strict=True)
    shift = max((abs(a - b) for a, b in both), default=0.0)
    gaps = reference.gaps[common:] or [math.inf]
    return Comparison(common, length, shift, gaps[0] if common < length else 0.0)


def tabulate(
    connector: str, cases: Sequence[Case], found: Sequence[Comparison], own: Sequence[Comparison]
) -> Iterator[str]:
    """A row for each kind of request."""
    for kind in dict.fromkeys(case.kind for case in cases):
        rows = [n for n, case in enumerate(cases) if case.kind == kind]
        verdicts = [found[n].verdict for n in rows]
        counts = [verdicts.count(verdict) for verdict in ("equal", "near tie", "other")]
        itself = sum(own[n].verdict == "equal" for n in rows)
        shifts = [max(each[n].shift for n in rows) for each in (found, own)]
        cells = [connector, kind, len(rows), *counts, itself, *(f"{shift:.1e}" for shift in shifts)]
        yield f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
