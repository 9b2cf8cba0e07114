"""`cleave plan --explain`: what was asked, how the answer was found and what it rests on."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cleave.api.role import Role
from cleave.planner import growth
from cleave.planner.bench import to_draft
from cleave.planner.plan import Answer, Plan
from cleave.planner.problem import Problem
from cleave.planner.queueing import QueueingError, mean_ttft_inter_op_ms
from cleave.planner.recovering import weigh_checkpoints
from cleave.planner.scaling import ScalingError, WorkerSize
from cleave.planner.words import (
    milliseconds,
    number,
    percent,
    plan_label,
    pool_label,
    trust_sentence,
)
from cleave.traffic.diagnosis import LengthSummary, diagnose

if TYPE_CHECKING:
    from rich.console import Console

_SURVEY = 5000
"""Requests drawn to describe the workload."""

_FINDERS = {
    "Algorithm 1": "DistServe's Algorithm 1: prefill and decode instances anywhere",
    "Algorithm 2": "DistServe's Algorithm 2: prefill and decode instances within nodes",
    "colocated": "the search for mixed instances",
}
_BATCHING = {
    "VLLM": "as vLLM does today",
    "PREFILL_FIRST": "whole waiting prompts first",
    "ORCA": "as Orca does",
    "ORCA_PAGED": "as Orca does, with paged KV",
    "FASTER_TRANSFORMER": "as FasterTransformer does, one batch after the other",
    "LIGHTLLM": "as LightLLM does",
}

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
    yield (
        "network",
        f"{link.kind}, about {number(link.effective_gb_per_s * 8)} Gbit/s per GPU in use",
    )


def _found(problem: Problem, answer: Answer) -> Iterator[Fact]:
    ways = "1 way" if answer.num_candidates == 1 else f"{answer.num_candidates:,} ways"
    yield "candidates", f"{ways} to spread one instance over GPUs"
    yield "simulated", f"{answer.num_simulated_requests:,} requests in {answer.elapsed_s:.2f} s"
    plans = ((answer.selected,) if answer.selected else ()) + answer.alternatives
    for source in dict.fromkeys(trust_sentence(plan.prediction.trust) for plan in plans):
        yield "latency", source
    for plan in plans[:1]:
        low, high = plan.prediction.goodput_interval
        yield "best plan", f"{plan_label(plan)}, found by {_finder(plan)}"
        yield "goodput", f"{number(low)} to {number(high)} req/s with 95 % confidence"
        yield from _engines(plan)
        yield from _formula(problem, plan)
        yield from _aladdin(problem, plan)
        yield from _recovery(problem, plan)


def _engines(plan: Plan) -> Iterator[Fact]:
    for pool in plan.pools:
        limits = f"{pool.max_num_seqs} requests and {pool.max_num_batched_tokens} tokens"
        how = _BATCHING.get(pool.batching or "", pool.batching)
        yield str(pool.role), f"batches {how}, at most {limits} in a pass"


def _finder(plan: Plan) -> str:
    return _FINDERS.get(plan.algorithm, plan.algorithm)


def _formula(problem: Problem, plan: Plan) -> Iterator[Fact]:
    """The queue of a prefill instance by DistServe's Eq. 1 and 2 (M/D/1), for mean prompts."""
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
            yield "by formula", str(error)
        else:
            mean = f"were all prompts of mean length, {milliseconds(mean_ms)} to the end of prefill"
            doubt = "unlike lengths wait longer, prompts that share a pass less"
            yield "by formula", f"{mean} (DistServe, Eq. 1-2); {doubt}"


def _aladdin(problem: Problem, plan: Plan) -> Iterator[Fact]:
    """Aladdin's laws: GPUs per worker (Eq. 5-6) and workers per rate (Eq. 7)."""
    try:
        best = growth.best_size(problem)
        ranked = ", then ".join(_size(best.gpu, size) for size in best.sizes[:2])
        yield "worker size", f"best for decoding {ranked} (Aladdin, Eq. 5-6)"
    except ScalingError as error:
        yield "worker size", str(error)
    try:
        found = growth.growth(problem, plan)
    except ScalingError as error:
        yield "growth", str(error)
        return
    law, worker = found.law, " + ".join(pool_label(pool) for pool in found.worker)
    line = f"{number(law.k5)} x rate {'-' if law.c5 < 0 else '+'} {abs(law.c5):.2f}"
    seen = ", ".join(f"{count} at {number(rate)}" for rate, count in found.counts.items())
    yield "growth", f"{line}, rounded up, times {worker} (Aladdin, Eq. 7)"
    yield "", f"from short simulations: {seen} req/s"
    if not law.holds_at(problem.rate):
        yield "", f"a minute's requests are too unlike below {number(law.lowest_rate)} req/s"
    else:
        yield "", f"holds above {number(law.lowest_rate)} req/s, where every minute is like another"


def _recovery(problem: Problem, plan: Plan) -> Iterator[Fact]:
    """What a loss costs as it is, and with checkpoints (Splitwise, section IV-E)."""
    found = weigh_checkpoints(problem, plan)
    if found is None:
        return
    one, pause_ms = found.resuming, milliseconds(1e3 * found.pause_s)
    returned = f"{milliseconds(one.returned_ms)} where its prompt is still cached"
    anew = f"one stream takes {milliseconds(one.anew_ms)}, {returned}; all of an instance"
    yield "recovery", f"computed anew, {anew} {pause_ms}"
    restored = f"{milliseconds(one.restored_ms)} and {milliseconds(1e3 * found.restored_pause_s)}"
    rate, room = f"{found.link_bytes_per_s / 1e9:.2g} GB/s", f"{found.host_bytes / 1e9:.3g} GB"
    yield "", f"from checkpoints {restored}; they take {rate} of each GPU's link and {room} of host"
    pays = (
        f"pay in GPU time only if an instance is lost every {number(found.even_hours)} h or oftener"
    )
    yield "", pays if found.link_share < 1 else "never pay: the link cannot carry them"


def _size(gpu: str, size: WorkerSize) -> str:
    limit = "KV memory" if size.is_bound_by_kv else "TPOT"
    speed = f"{number(size.tokens_per_s_per_gpu)} tokens/s per GPU"
    return f"{size.gpus} x {gpu} ({speed}, {size.batch} requests at once, limited by {limit})"


def _lengths(seen: LengthSummary) -> str:
    return (
        f"{number(seen.mean)} tokens on average, P50 {number(seen.p50)}, P90 {number(seen.p90)}, "
        f"P99 {number(seen.p99)}"
    )
