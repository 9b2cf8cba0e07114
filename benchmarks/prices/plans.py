"""GPUs that plans take on today's machines, with kernel tables and with the old roofline.

Run from the root: `.venv/bin/python benchmarks/prices/plans.py`, five minutes on one core.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import before
from rich.console import Console
from rich.table import Table

from cleave.api.cluster import Cluster
from cleave.api.manifest import validate
from cleave.perf.estimate import Confidence, LatencySource
from cleave.perf.estimator import ModelEstimator, NodeType, _TimingSource
from cleave.planner import plan_search, problem_from_cluster
from cleave.planner.problem import Problem
from cleave.planner.result.text import format_plan

RATES = {
    "meta-llama/Llama-3.1-8B-Instruct": 150,
    "meta-llama/Llama-3.1-70B-Instruct": 24,
    "Qwen/Qwen3-32B": 40,
    "openai/gpt-oss-120b": 60,
    "deepseek-ai/DeepSeek-V3": 12,
}
"""Requests per second."""
GPUS = ("H100", "H200", "B200")
LENGTHS = {
    "promptTokens": {"mean": 2000, "p90": 4000},
    "outputTokens": {"mean": 300, "p90": 600},
}
SLO = {"ttftMs": 2000, "tpotMs": 40}


class BeforeEstimator(ModelEstimator):
    """The planner's estimator without kernel tables and with the roofline of 2023."""

    def _iter_unpipelined_sources(self, machine: NodeType, tensor: int) -> Iterator[_TimingSource]:
        roofline = before.build_roofline(self.shape, machine.gpu, tensor)
        trust = Confidence(LatencySource.ROOFLINE, "before", None)
        yield _TimingSource(roofline.to_timing(), trust)


def build_problem(model: str, gpu: str, spec: Mapping[str, object]) -> Problem:
    """Planning `model` on eight nodes of eight GPUs, with the targets and traffic of `spec`."""
    deployment = validate(
        {
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "chat"},
            "spec": {
                "model": model,
                **spec,
                "planning": {"maxGPUs": 64},
                # gpt-oss has two kinds of KV, which Cleave's connector does not move.
                "engine": {"connector": "Nixl"},
            },
        }
    )
    cluster = Cluster.model_validate(
        {
            "nodes": [{"count": 8, "gpu": gpu, "gpusPerNode": 8}],
            "network": {"kind": "InfiniBand", "bandwidthGbps": 400, "latencyUs": 5},
        }
    )
    return problem_from_cluster.build_problem(deployment, cluster)


def main() -> None:
    table = Table(title="GPUs of the selected plan")
    for column in ("model", "req/s", "GPU", "before", "s", "now", "s", "fewer GPUs"):
        table.add_column(column)
    for model, rate in RATES.items():
        for gpu in GPUS:
            spec = {"slo": SLO, "workload": {"rate": rate, **LENGTHS}}
            problem = build_problem(model, gpu, spec)
            estimator = problem.estimator
            old = replace(problem, estimator=BeforeEstimator(estimator.shape, estimator.machines))
            cells, counts = [], []
            for each in (old, problem):
                start = time.perf_counter()
                selected = plan_search.plan(each).selected
                seconds = time.perf_counter() - start
                counts.append(sum(pool.gpus for pool in selected.pools) if selected else None)
                cells += [f"{counts[-1]}: {format_plan(selected)}" if selected else "none"]
                cells += [f"{seconds:.1f}"]
            both = None not in counts
            saved = f"{1 - counts[1] / counts[0]:.0%}" if both else ""
            table.add_row(model.rpartition("/")[2], str(rate), gpu, *cells, saved)
            print(model, gpu, *cells, saved, flush=True)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
