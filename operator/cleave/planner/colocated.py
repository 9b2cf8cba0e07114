"""The best plan whose instances serve both phases: what disaggregation has to beat.

Vidur's search (section 6 and 7.3): parallelism, batching policy, batch size and tokens per pass,
coarse to fine. Also what it costs to serve one workload with the best configuration of another
(Vidur, fig. 1b).
"""

from collections.abc import Callable, Iterator, Sequence

from cleave.api.role import Role
from cleave.planner import goodput, rating
from cleave.planner.candidates import Candidate, Instance, mixed_instance
from cleave.planner.draft import Draft, Group, cell_fleet
from cleave.planner.problem import Problem
from cleave.planner.rating import Rated
from cleave.planner.trials import Targets, Trials

NUM_SEQS = (64, 128, 256, 512)
"""Requests in one pass and pipeline stage, tried for the best parallelism."""
NUM_BATCHED_TOKENS = (512, 1024, 2048, 4096, 8192)
"""Tokens of one pass: Sarathi's chunk, vLLM's budget."""
_COARSE = (512, 2048)


def optimise(
    problem: Problem,
    trials: Trials,
    found: Sequence[Candidate],
    targets: Targets,
    tick: Callable[[], None] = lambda: None,
) -> Rated | None:
    """One mixed instance with most goodput per resource; None: none meets the targets."""
    coarse = _best(problem, trials, _coarse(problem, found), targets, tick)
    if coarse is None:
        return None
    fine = _best(problem, trials, _fine(coarse.draft), targets, tick)
    return max(filter(None, (coarse, fine)), key=lambda rated: rated.per_resource)


def misconfiguration_cost(
    problem: Problem, trials: Trials, targets: Targets, own: Draft, foreign: Draft
) -> float:
    """How many times the resources per request `foreign` takes, the best plan of another workload.

    1: it is as good as `own`; infinite: it never meets the targets.
    """
    weigh = problem.planning.objective
    rates = [
        goodput.find(trials, cell_fleet(problem, each), targets).rate / each.resources(weigh)
        for each in (own.copied(1), foreign.copied(1))
    ]
    return rates[0] / rates[1] if rates[1] else float("inf")


def _coarse(problem: Problem, found: Sequence[Candidate]) -> Iterator[Instance]:
    for candidate in found:
        for batching in problem.policies.mixed:
            instance = mixed_instance(problem, candidate, batching)
            for tokens in _COARSE:
                yield instance.limited(instance.max_num_seqs, tokens)


def _fine(coarse: Draft) -> Iterator[Instance]:
    instance = coarse.groups[0].instance
    stages = instance.candidate.parallelism.pipeline
    for seqs in NUM_SEQS:
        for tokens in NUM_BATCHED_TOKENS:
            tuned = instance.limited(seqs * stages, tokens)
            if tuned != instance:
                yield tuned


def _best(
    problem: Problem,
    trials: Trials,
    instances: Iterator[Instance],
    targets: Targets,
    tick: Callable[[], None],
) -> Rated | None:
    drafts = (Draft((Group(Role.MIXED, instance, 1),)) for instance in instances)
    entries = [rating.bounded(trials, draft, cell_fleet(problem, draft)) for draft in drafts]
    return rating.best(
        trials, entries, targets, lambda draft: draft.resources(problem.planning.objective), tick
    )
