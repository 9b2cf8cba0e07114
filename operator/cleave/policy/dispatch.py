"""Which instances take a request. Called by the router for every request and by the simulator.

Three steps: what is compared (`score`), which slots are open (a closed one scores +inf, so roles,
health and retries are all one thing: masking), and which slot is picked (`RULES`, `find_slot`,
`select_pair`). One function serves three callers. Plain arithmetic, indexing and argmin are the
subset that numba compiles without memory of its own, for the simulator; the router calls the same
functions interpreted, and compiled to C by mypyc in images. Scores come as arrays, or, where the
router must be fast, as its `ScoreColumn`s, whose two methods numba's arrays are given as well
(`simulator.record_access`).

Sources: DistServe section 4.3 (prefill to the shortest queue, decode to the least loaded
instance), Splitwise section IV-A (join the shortest queue, counted in pending tokens), TetriInfer
section 3.3.4 (instances with enough resources, two of them at random, the least heavy:light).
What is hard: both instances are chosen at once, before the prompt runs, because a prefill
instance whose decode side has no room would hold its KV blocks for nothing.
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
"""Weight, in tokens, of one pick's age: far below one token, so that it only breaks ties."""

STALE_PENALTY = 1e9
"""Tokens added to all scores of an instance that is in doubt: far above what any can hold."""

BY_WAIT, BY_TOKENS, BY_REQUESTS, BY_TURN = 0, 1, 2, 3
"""What scores count: ms until a prompt queue is through (`PrefillQueueModel`) and tokens held,
tokens that wait or are held, requests, or the number of the last pick that went to the instance.
"""

LEAST, RANDOM, OF_TWO, LIGHTEST, FULLEST, CACHED = 0, 1, 2, 3, 4, 5
"""How a slot is picked: least score; drawn at random; the lesser of two drawn; the lighter of two
drawn (`sample_least_heavy`); the fullest that keeps its targets (`best_fit`); least score less what
is cached there (`prefix_cache`). RANDOM and OF_TWO are the number of slots drawn.
"""

TO_PREFILL, TO_DECODE, TO_WHOLE = 0, 1, 2
"""What a slot is picked for: the prompt alone, decoding alone, or both."""


class Rule(NamedTuple):
    """What one policy compares and how it picks."""

    counts: int
    prefill: int
    """Picks who computes a prompt that another instance decodes."""
    decode: int
    """Picks who decodes; and who does both, unless the prompt goes where it is cached."""
    keeps_adapters: bool = False
    """Whether requests of one adapter may stay together: other rules look at something that this
    would spoil."""
    prefers_own: bool = False
    """Whether routers that share a fleet prefer their own share of it (`prefer_own`)."""


RULES = {
    DispatchPolicy.SHORTEST_WAIT: Rule(BY_WAIT, LEAST, LEAST, True, True),
    DispatchPolicy.PENDING_TOKENS: Rule(BY_TOKENS, LEAST, LEAST, True, True),
    DispatchPolicy.ROUND_ROBIN: Rule(BY_TURN, LEAST, LEAST),
    DispatchPolicy.RANDOM: Rule(BY_TOKENS, RANDOM, RANDOM),
    DispatchPolicy.LEAST_REQUESTS: Rule(BY_REQUESTS, LEAST, LEAST),
    DispatchPolicy.POWER_OF_TWO: Rule(BY_TOKENS, OF_TWO, OF_TWO, True),
    DispatchPolicy.LEAST_HEAVY: Rule(BY_TOKENS, LEAST, LIGHTEST),
    DispatchPolicy.BEST_FIT: Rule(BY_TOKENS, LEAST, FULLEST),
    DispatchPolicy.PREFIX_AWARE: Rule(BY_TOKENS, CACHED, LEAST, True),
}

HEAVY_OUTPUT_TOKENS = 128
"""Longer outputs are heavy decodes, others light (TetriInfer, section 5.1)."""

RESIDENT_WEIGHT = 0.1
"""What a token in a decode instance weighs beside one that waits for prefill, between cells and
revisions.

The latter is computed; the former is read once for each token that the newcomer puts out, some
hundred times for a thousandth of the work. A new revision's empty decode side thus draws requests,
but not so many that its prompts queue.
"""

_MAX_DRAWS = 64
"""Attempts to draw an open instance before the least of all is taken instead."""

Request = TypeVar("Request")
Finder = Callable[[int, Request, int], int]
"""(purpose, request, prefill slot for TO_DECODE) -> slot by `find_slot` and what else a caller
compares; NONE: all are closed."""


class ScoreColumn:
    """Scores by slot in the caller's own form; +inf where a slot is closed. A base class because
    compiled protocols take three times as long."""

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
    """Whether the rule takes the least score and looks at nothing else."""
    return rule.prefill == LEAST and rule.decode == LEAST


def score(
    counts: int,
    prompt: float,
    prompts: float,
    resident: float,
    requests: float,
    turn: float,
    queue: PrefillQueueModel,
    doubt: float,
    prefills: bool,
) -> tuple[float, float]:
    """(score for a prompt that another instance decodes, score for all else) of an instance.

    `prompt`: tokens of the `prompts` that wait there; `resident`: tokens that hold blocks;
    `requests`: that are there; `turn`: the last pick that went there; `doubt`: STALE_PENALTY when
    it may be gone; `prefills`: whether it may compute prompts for others.
    """
    tie = turn * TIE_WEIGHT
    if counts == BY_TURN:
        return doubt + turn, doubt + turn
    if counts == BY_REQUESTS:
        total = requests + doubt + tie
        return total, total
    first = prompt + doubt + tie
    total = first + resident
    if counts == BY_WAIT and prefills:
        # STALE_PENALTY squared is far above what a clock may show as well.
        first = doubt * doubt + predict_end_ms(
            prompt, prompts, queue.head_started_ms, queue.prompt_ms, queue.upper_token_ms, tie
        )
    return first, total


def find_least(scores: Scores) -> int:
    """Slot with the lowest score; NONE when all are closed or there are none."""
    if scores.size == 0:
        return NONE
    slot = int(scores.argmin())
    return NONE if float(scores[slot]) == math.inf else slot


def prefer_own(scores: Scores, away: NDArray[np.bool_], worth: float, now: float) -> int:
    """The least of one's own instances, unless one that is `away` is less by more than `worth`.

    Where several routers know of each other only what instances report now and then, all would
    choose the same ones; so they share them out, and what one of them sends its own it knows at
    once. Scores are of at least `now`, or of nothing at all.
    """
    near = find_least(np.where(away, np.inf, scores))
    far = find_least(np.where(away, scores, np.inf))
    if near == NONE or far == NONE:
        return near if far == NONE else far
    is_less = max(scores[far] - now, 0.0) + worth < scores[near] - now
    return far if is_less else near


def draw(seed: int, count: int) -> tuple[int, int]:
    """(next seed, a number below `count`): Park and Miller's generator; seeds are above 0."""
    seed = seed * 48271 % 2147483647
    return seed, seed * count // 2147483647


def sample_least(scores: Scores, size: int, seed: int) -> tuple[int, int]:
    """(slot, next seed): the least of `size` open slots drawn at random.

    1 is random dispatch, 2 the power of two choices. When fewer are found, or all that are drawn
    are in doubt, it is the least of all. The seed stays as it is when none was found.
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
    scores: Scores, room: Scores, heaviness: Scores, need: float, seed: int
) -> tuple[int, int]:
    """(slot, next seed): of two drawn from those with room, the one with the least heavy:light.

    All of equal length: `room` in tokens that nobody has claimed, `heaviness` as
    `compute_heavy_ratio` gives it; `need`: tokens that the request will hold at its end. Without
    room anywhere that is found it is the least of all `scores`, which also breaks ties; the seed
    stays as it is then.
    """
    best = NONE
    found = 0
    following = seed
    if scores.size > 0:
        for _ in range(_MAX_DRAWS):
            following, slot = draw(following, scores.size)
            if scores[slot] < STALE_PENALTY and slot != best and room[slot] >= need:
                found += 1
                wins_tie = heaviness[slot] == heaviness[best] and scores[slot] < scores[best]
                if best == NONE or heaviness[slot] < heaviness[best] or wins_tie:
                    best = slot
                if found == 2:
                    break
    return (best, following) if best != NONE else (find_least(scores), seed)


def compute_heavy_ratio(heavy: float, light: float) -> float:
    """Heavy to light decodes of an instance; one light one is added lest the ratio is endless."""
    return heavy / (light + 1.0)


def find_slot(
    pick: int, scores: Scores, room: Scores, heaviness: Scores, need: float, seed: int
) -> tuple[int, int]:
    """(slot, next seed) by the scores alone: LEAST, RANDOM, OF_TWO or LIGHTEST; else LEAST."""
    if pick == LIGHTEST:
        return sample_least_heavy(scores, room, heaviness, need, seed)
    if pick in (RANDOM, OF_TWO):
        return sample_least(scores, pick, seed)
    return find_least(scores), seed


def select_pair(
    finder: Finder[Request], request: Request, decode: ScoreColumn, pending_prompt: ScoreColumn
) -> tuple[int, int]:
    """(prefill slot, decode slot) for a request that may be split; (NONE, slot): both phases there.

    `decode`: scores of all that decode; `pending_prompt`: prompt tokens that wait, of all slots and
    without masks.
    """
    first = find_for(finder, TO_PREFILL, request, NONE)
    second = find_for(finder, TO_DECODE, request, first) if first != NONE else NONE
    whole = find_for(finder, TO_WHOLE, request, NONE)
    return settle(first, second, whole, decode, pending_prompt)


def find_for(finder: Finder[Request], purpose: int, request: Request, first: int) -> int:
    """The caller's slot for a purpose. In the simulator a function of its own stands for this one
    (`run`), because compiled code that holds functions as values cannot be kept on disk."""
    return finder(purpose, request, first)


def choose_least_pair(
    prefill: ScoreColumn, decode: ScoreColumn, mixed: ScoreColumn, pending_prompt: ScoreColumn
) -> tuple[int, int]:
    """What `select_pair` gives where the least score is picked; for most requests that is all.

    `prefill`: scores of prefill instances, `decode`: of all that decode, `mixed`: of mixed
    instances that serve a whole request.
    """
    first = prefill.find_least()
    second = decode.find_least() if first != NONE else NONE
    whole = mixed.find_least() if mixed.size else NONE
    return settle(first, second, whole, decode, pending_prompt)


def settle(
    first: int, second: int, whole: int, decode: ScoreColumn, pending_prompt: ScoreColumn
) -> tuple[int, int]:
    """A split over slots `first` and `second`, or a mixed instance; NONE where there is none."""
    if first == NONE or second == NONE or whole == NONE:
        return (first, second) if second != NONE else (NONE, whole)
    queue, queue_whole = pending_prompt.get_score(first), pending_prompt.get_score(whole)
    if prefers_mixed(queue, decode.get_score(second), queue_whole):
        return NONE, whole
    return first, second


def computes_short(tokens: int, pending: float, queue: float, limit: int) -> bool:
    """Whether a decode instance computes a prompt itself, with `tokens` that are not cached there.

    `pending`: prompt tokens that wait there already; `queue`: at the prefill instance that would
    take it, +inf without one. Together they stay within the `limit` that `short_prompts` found, and
    the prefill instance has more to do than this prompt.
    """
    return tokens + pending <= limit and queue >= tokens


def measure_backlog(pending: float, resident: float, turn: float) -> float:
    """What waits before a request in both phases, in prompt tokens, to compare revisions.

    `pending`: prompt tokens that wait at the prefill slot, `resident`: tokens held at the decode
    slot; ties go by the last `turn`.
    """
    return pending + RESIDENT_WEIGHT * resident + turn * TIE_WEIGHT


def prefers_mixed(queue: float, decode: float, queue_whole: float) -> bool:
    """Whether a mixed instance serves a request rather than a split.

    `queue`, `queue_whole`: prompt tokens that wait at the prefill and at the mixed instance,
    STALE_PENALTY added to what is in doubt; `decode`: score of the decode instance, of which that
    alone is read. A mixed instance is taken when its prompt queue is the shorter one, which saves
    the transfer; when equal, the split is taken because that is what the placement was planned for.
    It is taken as well when a half of the split is in doubt (STALE_PENALTY in its scores) and the
    mixed one is not.
    """
    return queue_whole < queue - 1.0 or queue_whole < STALE_PENALTY <= decode


def add_cell_costs(
    prefill: Scores, decode: Scores, cells: CellNumbers, weight: float, crossing: float
) -> Scores:
    """`prefill` with what a prompt meets in its cell, for hand-offs that had better stay there.

    Added is `weight` of the score of the cell's least decode instance; where hand-offs must leave
    the cell (`restrict_to_cell`), that of the least of all, and `crossing`.
    """
    least = np.full(cells.size, np.inf)
    np.minimum.at(least, cells, decode)
    of_all = least.min()
    leaves = ~(least < _compute_score_limit(of_all))
    ahead = np.where(leaves, weight * of_all + crossing, weight * least)
    total: Scores = prefill + ahead[cells]
    return total


def restrict_to_cell(decode: Scores, cells: CellNumbers, slot: int) -> Scores:
    """`decode` for hand-offs of the prefill instance at `slot`: closed outside its cell.

    Not when the cell's own are all closed, or all in doubt while others are not.
    """
    own: Scores = np.where(cells == cells[slot], decode, np.inf)
    return own if own.min() < _compute_score_limit(decode.min()) else decode


def _compute_score_limit(least: float) -> float:
    """What scores are below if they will do, given the least of all."""
    return STALE_PENALTY if least < STALE_PENALTY else math.inf


def close_slots(scores: Scores, slots: list[int]) -> Scores:
    """A copy of `scores` in which `slots` are closed as well."""
    masked = scores.copy()
    if masked.size > 0:
        masked[slots] = np.inf
    return masked
