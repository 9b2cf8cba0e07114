"""The best plan whose instances serve both phases: what disaggregation has to beat.

Vidur's search (section 6 and 7.3): parallelism, batching policy, batch size and tokens per pass,
coarse to fine. Also what it costs to serve one workload with the best configuration of another
(Vidur, fig. 1b).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from cleave.api.role import Role
from cleave.planner import goodput, rating
from cleave.planner.candidates import Candidate, Instance, mixed_instance
from cleave.planner.draft import Draft, Group, cell_fleet, weight_in
from cleave.planner.problem import Problem
from cleave.planner.rating import Entry, Rated
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

    def best(instances: Iterable[Instance]) -> Rated | None:
        entries = _entries(problem, trials, instances)
        return rating.best(trials, entries, targets, weight_in(problem), tick)

    return _coarse_to_fine(problem, found, best)


def fewest(
    problem: Problem,
    trials: Trials,
    found: Sequence[Candidate],
    targets: Targets,
    tick: Callable[[], None] = lambda: None,
) -> Rated | None:
    """Instead: the instance whose replicas for the asked rate take least."""

    def least(instances: Iterable[Instance]) -> Rated | None:
        entries = _entries(problem, trials, instances)
        return rating.fewest(trials, entries, targets, weight_in(problem), problem.rate, tick)

    return _coarse_to_fine(problem, found, least)


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


def _fine(coarse: Instance) -> Iterator[Instance]:
    stages = coarse.candidate.parallelism.pipeline
    yield coarse
    for seqs in NUM_SEQS:
        for tokens in NUM_BATCHED_TOKENS:
            tuned = coarse.limited(seqs * stages, tokens)
            if tuned != coarse:
                yield tuned


def _coarse_to_fine(
    problem: Problem,
    found: Sequence[Candidate],
    choose: Callable[[Iterable[Instance]], Rated | None],
) -> Rated | None:
    """Parallelism first; then the limits of a pass for it, the first choice among them."""
    coarse = choose(_coarse(problem, found))
    if coarse is None:
        return None
    return choose(_fine(coarse.draft.groups[0].instance)) or coarse


def _entries(problem: Problem, trials: Trials, instances: Iterable[Instance]) -> list[Entry]:
    drafts = (Draft((Group(Role.MIXED, instance, 1),)) for instance in instances)
    return [rating.bounded(trials, draft, cell_fleet(problem, draft)) for draft in drafts]
