"""Time to the first token of a prompt whose beginning the decode engine has: pulled from there,
computed again, or found in the engine's own cache.

Run from the root: `.venv/bin/python benchmarks/kv/prefix_ttft.py`. Real vLLM on CPU, a prefill and
a decode engine with a core each, KV through shared memory. Exit code 1: a first token differed, or
a prefix was not pulled.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATHS = (".", "benchmarks")
sys.path[:0] = [str(ROOT / path) for path in PATHS]

from result_table import show  # noqa: E402

from cleave.local import tiny_model  # noqa: E402
from cleave_worker.transfer.transport import Transport  # noqa: E402

from e2e.support.deployments import Deployment, deployed  # noqa: E402
from e2e.support.handoffs import name_source, outcomes, post, tiny_with_connector  # noqa: E402
from e2e.support.vllm_prompts import Case, ask, engine_url, metric  # noqa: E402

SHAPE = tiny_model.TinyModelShape(layers=8, hidden=512, heads=8, kv_heads=4, mlp=1024)
"""KV of 16 KiB a token in float32."""
UP_S = 420
PREFILL_S = "vllm:request_prefill_time_seconds_sum"


@dataclass(frozen=True, slots=True)
class Row:
    """Medians for prompts of one length; times in ms."""

    tokens: int
    computed_ms: float
    pulled_ms: float
    own_cache_ms: float
    computed_prefill_ms: float
    """As the engine counts it: from its scheduler to the first token."""
    pulled_prefill_ms: float


def main() -> None:
    """Print a row for each length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=(250, 500, 1_000, 2_000, 3_500))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cleave-prefix-") as name:
        model = Path(name) / "model"
        tiny_model.build(model, SHAPE)
        manifest = tiny_with_connector(model, Transport.SHARED_MEMORY, checksums=False)
        with deployed(manifest, Path(name), timeout_s=UP_S) as vllm:
            rows = [measure_row(vllm, tokens, args.rounds) for tokens in args.tokens]
    found = {"ms to the first token, vLLM on CPU": [asdict(row) for row in rows]}
    show(found, args.output, 120, lambda _, value: f"{value:,.0f}")


def measure_row(vllm: Deployment, tokens: int, rounds: int) -> Row:
    """The first round, which compiles kernels, does not count."""
    source, number = engine_url(vllm, "prefill"), tokens * 1_000
    times: list[list[float]] = []
    for case in (Case(number + each, tokens, chat=False, stream=False) for each in range(rounds)):
        expected = ask(engine_url(vllm, "decode"), case).tokens
        pulled = outcomes(source).get("pulled", 0)
        ways: tuple[dict[str, object], ...] = (
            {"cache_salt": f"computed {case.number}"},
            {"kv_transfer_params": {"prefix_source": name_source(vllm)}},
            {},
        )
        found = [time_first_token(source, case, fields) for fields in ways]
        times.append([ms for pair in found for ms in pair[:2]])
        if outcomes(source).get("pulled", 0) != pulled + 1:
            sys.exit(f"the prefix of prompt {case.number} was not pulled: {outcomes(source)}")
        if any(first != expected[:1] for *_, first in found):
            sys.exit(f"first tokens of prompt {case.number} differ")
    columns = [statistics.median(column) for column in zip(*times[1:], strict=True)]
    computed, computed_prefill, pulled_ms, pulled_prefill, own, _ = columns
    return Row(tokens, computed, pulled_ms, own, computed_prefill, pulled_prefill)


def time_first_token(
    url: str, case: Case, fields: dict[str, object]
) -> tuple[float, float, Sequence[int]]:
    """(ms until an answer of one token is here, ms of these in the engine's prefill, the token)."""
    before, start_s = metric(url, PREFILL_S), time.perf_counter()
    answer = post(url, case, f"first-{time.monotonic_ns()}", max_tokens=1, **fields)
    ms = (time.perf_counter() - start_s) * 1_000
    return ms, (metric(url, PREFILL_S) - before) * 1_000, answer["choices"][0]["token_ids"]


if __name__ == "__main__":
    main()
