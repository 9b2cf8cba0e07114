"""Which instances take a request. Called by the router for every request and by the simulator.

Three steps: compute scores (`score`), mask closed slots (+inf, for roles, health and retries
alike), and pick a slot (`RULES`, `find_slot`, `select_pair`). Code is limited to arithmetic,
indexing and argmin, which numba compiles without allocation for the simulator; the router calls the
same functions interpreted, or compiled to C by mypyc in images. Scores are arrays or, on the
router's fast path, its `ScoreColumn`s; `simulator.record_access` gives numba's arrays the same two
methods.

Sources: DistServe section 4.3 (prefill to the shortest queue, decode to the least loaded
instance), Splitwise section IV-A (join the shortest queue, counted in pending tokens), TetriInfer
section 3.3.4 (of two random instances with enough resources, the one where the request meets the
least interference: heavy decodes go by heavy:light).
What is hard: both instances are chosen at once, before the prompt runs, because a prefill instance
would hold KV blocks in vain if the decode side had no room.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from cleave.api.enums import DispatchPolicy
from cleave.policy.queue_model import PrefillQueueModel, predict_end_ms

Scores = NDArray[np.float64]

CellNumbers = NDArray[np.int64]
"""The cell of each slot, below the number of slots."""

NONE = -1
"""No slot."""

TIE_WEIGHT = 1e-9
"""Weight, in tokens, of the number of the last pick: far below one token, only to break ties."""

STALE_PENALTY = 1e9
"""Tokens added to all scores of a stale instance: far above the capacity of any instance."""

BY_WAIT, BY_TOKENS, BY_REQUESTS, BY_TURN = 0, 1, 2, 3
"""What scores count. BY_WAIT: ms until the prompt queue is empty (`PrefillQueueModel`), and
resident tokens; BY_TOKENS: pending and resident tokens; BY_REQUESTS: requests; BY_TURN: the number
of the last pick that chose the instance.
"""

LEAST, RANDOM, OF_TWO, LIGHTEST, FULLEST, CACHED = 0, 1, 2, 3, 4, 5
"""How a slot is picked: least score; at random; the lesser of two at random; the lighter of two at
random (`sample_least_heavy`); the fullest that keeps its targets (`best_fit`); least cost of
waiting and of computing what is not cached (`prompt_cost`), LEAST where prompts do not repeat.
RANDOM and OF_TWO equal the number of slots drawn.
"""

TO_PREFILL, TO_DECODE, TO_WHOLE = 0, 1, 2
"""What a slot is picked for: the prompt alone, decoding alone, or both."""


class Rule(NamedTuple):
    """What one policy compares (`counts`) and how it picks."""

    counts: int
    prefill: int
    """How to pick the prefill instance of a split request."""
    decode: int
    """Picks the decode instance, and one for both phases unless another caches the prompt."""
    keeps_adapters: bool = False
    """Whether requests of one adapter may stay together; it would distort the other rules."""
    prefers_own: bool = False
    """Whether routers that share a fleet prefer their own part of it (`prefer_own`)."""


RULES = {
    DispatchPolicy.SHORTEST_WAIT: Rule(BY_WAIT, LEAST, LEAST, True, True),
    DispatchPolicy.PENDING_TOKENS: Rule(BY_TOKENS, LEAST, LEAST, True, True),
    DispatchPolicy.ROUND_ROBIN: Rule(BY_TURN, LEAST, LEAST),
    DispatchPolicy.RANDOM: Rule(BY_TOKENS, RANDOM, RANDOM),
    DispatchPolicy.LEAST_REQUESTS: Rule(BY_REQUESTS, LEAST, LEAST),
    DispatchPolicy.POWER_OF_TWO: Rule(BY_TOKENS, OF_TWO, OF_TWO, True),
    DispatchPolicy.LEAST_HEAVY: Rule(BY_TOKENS, LEAST, LIGHTEST),
    DispatchPolicy.BEST_FIT: Rule(BY_TOKENS, LEAST, FULLEST),
    DispatchPolicy.PREFIX_AWARE: Rule(BY_WAIT, CACHED, LEAST, True, True),
}

HEAVY_OUTPUT_TOKENS = 128
"""Longer outputs are heavy decodes, others light (TetriInfer, section 5.1)."""

RESIDENT_WEIGHT = 0.1
"""Weight of a resident token of a decode instance relative to a waiting prompt token, to compare
cells and revisions.

A prompt token is computed once; a resident token is read in each decode iteration, some hundred
times at a thousandth of the work. So the empty decode side of a new revision attracts requests, but
not so many that its prompts queue.
"""

MIN_TOKEN_MS = 1e-6
"""Least time of a prompt token in `compute_headroom`."""

MAX_KV_WEIGHT = 100.0
"""Keeps resident tokens below STALE_PENALTY, whatever KV another instance reports."""

_MAX_DRAWS = 64
"""Attempts to draw an open instance before falling back to the least score of all."""

Request = TypeVar("Request")
Finder = Callable[[int, Request, int], int]
"""(purpose, request, prefill slot for TO_DECODE) -> slot; NONE: all are closed. Callers implement
it with `find_slot` and rules of their own."""
CachedCounter = Callable[[Request, int], float]
"""(request, slot) -> tokens of its prompt that the slot has cached."""


class ScoreColumn:
    """Scores by slot, +inf: closed. A base class: compiled protocols take 3 times as long."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size
        """Slots; 0: all are closed."""

    def get_score(self, slot: int) -> float:
        """One score."""
        raise NotImplementedError

    def find_least(self) -> int:
        """Slot with the lowest score; NONE when all are closed."""
        raise NotImplementedError


def is_by_score(rule: Rule) -> bool:
    """Whether the rule picks by the least score alone, but for prompts that are cached."""
    return rule.prefill in (LEAST, CACHED) and rule.decode == LEAST


def score(
    counts: int,
    prompt: float,
    prompts: float,
    resident: float,
    requests: float,
    last_pick: float,
    queue: PrefillQueueModel,
    penalty: float,
    prefills: bool,
) -> tuple[float, float]:
    """(score for TO_PREFILL, score for TO_DECODE and TO_WHOLE) of an instance.

    `prompt`: tokens of its `prompts` waiting prompts; `resident`: tokens that hold blocks, times
    `compute_kv_weight`;
    `requests`: number of its requests; `last_pick`: number of the last pick that chose it;
    `penalty`: STALE_PENALTY if it is stale, else 0; `prefills`: it may compute prompts.
    """
    tie = last_pick * TIE_WEIGHT
    if counts == BY_TURN:
        return penalty + last_pick, penalty + last_pick
    if counts == BY_REQUESTS:
        total = requests + penalty + tie
        return total, total
    first = prompt + penalty + tie
    total = first + resident
    if counts == BY_WAIT and prefills:
        # STALE_PENALTY squared exceeds any clock time, too.
        first = penalty * penalty + predict_end_ms(
            prompt, prompts, queue.head_started_ms, queue.prompt_ms, queue.upper_token_ms, tie
        )
    return first, total


def compute_kv_weight(tokens: float, most: float) -> float:
    """How much a resident token counts in an instance with room for `tokens` of KV; 1 in the one
    that has the `most` of all that are there to decode.

    Where instances differ, as a prefill instance of one GPU that decodes beside those of two,
    equal tokens would leave the large ones half empty while requests wait at the small ones.
    """
    return min(max(most / max(tokens, 1.0), 1.0), MAX_KV_WEIGHT)


def find_least(scores: Scores) -> int:
    """Slot with the lowest score; NONE when all are closed or there are none."""
    if scores.size == 0:
        return NONE
    slot = int(scores.argmin())
    return NONE if float(scores[slot]) == math.inf else slot


def prefer_own(scores: Scores, is_remote: NDArray[np.bool_], margin: float, now: float) -> int:
    """The least of a router's own instances, unless a remote one is less by more than `margin`.

    Routers learn of each other's requests only from periodic load reports, so all would choose the
    same instances. Therefore each owns a part of the fleet and knows the load that it puts on it at
    once. `is_remote`: by slot, whether another router owns it. Scores are at least `now`, or those
    of idle instances.
    """
    local = find_least(np.where(is_remote, np.inf, scores))
    remote = find_least(np.where(is_remote, scores, np.inf))
    if local == NONE or remote == NONE:
        return local if remote == NONE else remote
    return remote if prefers_remote(scores[local], scores[remote], margin, now) else local


def prefers_remote(local: float, remote: float, margin: float, now: float) -> bool:
    """Whether a router leaves its own instances: by the least score of these and of others."""
    return max(remote - now, 0.0) + margin < local - now


def draw(seed: int, count: int) -> tuple[int, int]:
    """(next seed, a number below `count`): Park and Miller's generator; seeds are above 0."""
    seed = seed * 48271 % 2147483647
    return seed, seed * count // 2147483647


def sample_least(scores: Scores, size: int, seed: int) -> tuple[int, int]:
    """(slot, next seed): the least of `size` open slots drawn at random.

    `size` 1 is random dispatch, 2 the power of two choices. If no open and fresh slot is drawn, it
    is the least of all `scores` and the seed does not change.
    """
    best = NONE
    found = 0
    following = seed
    if scores.size > 0:
        for _ in range(_MAX_DRAWS):
            following, slot = draw(following, scores.size)
            if scores[slot] < STALE_PENALTY and slot != best:
                found += 1
                if best == NONE or scores[slot] < scores[best]:
                    best = slot
                if found == size:
                    break
    return (best, following) if best != NONE else (find_least(scores), seed)


def sample_least_heavy(
    scores: Scores,
    room: Scores,
    heaviness: Scores,
    need: float,
    output_tokens: float,
    seed: int,
) -> tuple[int, int]:
    """(slot, next seed): of two random slots with room, the better one for this request.

    A heavy decode goes to the lower heavy:light ratio, which spreads heavy decodes; a light one to
    the lower score. If light ones followed the ratio, each would lower the ratio of the slot that
    it joins and so attract the next request there.

    Arrays of equal length: `room`: unclaimed tokens; `heaviness`: from `compute_heavy_ratio`.
    `need`: tokens that the request will hold at its end, `output_tokens` of them generated.
    `scores` break ties. If no slot with room is drawn, it is the least of all `scores` and the seed
    does not change.
    """
    best = NONE
    found = 0
    following = seed
    if scores.size > 0:
        for _ in range(_MAX_DRAWS):
            following, slot = draw(following, scores.size)
            if scores[slot] < STALE_PENALTY and slot != best and room[slot] >= need:
                found += 1
                is_better = scores[slot] < scores[best]
                if output_tokens > HEAVY_OUTPUT_TOKENS and heaviness[slot] != heaviness[best]:
                    is_better = heaviness[slot] < heaviness[best]
                if best == NONE or is_better:
                    best = slot
                if found == 2:
                    break
    return (best, following) if best != NONE else (find_least(scores), seed)


def compute_heavy_ratio(heavy: float, light: float) -> float:
    """Ratio of heavy to light decodes of an instance; one light decode is added so it is finite."""
    return heavy / (light + 1.0)


def find_slot(
    pick: int,
    scores: Scores,
    room: Scores,
    heaviness: Scores,
    need: float,
    output_tokens: float,
    seed: int,
) -> tuple[int, int]:
    """(slot, next seed) by `pick`: LEAST, RANDOM, OF_TWO or LIGHTEST; any other counts as LEAST."""
    if pick == LIGHTEST:
        return sample_least_heavy(scores, room, heaviness, need, output_tokens, seed)
    if pick in (RANDOM, OF_TWO):
        return sample_least(scores, pick, seed)
    return find_least(scores), seed


def select_pair(
    finder: Finder[Request],
    counter: CachedCounter[Request],
    request: Request,
    decode: ScoreColumn,
    pending_prompt: ScoreColumn,
    headroom: ScoreColumn,
) -> tuple[int, int]:
    """(prefill slot, decode slot) of a request that may be split; (NONE, slot): not split.

    `decode`: scores of all slots that decode; `pending_prompt`: prompt tokens waiting in all slots;
    `headroom`: from `compute_headroom`, of prefill slots.
    """
    first = find_for(finder, TO_PREFILL, request, NONE)
    second = find_for(finder, TO_DECODE, request, first) if first != NONE else NONE
    whole = find_for(finder, TO_WHOLE, request, NONE)
    cached, cached_whole = 0.0, 0.0
    if second != NONE and whole != NONE:
        cached = count_cached_for(counter, request, first)
        cached_whole = count_cached_for(counter, request, whole)
    return settle(first, second, whole, decode, pending_prompt, headroom, cached, cached_whole)


def find_for(finder: Finder[Request], purpose: int, request: Request, first: int) -> int:
    """The caller's slot for a purpose. The simulator replaces this function (`simulator.run`),
    because numba cannot cache compiled code that holds functions as values."""
    return finder(purpose, request, first)


def count_cached_for(counter: CachedCounter[Request], request: Request, slot: int) -> float:
    """The caller's count for a slot; replaced as `find_for` is."""
    return counter(request, slot)


def choose_least_pair(
    prefill: ScoreColumn,
    decode: ScoreColumn,
    mixed: ScoreColumn,
    pending_prompt: ScoreColumn,
    headroom: ScoreColumn,
) -> tuple[int, int]:
    """`select_pair` for rules that pick by the least score alone: the path of most requests.

    `prefill`: scores of prefill instances, `decode`: of all that decode, `mixed`: of mixed
    instances for both phases.
    """
    first = prefill.find_least()
    second = decode.find_least() if first != NONE else NONE
    whole = mixed.find_least() if mixed.size else NONE
    return settle(first, second, whole, decode, pending_prompt, headroom, 0.0, 0.0)


def settle(
    first: int,
    second: int,
    mixed: int,
    decode: ScoreColumn,
    pending_prompt: ScoreColumn,
    headroom: ScoreColumn,
    cached: float,
    cached_mixed: float,
) -> tuple[int, int]:
    """(`first`, `second`) for a split, or (NONE, `mixed`); slots may be NONE. `cached`,
    `cached_mixed`: tokens of the prompt that `first` and `mixed` have cached."""
    if first == NONE or second == NONE or mixed == NONE:
        return (first, second) if second != NONE else (NONE, mixed)
    # Each has to compute what waits there and the rest of the prompt.
    queue = pending_prompt.get_score(first) - cached
    queue_mixed = pending_prompt.get_score(mixed) - cached_mixed
    if prefers_mixed(queue, decode.get_score(second), queue_mixed, headroom.get_score(first)):
        return NONE, mixed
    return first, second


def compute_headroom(wait_ms: float, mean_token_ms: float) -> float:
    """Prompt tokens that may wait more at a prefill instance than at a mixed one.

    `wait_ms`: the time for them; `mean_token_ms`: the prefill instance's time for a prompt token
    (`queue_model.compute_mean_token_ms`, as the flips that `wait_ms` comes from measure waits). A
    prompt on a mixed instance delays all requests that decode there, whereas waiting costs nothing
    while the prompt still meets its target (Splitwise, section IV-A: the own pool comes first).
    """
    return wait_ms / max(mean_token_ms, MIN_TOKEN_MS)


def computes_short(tokens: int, pending: float, queue: float, limit: int) -> bool:
    """Whether a decode instance computes a prompt itself, of which `tokens` are not cached there.

    True if these and the instance's `pending` prompt tokens stay within the `limit` from
    `short_prompts`, and the prefill instance has more waiting tokens (`queue`, +inf without one)
    than this prompt.
    """
    return tokens + pending <= limit and queue >= tokens


def measure_backlog(pending: float, resident: float, last_pick: float) -> float:
    """Work before a request in both phases, in prompt tokens, to compare revisions.

    `pending`: waiting prompt tokens of the prefill slot, `resident`: tokens of the decode slot;
    `last_pick` breaks ties.
    """
    return pending + RESIDENT_WEIGHT * resident + last_pick * TIE_WEIGHT


def prefers_mixed(queue: float, decode: float, queue_mixed: float, headroom: float) -> bool:
    """Whether a mixed instance serves a request instead of a split.

    `queue`, `queue_mixed`: waiting prompt tokens of the prefill and of the mixed instance, less
    those of this prompt that it has cached;
    `decode`: score of the decode instance; each includes STALE_PENALTY if the instance is stale;
    `headroom`: of the prefill instance. The mixed instance is taken if its prompt queue is shorter
    by more than `headroom`; if equal, the split is taken because the placement was planned for it.
    The mixed instance is also taken if an instance of the split is stale and the mixed one is not.
    """
    if queue_mixed < queue - 1.0 - headroom or queue_mixed < STALE_PENALTY <= decode:
        return True
    # Cached tokens are less than half of the penalty, headroom may be more than all of it.
    return queue_mixed < STALE_PENALTY / 2 <= queue


def add_cell_costs(
    prefill: Scores, decode: Scores, cells: CellNumbers, weight: float, crossing: float
) -> Scores:
    """`prefill` scores plus the cost of decoding in the same cell, so that handoffs stay there.

    The cost is `weight` times the score of the cell's least decode instance; if handoffs must leave
    the cell (`restrict_to_cell`), `weight` times the least of all plus `crossing`.
    """
    least = np.full(cells.size, np.inf)
    np.minimum.at(least, cells, decode)
    of_all = least.min()
    leaves = ~(least < _compute_score_limit(of_all))
    total: Scores = prefill + np.where(leaves, weight * of_all + crossing, weight * least)[cells]
    return total


def restrict_to_cell(decode: Scores, cells: CellNumbers, slot: int) -> Scores:
    """`decode` scores for handoffs of the prefill instance at `slot`: closed outside its cell.
    Unchanged if the cell's slots are all closed, or all stale while others are not."""
    own: Scores = np.where(cells == cells[slot], decode, np.inf)
    return own if own.min() < _compute_score_limit(decode.min()) else decode


def _compute_score_limit(least: float) -> float:
    """Upper bound of acceptable scores, given the least of all."""
    return STALE_PENALTY if least < STALE_PENALTY else math.inf


def close_slots(scores: Scores, slots: list[int] | NDArray[np.bool_]) -> Scores:
    """A copy of `scores` in which `slots`, their numbers or a mask, are closed, too."""
    masked = scores.copy()
    if masked.size > 0:
        masked[slots] = np.inf
    return masked
