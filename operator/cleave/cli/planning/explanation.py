"""`cleave plan --explain`: the input, how the plan was found and what its predictions use."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cleave.api.role import Role
from cleave.planner.plan import Plan, PlanningResult
from cleave.planner.pool_simulation import to_candidate_placement
from cleave.planner.problem import Problem
from cleave.planner.result.md1 import QueueingError, compute_mean_ttft_ms
from cleave.planner.result.recovery_cost import compute_loss_cost
from cleave.planner.result.targets_worth import OVERLOAD, measure_worth_of_targets
from cleave.planner.result.text import (
    describe_trust,
    format_ms,
    format_number,
    format_percent,
    format_plan,
    format_pool,
    format_targets,
)
from cleave.planner.scaling_law import growth
from cleave.planner.scaling_law.aladdin import ScalingError, WorkerSize
from cleave.traffic.characterization import LengthSummary, characterize

if TYPE_CHECKING:
    from rich.console import Console

_SAMPLE_REQUESTS = 5000
"""Number of requests generated to describe the workload."""

_ALGORITHMS = {
    "Algorithm 1": "DistServe's Algorithm 1: prefill and decode instances anywhere",
    "Algorithm 2": "DistServe's Algorithm 2: prefill and decode instances within nodes",
    "colocated": "the search for mixed instances",
}
_BATCHING = {
    "VLLM": "as vLLM does today",
    "PREFILL_FIRST": "complete waiting prompts first",
    "ORCA": "as Orca does",
    "ORCA_PAGED": "as Orca does, with paged KV",
    "FASTER_TRANSFORMER": "as FasterTransformer does, one batch after the other",
    "LIGHTLLM": "as LightLLM does",
}

Fact = tuple[str, str]


def print_explanation(console: "Console", problem: Problem, result: PlanningResult) -> None:
    """Print the explanation, one fact per line."""
    from rich.table import Table

    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True, style="bold")
    facts.add_column(overflow="fold")
    for name, text in (*_describe_problem(problem), *_describe_result(problem, result)):
        facts.add_row(name, text)
    console.print(facts, highlight=False)


def _describe_problem(problem: Problem) -> Iterator[Fact]:
    slo = problem.slo
    target = f"{format_percent(slo.attainment)} within {format_targets(slo)}"
    yield "input", f"{problem.shape.name}, {format_number(problem.rate)} req/s, {target}"
    summary = characterize(problem.demand.draw(_SAMPLE_REQUESTS, seed=problem.seed))
    yield "prompts", _format_lengths(summary.prompt_tokens)
    yield "outputs", _format_lengths(summary.output_tokens)
    if summary.arrivals:
        burstiness = format_number(summary.arrivals.burstiness)
        yield "arrivals", f"variation of interarrival times {burstiness} (Poisson: 1)"
    machines = (f"{each.num_nodes} x {each.gpus_per_node} {each.gpu}" for each in problem.supplies)
    yield "machines", f"{', '.join(machines)}; at most {problem.max_gpus} GPUs in use"
    link = problem.supplies[0].network_link
    speed = f"about {format_number(link.effective_gb_per_s * 8)} Gbit/s per GPU in use"
    yield "network", f"{link.kind}, {speed}"


def _describe_result(problem: Problem, result: PlanningResult) -> Iterator[Fact]:
    count = "1 way" if result.num_candidates == 1 else f"{result.num_candidates:,} ways"
    yield "candidates", f"{count} to distribute one instance over GPUs"
    yield "simulated", f"{result.num_simulated_requests:,} requests in {result.elapsed_s:.2f} s"
    for source in dict.fromkeys(describe_trust(plan.prediction.trust) for plan in result.plans):
        yield "latency", source
    for plan in result.plans[:1]:
        low, high = plan.prediction.goodput_interval
        algorithm = _ALGORITHMS.get(plan.algorithm, plan.algorithm)
        yield "best plan", f"{format_plan(plan)}, found by {algorithm}"
        yield "goodput", f"{format_number(low)} to {format_number(high)} req/s with 95 % confidence"
        yield from _describe_engines(plan)
        yield from _describe_queueing(problem, plan)
        yield from _describe_scaling_law(problem, plan)
        yield from _describe_targets(problem, plan)
        yield from _describe_recovery(problem, plan)


def _describe_engines(plan: Plan) -> Iterator[Fact]:
    for pool in plan.pools:
        limits = f"{pool.max_num_seqs} requests and {pool.max_num_batched_tokens} tokens"
        how = _BATCHING.get(pool.batching or "", pool.batching)
        yield str(pool.role), f"batches {how}, at most {limits} per iteration"


def _describe_queueing(problem: Problem, plan: Plan) -> Iterator[Fact]:
    """The queue of a prefill instance by DistServe's Eq. 1 and 2 (M/D/1), for mean prompts."""
    pools = {pool.role: pool for pool in plan.pools}
    for group in to_candidate_placement(problem, plan.pools, plan.algorithm, plan.cells).groups:
        if group.role is not Role.PREFILL:
            continue
        timing = group.instance.engine.timing
        prefill_ms = timing.predict_prefill_ms([round(problem.demand.mean_prompt_tokens)])
        share = problem.rate / (pools[Role.PREFILL].replicas * group.instance.engine.ranks)
        try:
            mean_ms = compute_mean_ttft_ms(share, prefill_ms, timing.stages)
        except QueueingError as error:
            yield "by formula", str(error)
        else:
            mean = f"{format_ms(mean_ms)} to the end of prefill"
            assumed = "if all prompts had the mean length (DistServe, Eq. 1-2)"
            caveat = "varying lengths wait longer, batched prompts shorter"
            yield "by formula", f"{mean} {assumed}; {caveat}"


def _describe_scaling_law(problem: Problem, plan: Plan) -> Iterator[Fact]:
    """Aladdin's scaling laws: GPUs per worker (Eq. 5-6) and workers per rate (Eq. 7)."""
    try:
        best = growth.find_best_size(problem)
        ranked = ", then ".join(_format_worker_size(best.gpu, size) for size in best.sizes[:2])
        yield (
            "worker size",
            f"most tokens per GPU with {ranked} for a decode instance (Aladdin, Eq. 5-6)",
        )
    except ScalingError as error:
        yield "worker size", str(error)
    try:
        scaling = growth.fit_growth(problem, plan)
    except ScalingError as error:
        yield "growth", str(error)
        return
    law, worker = scaling.law, " + ".join(format_pool(pool) for pool in scaling.worker)
    line = f"{format_number(law.k5)} x req/s {'-' if law.c5 < 0 else '+'} {abs(law.c5):.2f}"
    counts = ", ".join(f"{n} at {format_number(rate)}" for rate, n in scaling.counts.items())
    yield "growth", f"at other rates: {worker}, times {line}, rounded up (Aladdin, Eq. 7)"
    yield "", f"fitted to short simulations: {counts} req/s"
    lowest = f"{format_number(law.lowest_rate)} req/s"
    if not law.holds_at(problem.rate):
        yield "", f"does not apply below {lowest}, where minutes differ too much"
    else:
        yield "", f"applies above {lowest}, where minutes are alike"


def _describe_targets(problem: Problem, plan: Plan) -> Iterator[Fact]:
    """What the same instances would serve if their engines kept targets."""
    worth = measure_worth_of_targets(problem, plan)
    if worth is None:
        return
    own, (least, most) = plan.prediction, plan.prediction.goodput_interval
    low, high = worth.goodput_interval
    served = f"{format_number(worth.goodput)} instead of {format_number(own.goodput)} req/s"
    if high < least:
        served = f"less: {served}"
    elif low <= most:
        served = f"about as much ({format_number(worth.goodput)} req/s)"
    setting = "engine.scheduling {order: InTimeFirst, admission: WithinTpot}"
    yield "targets", f"with {setting} these instances serve {served} within the SLO"
    rate = format_number(OVERLOAD * own.goodput)
    kept, lost = map(format_percent, (worth.overload_attainment, worth.own_overload_attainment))
    yield "", f"at {rate} req/s, {kept} instead of {lost} of the requests, and the others wait long"


def _describe_recovery(problem: Problem, plan: Plan) -> Iterator[Fact]:
    """The cost of losing an instance (Splitwise, section IV-E)."""
    cost = compute_loss_cost(problem, plan)
    returned = f"{format_ms(cost.prefix_cached_ms)} where its prompt is still cached"
    single = f"one stream of it is computed again in {format_ms(cost.recompute_ms)}, {returned}"
    pause_ms = format_ms(1e3 * cost.pause_s)
    yield "recovery", f"when an instance is lost, {single}; all its streams in {pause_ms}"


def _format_worker_size(gpu: str, size: WorkerSize) -> str:
    limit = "KV memory" if size.is_bound_by_kv else "TPOT"
    speed = f"{format_number(size.tokens_per_s_per_gpu)} tokens/s per GPU"
    return f"{size.gpus} x {gpu} ({speed}, {size.batch} requests at once, limited by {limit})"


def _format_lengths(summary: LengthSummary) -> str:
    return (
        f"{format_number(summary.mean)} tokens on average, P50 {format_number(summary.p50)}, "
        f"P90 {format_number(summary.p90)}, P99 {format_number(summary.p99)}"
    )
