"""Plans beside published runs: the GPUs that a plan takes for the rate that eight GPUs served.

Run from the root: `.venv/bin/python benchmarks/prices/deployments.py FOLDER`, with the folder
`systems` of aiconfigurator-core; a minute on one core. Of InferenceX's runs of vLLM with one model,
GPU, prompt length and number of requests at a time, the one counts that makes most tokens per GPU.
The plan serves the same lengths at eight times its rate per GPU, with arrivals at random, and nine
of ten requests have to be at least as fast as the run's mean token.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import plans
import serving
from rich.console import Console
from rich.table import Table
from serving import Measurement

from cleave.perf.estimator import ModelEstimator
from cleave.planner import plan_search
from cleave.planner.plan import Plan
from cleave.planner.problem import Problem
from cleave.planner.result.text import format_plan

MODELS = {
    "llama-3.1-70b-fp8": "meta-llama/Llama-3.1-70B-Instruct",
    "gpt-oss-120b": "openai/gpt-oss-120b",
}
"""Of the runs -> name for the planner."""
BATCHES = (4, 16, 64)
"""Requests at a time: a low, a middle and a high rate."""
GPUS = 8
LEAST_TTFT_MS = 2000.0
LONG_QUEUE = 3.0
"""The TTFT target, as a multiple of the published mean."""


def compute_rate_per_gpu(run: Measurement) -> float:
    """Requests per second and GPU of a closed loop."""
    seconds = (run.ttft_ms + run.tpot_ms * (count_mean(run.output_tokens) - 1)) / 1000
    return run.batch / seconds / run.tensor


def count_mean(tokens: int) -> float:
    """Mean of InferenceX's even distribution of lengths up to `tokens`."""
    return tokens * (1 + serving.SHORTEST) / 2


def find_best(runs: Sequence[Measurement], batch: int) -> Measurement | None:
    """The run of `batch` requests with the highest rate per GPU; None: there is none."""
    equal = [run for run in runs if run.batch == batch]
    return max(equal, key=compute_rate_per_gpu, default=None)


def build_problem(run: Measurement) -> Problem:
    """The problem of serving the rate of `GPUS` GPUs with this run's model, KV and lengths."""
    lengths = {
        name: {"mean": round(count_mean(tokens)), "p90": round(0.98 * tokens)}
        for name, tokens in (
            ("promptTokens", run.prompt_tokens),
            ("outputTokens", run.output_tokens),
        )
    }
    spec = {
        "slo": {"ttftMs": max(LEAST_TTFT_MS, LONG_QUEUE * run.ttft_ms), "tpotMs": run.tpot_ms},
        "workload": {"rate": GPUS * compute_rate_per_gpu(run), **lengths},
    }
    problem = plans.build_problem(MODELS[run.model], run.gpu, spec)
    estimator = problem.estimator
    assert isinstance(estimator, ModelEstimator)
    own = ModelEstimator(run.shape, estimator.machines)
    return replace(problem, shape=run.shape, estimator=own)


def iter_pairs(root: Path) -> Iterator[tuple[Measurement, Plan | None]]:
    """(published run, plan) of every model, GPU, prompt length and number of requests."""
    runs = [
        run
        for run in serving.read_measurements(root)
        if run.model in MODELS and run.is_inferencex and run.output_tokens == 1024
    ]
    groups: dict[tuple[str, str, int], list[Measurement]] = {}
    for run in filter(serving.is_plausible, runs):
        groups.setdefault((run.model, run.gpu, run.prompt_tokens), []).append(run)
    for _, group in sorted(groups.items()):
        for batch in BATCHES:
            if (best := find_best(group, batch)) is not None:
                yield best, plan_search.plan(build_problem(best)).selected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, help="the folder `systems` of the source")
    table = Table(title=f"Plans for the rate of {GPUS} GPUs in published runs")
    columns = ("model", "GPU", "prompts", "published", "tokens/s/GPU", "req/s")
    for column in (*columns, "GPUs", "plan"):
        table.add_column(column)
    for run, plan in iter_pairs(parser.parse_args().root):
        rate = compute_rate_per_gpu(run)
        cells = [run.model, run.gpu, str(run.prompt_tokens)]
        cells += [f"tp{run.tensor} x{run.batch}: {run.tpot_ms:.1f} ms"]
        cells += [f"{rate * count_mean(run.output_tokens):.0f}", f"{rate * GPUS:.1f}"]
        gpus = sum(pool.gpus for pool in plan.pools) if plan else None
        cells += [str(gpus), format_plan(plan) if plan else "none"]
        table.add_row(*cells)
        print(*cells, flush=True)
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
