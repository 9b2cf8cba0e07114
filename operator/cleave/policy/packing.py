"""Best fit: each request goes to the fullest instance that satisfies all constraints (Aladdin).

Called by the router and the simulator for the policy BestFit. Amounts are tokens and milliseconds.
All functions but the last work on the numbers of one instance and on arrays over all instances:
compiled loops call them with numbers, the router with arrays. What is hard: constraint (e) bounds
the KV at every moment until the last request has ended, which depends on the progress of each
request; so it is checked last, for few instances.

Source: Aladdin, section 4.2 (constraints (a) to (e), Algorithm 1) and Eq. 2 to 4. (a), each request
at one instance, holds by construction.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cleave.perf.aladdin import Coefficients

Amount = TypeVar("Amount", float, NDArray[np.float64])

GAMMA = 0.5
"""Share of an output that counts as context: 0 its first token only, 1 all of it."""
THETA = 0.9
"""Share of a limit that is used; the rest is a reserve for wrong predictions."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The parameters of the constraints."""

    coefficients: Coefficients
    ttft_ms: float
    """Limit of the time to compute all prompts that wait at an instance."""
    tpot_ms: float
    """Limit of a decode iteration."""
    gamma: float = GAMMA
    theta: float = THETA


def weigh_context(prompt_tokens: float, output_tokens: float, gamma: float) -> float:
    """Tokens that a request with these (predicted) lengths adds to an instance's context."""
    return prompt_tokens + gamma * output_tokens


def find_spare_context(
    batch: Amount,
    context: Amount,
    k2: float,
    c2: float,
    c3: float,
    tpot_ms: float,
    theta: float,
) -> Amount:
    """(b) Context that one more request may add to a `batch` with `context` tokens (Eq. 4)."""
    return theta * (tpot_ms - c3 - c2 * (batch + 1)) / k2 - context


def find_spare_prompt(pending: Amount, k1: float, c1: float, limit_ms: float) -> Amount:
    """(c), (d) Prompt tokens that may join `pending` ones so that all take `limit_ms` (Eq. 2).

    The limit is the TTFT target for (c), and the result of `find_saved_ms` for (d).
    """
    return (limit_ms - c1) / k1 - pending


def find_saved_ms(tokens: float, decoding_ms: float, tpot_ms: float, theta: float) -> float:
    """(d) ms that a request with `tokens` after `decoding_ms` can lose without missing its TPOT."""
    return theta * (tpot_ms * tokens - decoding_ms)


def find_norm(batch: Amount, context: Amount, k2: float, c2: float) -> Amount:
    """capacity_norm: how full an instance is, the L2 norm of its batch and its context.

    Both are weighted by the ms that they add to an iteration, to make their units comparable.
    """
    norm: Amount = ((c2 * batch) ** 2 + (k2 * context) ** 2) ** 0.5
    return norm


def find_peak_after(used: NDArray[np.float64], remaining: NDArray[np.float64]) -> float:
    """(e) Peak of the sum of KV tokens of requests with `used` now and `remaining` still to come.

    The same as `admission.find_peak`, vectorised.
    """
    order = np.argsort(-remaining)
    count = np.arange(1, len(remaining) + 1)
    return float((np.cumsum(used[order]) + count * remaining[order]).max())
