"""Whether the nodes have room for a placement: tensor parallel groups never cross nodes, and the
data-parallel ranks of an instance take as few nodes as possible.

Called by the search for every placement that it considers. First fit, largest first, over counts of
equal nodes.
"""

from collections import Counter
from collections.abc import Mapping

from cleave.planner.problem import Problem, Supply
from cleave.planner.search.candidate_placement import CandidatePlacement


def has_room(problem: Problem, placement: CandidatePlacement) -> bool:
    """Whether the nodes have room for all cells."""
    if placement.gpus > problem.max_gpus:
        return False
    return all(
        sum(size * count for size, count in pieces.items()) <= supply.max_gpus
        and is_packable(pieces, {supply.gpus_per_node: supply.num_nodes})
        for supply, pieces in _list_pieces(placement).items()
    )


def count_copies(problem: Problem, placement: CandidatePlacement, limit: int = 1 << 20) -> int:
    """How many cells like this one the nodes have room for, at most `limit`."""
    low, high = 0, min(limit, problem.max_gpus // max(placement.with_copies(1).gpus, 1)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        is_packed = has_room(problem, placement.with_copies(middle))
        low, high = (middle, high) if is_packed else (low, middle)
    return low


def is_packable(pieces: Counter[int], nodes: Mapping[int, int]) -> bool:
    """Whether all groups fit. `pieces`: GPUs that must share a node -> number of such groups;
    `nodes`: GPUs of a node -> number of such nodes."""
    free = Counter(nodes)
    return all(_take_room(size, pieces[size], free) for size in sorted(pieces, reverse=True))


def _list_pieces(placement: CandidatePlacement) -> dict[Supply, Counter[int]]:
    """Per supply: GPUs that must share a node -> number of such groups."""
    pieces: dict[Supply, Counter[int]] = {}
    if placement.is_in_node:
        first = placement.groups[0].instance.candidate
        gpus = sum(g.replicas * g.instance.candidate.parallelism.tensor for g in placement.groups)
        return {first.supply: Counter({gpus: first.parallelism.pipeline * placement.copies})}
    for group in placement.groups:
        candidate = group.instance.candidate
        size, number = candidate.parallelism, group.replicas * placement.copies
        own = pieces.setdefault(candidate.supply, Counter())
        if size.data > 1:
            piece = min(size.gpus, candidate.supply.gpus_per_node)
            own[piece] += number * size.gpus // piece
        else:
            own[size.tensor] += number * size.pipeline
    return pieces


def _take_room(size: int, count: int, free: Counter[int]) -> bool:
    """Take room for `count` groups of `size` GPUs out of `free` (free GPUs of a node -> nodes)."""
    for room in sorted(room for room, nodes in free.items() if room >= size and nodes):
        per_node = room // size
        used = min(free[room], -(-count // per_node))
        last = count - (used - 1) * per_node if count < used * per_node else per_node
        free[room] -= used
        free[room - size * per_node] += used - 1
        free[room - size * last] += 1
        count -= (used - 1) * per_node + last
        if count == 0:
            return True
    return count == 0
