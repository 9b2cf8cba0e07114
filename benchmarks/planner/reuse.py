"""Plans for a trace whose prompts repeat: without knowledge of it, with what gateways would have
learned, and with the trace's blocks.

`python benchmarks/planner/reuse.py mooncake_conversation_trace.jsonl --rates 3.4 10`, minutes for
each rate. The trace was published with Mooncake's paper (FAST 2025, kvcache-ai/Mooncake).

All plans serve the trace in a simulation with prefix caches, from another place than the search
used. *learned*: the plan of a review that has observed the trace, whose deployment says nothing
of reuse. What one saves without the others is what knowledge of reuse is worth.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from cleave.api.cluster import Cluster
from cleave.api.deployment import LLMDeployment
from cleave.gateway.metrics.gateway_metrics import LENGTH_BOUNDS
from cleave.planner import plan_search, problem_from_cluster
from cleave.planner.plan import Plan
from cleave.planner.pool_simulation import to_candidate_placement
from cleave.planner.problem import Problem
from cleave.planner.result.text import format_plan
from cleave.planner.search.candidate_placement import build_cell
from cleave.planner.search.trials import CONFIRMATION_PRECISION, Targets, Trials
from cleave.traffic.counters import Buckets
from cleave.traffic.refit import refit, to_demand
from cleave.traffic.reuse_curve import measure_reuse
from cleave.traffic.window import TrafficWindow
from cleave.traffic.workload import TraceReplay, build_from_spec

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
SEED = 100
ANSWER_TTFT_S, ANSWER_TPOT_S = 1.0, 0.02
"""Latencies that gateways measure."""


def build_problem(trace: Path, rate: float, ttft_ms: float, nodes: int) -> Problem:
    """Nodes of eight H100."""
    manifest = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "reuse"},
        "spec": {
            "model": MODEL,
            "slo": {"ttftMs": ttft_ms, "tpotMs": 40},
            "workload": {"rate": rate, "trace": {"path": str(trace.absolute())}},
        },
    }
    deployment = LLMDeployment.model_validate(manifest)
    cluster = {
        "nodes": [{"count": nodes, "gpu": "H100-SXM-80GB", "gpusPerNode": 8}],
        "network": {"kind": "InfiniBand", "bandwidthGbps": 400},
    }
    return problem_from_cluster.build_problem(deployment, Cluster.model_validate(cluster))


def learn(problem: Problem) -> Problem:
    """The problem with the traffic that replanning fits to what gateways count of the trace."""
    source = problem.demand.source
    assert isinstance(source, TraceReplay)
    trace = source.trace
    arrival_ms = trace.arrival_ms * trace.rate / problem.rate
    length_s = float(arrival_ms[-1]) / 1000
    prompts, outputs = (
        Buckets.from_values(each.tolist(), (*LENGTH_BOUNDS, math.inf))
        for each in (trace.prompt_tokens, trace.output_tokens)
    )
    ttft, tpot = (Buckets((math.inf,), (1.0,), each) for each in (ANSWER_TTFT_S, ANSWER_TPOT_S))
    reuse = measure_reuse(replace(trace, arrival_ms=arrival_ms))
    window = TrafficWindow(
        length_s, length_s, len(trace), prompts, outputs, reuse=reuse, ttft=ttft, tpot=tpot
    )
    spec = refit([window])
    print(f"\nlearned: {spec.reuse}\n", flush=True)
    demand = to_demand([window]).with_reuse_of(build_from_spec(spec, Path()))
    return replace(problem, demand=replace(demand, max_model_len=problem.demand.max_model_len))


def serve(problem: Problem, plan: Plan) -> tuple[float, float]:
    """Attainment and cached share of a plan under the problem's traffic."""
    placement = to_candidate_placement(problem, plan.pools, plan.algorithm, plan.cells)
    targets = Targets.from_slo(problem.slo)
    trials = Trials(problem.demand, SEED, CONFIRMATION_PRECISION)
    rate = problem.rate / placement.copies
    span = trials.compute_span(rate, targets)
    outcome = trials.simulate(build_cell(problem, placement), rate, span)
    window = span.window
    met = (outcome.ttft_ms <= targets.ttft_ms) & (outcome.tpot_ms <= targets.tpot_ms)
    cached = outcome.cached_tokens[window].sum() / outcome.prompt_tokens[window].sum()
    return float(np.mean(met[window])), float(cached)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=[3.4, 10.0, 20.0])
    parser.add_argument("--nodes", type=int, default=1, help="of eight H100")
    parser.add_argument("--ttft-ms", type=float, default=2000)
    args = parser.parse_args(arguments)
    print("| rate | planned | plan | GPUs | predicted | served | cached | CPU |")
    print("|---|---|---|---|---|---|---|---|")
    for rate in args.rates:
        problem = build_problem(args.trace, rate, args.ttft_ms, args.nodes)
        blind = replace(problem, demand=problem.demand.without_reuse())
        problems = (("without", blind), ("learned", learn(problem)), ("with reuse", problem))
        for label, known in problems:
            start = time.process_time()
            result = plan_search.plan(known)
            spent_s = time.process_time() - start
            if result.selected is None:
                print(f"| {rate:g} | {label} | {result.reason} | | | | | {spent_s:.0f} s |")
                continue
            plan = result.selected
            served, cached = serve(problem, plan)
            figures = (
                f"{plan.gpus} | {plan.prediction.attainment:.1%} | {served:.1%} | {cached:.1%}"
            )
            print(
                f"| {rate:g} | {label} | {format_plan(plan)} | {figures} | {spent_s:.0f} s |",
                flush=True,
            )
            if result.reuse:
                print(f"\n{result.reuse.text}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
