"""Best fit: each request goes to the fullest instance that satisfies all constraints (Aladdin).

Called by the router and the simulator for the policy BestFit. Amounts are tokens and milliseconds.
Functions of an `Amount` take numbers of one instance (compiled loops) or arrays over all instances
(the router). `fit` holds the coefficients and `model` the limits; the simulator passes its state
for both, which has fields of the same names. What is hard: constraint (e) bounds the KV at every
moment until the last request has ended, which depends on the progress of each; so it is checked
last, for few instances. (b) is checked again there: requests that outrun their prediction are a
large part of those in flight, and an instance that counts them by their prediction is overfilled.
On mixed instances prompts slow the decoding requests down: (d) sees it only if the time of prompts
does not count as their progress (`exclude_prompts`).

Source: Aladdin, section 4.2 (constraints (a) to (e), Algorithm 1) and Eq. 2 to 4. (a), each request
runs on one instance, holds by construction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cleave.perf.published.aladdin import Coefficients
from cleave.policy.admission import find_sorted_peak
from cleave.policy.dispatch import NONE, STALE_PENALTY, Scores

Amount = TypeVar("Amount", float, NDArray[np.float64])
Request = TypeVar("Request")
Checker = Callable[[int, Request, bool], bool]
"""(slot, request, whether the slot also computes its prompt) -> `keeps_running` of the slot."""

GAMMA = 0.5
"""Share of an output that counts as context: 0: only its first token, 1: all of it."""
THETA = 0.9
"""Share of a limit that is used; the rest is a reserve for wrong predictions."""


@dataclass(frozen=True, slots=True)
class BestFitModel:
    """The parameters of the constraints."""

    coefficients: Coefficients
    ttft_ms: float
    """Limit of the time to compute all waiting prompts of an instance."""
    tpot_ms: float
    """Limit of a decode iteration."""
    gamma: float = GAMMA
    theta: float = THETA


def compute_context_weight(prompt_tokens: float, output_tokens: float, gamma: float) -> float:
    """Tokens that a request with these (predicted) lengths adds to an instance's context."""
    return prompt_tokens + gamma * output_tokens


def count_context(weight: float, held: float) -> float:
    """Context that a running request counts with: its weight (`compute_context_weight`), or the
    tokens that it `held` so far, if it has outrun its prediction."""
    return max(weight, held)


def exclude_prompts(decoding_ms: float, prompt_tokens: float, k1: float) -> float:
    """Part of `decoding_ms` that a request spent in decode iterations: the rest went to the
    `prompt_tokens` that its instance has computed since it began to decode. At least 0: prompts of
    the iteration of its own prompt count as well."""
    return max(decoding_ms - k1 * prompt_tokens, 0.0)


def compute_spare_context(
    batch: Amount, context: Amount, k2: float, c2: float, c3: float, tpot_ms: float, theta: float
) -> Amount:
    """(b) Context that one more request may add to a `batch` with `context` tokens (Eq. 4)."""
    return theta * (tpot_ms - c3 - c2 * (batch + 1)) / k2 - context


def compute_spare_prompt(pending: Amount, k1: float, c1: float, limit_ms: float) -> Amount:
    """(c), (d) Prompt tokens that may join `pending` ones so that all take `limit_ms` (Eq. 2). The
    limit is the TTFT target for (c), and the result of `compute_saved_ms` for (d)."""
    return (limit_ms - c1) / k1 - pending


def compute_saved_ms(tokens: float, decoding_ms: float, tpot_ms: float, theta: float) -> float:
    """(d) ms that a request with `tokens` after `decoding_ms` may lose without missing its TPOT."""
    return theta * (tpot_ms * tokens - decoding_ms)


def compute_capacity_norm(batch: Amount, context: Amount, k2: float, c2: float) -> Amount:
    """capacity_norm: how full an instance is, as the L2 norm of its batch and its context. Both are
    weighted by the ms that they add to an iteration, so that their units are comparable."""
    norm: Amount = ((c2 * batch) ** 2 + (k2 * context) ** 2) ** 0.5
    return norm


def measure_fullness(
    scores: Amount,
    batch: Amount,
    context: Amount,
    pending: Amount,
    prompt_tokens: float,
    need: float,
    prefills: bool,
    fit: Coefficients,
    model: BestFitModel,
) -> Amount:
    """How full an instance is; below 0 if (b) or (c) forbid it to take the request.

    `pending`: waiting prompt tokens of the instance; `need`: context that the request adds;
    `prefills`: whether the instance also computes its prompt.
    """
    room = compute_spare_context(batch, context, fit.k2, fit.c2, fit.c3, model.tpot_ms, model.theta)
    fits = (scores < STALE_PENALTY) & (room >= need)
    if prefills:
        fits = fits & (
            compute_spare_prompt(pending, fit.k1, fit.c1, model.ttft_ms) >= prompt_tokens
        )
    fullness: Amount = (compute_capacity_norm(batch, context, fit.k2, fit.c2) + 1.0) * fits - 1.0
    return fullness


def find_best_fit(
    fullness: Scores, checker: Checker[Request], request: Request, prefills: bool
) -> int:
    """Slot of the fullest instance that `keeps_running`; NONE: no instance does.
    `fullness`: from `measure_fullness`; modified."""
    for _ in range(len(fullness)):
        slot = int(fullness.argmax())
        if fullness[slot] < 0.0:
            break
        if check(checker, slot, request, prefills):
            return slot
        fullness[slot] = -1.0
    return NONE


def check(checker: Checker[Request], slot: int, request: Request, prefills: bool) -> bool:
    """The caller's `keeps_running`; the simulator replaces it, see `dispatch.find_for`."""
    return checker(slot, request, prefills)


def keeps_running(
    held: Scores | Sequence[float],
    left: Scores | Sequence[float],
    batch: float,
    context: float,
    need: float,
    saved_ms: float,
    pending: float,
    prompt_tokens: float,
    prefills: bool,
    capacity: float,
    fit: Coefficients,
    model: BestFitModel,
) -> bool:
    """(b), (d) and (e): running requests keep their TPOT, and the KV fits until all have ended.

    `held`, `left`: tokens of each running request and the new one from
    `output_length.guess_progress`, sorted by descending `left`; `batch`, `context`: running
    requests and the sum of their `count_context`; `need`: context that the new one adds;
    `saved_ms`: the minimum of `compute_saved_ms` over running requests; `capacity`: tokens of KV
    that fit.
    """
    room = compute_spare_context(batch, context, fit.k2, fit.c2, fit.c3, model.tpot_ms, model.theta)
    if room < need:
        return False
    if prefills and compute_spare_prompt(pending, fit.k1, fit.c1, saved_ms) < prompt_tokens:
        return False
    return find_sorted_peak(held, left) <= model.theta * capacity
