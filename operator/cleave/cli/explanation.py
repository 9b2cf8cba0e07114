"""`cleave plan --explain`: what was asked, how the answer was found and what it rests on."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cleave.api.role import Role
from cleave.planner.bench import to_draft
from cleave.planner.plan import Answer, Plan
from cleave.planner.problem import Problem
from cleave.planner.queueing import QueueingError, mean_ttft_inter_op_ms
from cleave.planner.words import milliseconds, number, percent, plan_label, trust_sentence
from cleave.traffic.diagnosis import LengthSummary, diagnose

if TYPE_CHECKING:
    from rich.console import Console

_SURVEY = 5000
"""Requests drawn to describe the workload."""

Fact = tuple[str, str]


def explain(console: "Console", problem: Problem, answer: Answer) -> None:
    """Print it, a fact per line."""
    from rich.table import Table

    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True, style="bold")
    facts.add_column(overflow="fold")
    for name, text in (*_asked(problem), *_found(problem, answer)):
        facts.add_row(name, text)
    console.print(facts, highlight=False)


def _asked(problem: Problem) -> Iterator[Fact]:
    slo = problem.slo
    targets = f"TTFT {milliseconds(slo.ttft_ms)} and TPOT {milliseconds(slo.tpot_ms)}"
    goal = f"{percent(slo.attainment)} within {targets}"
    yield "asked", f"{problem.shape.name}, {number(problem.rate)} req/s, {goal}"
    seen = diagnose(problem.demand.draw(_SURVEY, seed=problem.seed))
    yield "prompts", _lengths(seen.prompt_tokens)
    yield "outputs", _lengths(seen.output_tokens)
    if seen.arrivals:
        yield "arrivals", f"variation of the gaps {number(seen.arrivals.burstiness)} (Poisson: 1)"
    machines = (
        f"{supply.num_nodes} x {supply.gpus_per_node} {supply.gpu}" for supply in problem.supplies
    )
    yield "machines", f"{', '.join(machines)}; at most {problem.max_gpus} GPUs in use"
    link = problem.supplies[0].network_link
    yield "network", f"{link.kind}, {number(link.effective_gb_per_s * 8)} Gbit/s net for one GPU"


def _found(problem: Problem, answer: Answer) -> Iterator[Fact]:
    yield "candidates", f"{answer.num_candidates:,} ways to spread one instance over GPUs"
    yield "simulated", f"{answer.num_simulated_requests:,} requests in {answer.elapsed_s:.2f} s"
    plans = ((answer.selected,) if answer.selected else ()) + answer.alternatives
    for source in dict.fromkeys(trust_sentence(plan.prediction.trust) for plan in plans):
        yield "latency", source
    for plan in plans[:1]:
        low, high = plan.prediction.goodput_interval
        yield "best plan", f"{plan_label(plan)}, by {plan.algorithm}"
        yield "goodput", f"{number(low)} to {number(high)} req/s with 95 % confidence"
        yield from _engines(plan)
        yield from _formula(problem, plan)


def _engines(plan: Plan) -> Iterator[Fact]:
    for pool in plan.pools:
        limits = f"{pool.max_num_seqs} requests and {pool.max_num_batched_tokens} tokens"
        yield str(pool.role), f"batching {pool.batching}, at most {limits} in a pass"


def _formula(problem: Problem, plan: Plan) -> Iterator[Fact]:
    """The queue of a prefill instance by DistServe's Eq. 1 and 2, for prompts of mean length."""
    groups = to_draft(problem, plan.pools, plan.algorithm).groups
    pools = {pool.role: pool for pool in plan.pools}
    for group in groups:
        if group.role is not Role.PREFILL:
            continue
        timing = group.instance.engine.timing
        prefill_ms = timing.prefill_ms([round(problem.demand.mean_prompt_tokens)])
        share = problem.rate / pools[Role.PREFILL].replicas
        try:
            mean_ms = mean_ttft_inter_op_ms(share, prefill_ms, timing.stages)
        except QueueingError as error:
            yield "M/D/1", str(error)
        else:
            after = f"equal prompts would be computed {milliseconds(mean_ms)} after they arrive"
            doubt = "unlike lengths wait longer, joined ones less"
            yield "M/D/1", f"{after} (DistServe, Eq. 1-2); {doubt}"


def _lengths(seen: LengthSummary) -> str:
    return (
        f"{number(seen.mean)} tokens on average, P50 {number(seen.p50)}, P90 {number(seen.p90)}, "
        f"P99 {number(seen.p99)}"
    )
