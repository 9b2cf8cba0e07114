"""Best fit: each request to the fullest instance that still keeps every promise (Aladdin).

Called by the router and the simulator for the policy BestFit. Amounts are tokens and milliseconds.
All but the last function is arithmetic that holds for one instance's numbers and, as it stands, for
arrays over all instances: compiled loops call it with numbers, the router with arrays. What is
hard: constraint (e) bounds the KV at every moment until the last request has ended, which depends
on how far each has come; so it is checked last, for few instances.

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
"""How much of an output counts as context: between its first token (0) and its last (1)."""
THETA = 0.9
"""Share of a limit that is used: room for wrong predictions."""


@dataclass(frozen=True, slots=True)
class Packing:
    """What the constraints are made of."""

    coefficients: Coefficients
    ttft_ms: float
    """The prompts that wait at an instance take no longer together."""
    tpot_ms: float
    """A decode pass takes no longer."""
    gamma: float = GAMMA
    theta: float = THETA


def weigh_context(prompt_tokens: float, output_tokens: float, gamma: float) -> float:
    """What a request of these (predicted) lengths adds to an instance's context, in tokens."""
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
    """(b) Context that one more request may bring to `batch` others that have `context` (Eq. 4)."""
    return theta * (tpot_ms - c3 - c2 * (batch + 1)) / k2 - context


def find_spare_prompt(pending: Amount, k1: float, c1: float, limit_ms: float) -> Amount:
    """(c), (d) Prompt tokens that may join `pending` ones so that all take `limit_ms` (Eq. 2).

    The limit is the TTFT target for (c), and what the running requests can spare for (d).
    """
    return (limit_ms - c1) / k1 - pending


def find_saved_ms(tokens: float, decoding_ms: float, tpot_ms: float, theta: float) -> float:
    """(d) What a request can spare that made `tokens` in `decoding_ms` before its TPOT suffers."""
    return theta * (tpot_ms * tokens - decoding_ms)


def find_norm(batch: Amount, context: Amount, k2: float, c2: float) -> Amount:
    """capacity_norm: how full an instance is, the L2 norm of its batch and its context.

    Both count by what they add to a pass, in ms, lest the larger unit decides alone.
    """
    norm: Amount = ((c2 * batch) ** 2 + (k2 * context) ** 2) ** 0.5
    return norm


def find_peak_after(held: NDArray[np.float64], left: NDArray[np.float64]) -> float:
    """(e) The most KV that requests holding `held` with `left` to come will ever hold together.

    What `admission.find_peak` finds one by one, for whole arrays.
    """
    order = np.argsort(-left)
    count = np.arange(1, len(left) + 1)
    return float((np.cumsum(held[order]) + count * left[order]).max())
