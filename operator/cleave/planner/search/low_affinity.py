"""Algorithm 2: prefill and decode instances whose equal pipeline stages share a node.

DistServe, section 4.2, for networks too slow for KV: stages of both phases that hold the same
layers lie in one node, so that KV never leaves it. Its link there is the supply's `node_link`: the
GPUs' own link in the paper, the network between pods. Both phases have the same number of stages;
inside a node, tensor parallel sizes and counts are free.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cleave.api.role import Role
from cleave.planner.problem import Problem
from cleave.planner.search import packing, ranking
from cleave.planner.search.batch_limits import refined
from cleave.planner.search.candidate_placement import Draft, Group, weight_in
from cleave.planner.search.candidates import Candidate, decode_instance, prefill_instance
from cleave.planner.search.ranking import Rated
from cleave.planner.search.trials import Targets, Trials


@dataclass(frozen=True, slots=True)
class Replicas:
    """Most instances of each phase whose stages share a node; one each in the paper's search."""

    prefill: int = 1
    decode: int = 1


ANY = Replicas(prefill=1 << 10, decode=1 << 10)
"""As many as a node has room for."""


def optimise(
    problem: Problem,
    trials: Trials,
    candidates: Sequence[Candidate],
    targets: Targets,
    max_replicas: Replicas = ANY,
    tick: Callable[[], None] = lambda: None,
) -> Rated | None:
    """The intra-node configuration with most goodput per resource; both phases simulated jointly.

    The bound of a pair is that of its slower phase, since every request passes through both.
    """

    def best(placements: list[Draft]) -> Rated | None:
        entries = ranking.entries(problem, trials, placements)
        return ranking.best(trials, entries, targets, weight_in(problem), tick)

    return refined(best(configurations(problem, candidates, max_replicas)), best)


def fewest(
    problem: Problem,
    trials: Trials,
    candidates: Sequence[Candidate],
    targets: Targets,
    tick: Callable[[], None] = lambda: None,
) -> Rated | None:
    """The configuration whose cells for the requested rate need least resources."""

    def least(placements: list[Draft]) -> Rated | None:
        entries = ranking.entries(problem, trials, placements)
        return ranking.fewest(trials, entries, targets, weight_in(problem), problem.rate, tick)

    return refined(least(configurations(problem, candidates, ANY)), least)


def configurations(
    problem: Problem, candidates: Sequence[Candidate], max_replicas: Replicas
) -> list[Draft]:
    """The paper's get_intra_node_configs, for every number of stages."""
    placements = [
        placement
        for prefill in candidates
        for decode in candidates
        if prefill.supply == decode.supply
        and prefill.parallelism.pipeline == decode.parallelism.pipeline
        and problem.can_pair(prefill.parallelism, decode.parallelism)
        for placement in _counts(problem, prefill, decode, max_replicas)
    ]
    return [placement for placement in placements if packing.fits(problem, placement)]


def _counts(
    problem: Problem, prefill: Candidate, decode: Candidate, max_replicas: Replicas
) -> list[Draft]:
    # GPUs for one pipeline stage, limited by the node and by the GPUs that may be used.
    usable = min(problem.max_gpus, prefill.supply.max_gpus) // prefill.parallelism.pipeline
    room = min(prefill.supply.gpus_per_node, usable)
    first, second = prefill.parallelism.tensor, decode.parallelism.tensor
    return [
        Draft(
            (
                Group(Role.PREFILL, prefill_instance(problem, prefill), n),
                Group(Role.DECODE, decode_instance(problem, decode), m),
            ),
            is_in_node=True,
        )
        for n in range(1, min(max_replicas.prefill, (room - second) // first) + 1)
        for m in range(1, min(max_replicas.decode, (room - n * first) // second) + 1)
    ]
