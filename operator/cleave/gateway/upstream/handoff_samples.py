"""Handoffs of finished requests that wait to be computed again as a whole.

Offered by proxied requests, taken by the witness's auditor. Prompts and outputs stay in memory
until then, so few are kept, and none is ever logged.
"""

import random
from collections import deque
from dataclasses import dataclass

from cleave.gateway.http.completion_request import Fields
from cleave.router.instance import Target

MAX_SAMPLES = 8
"""Samples that wait; a further one replaces the oldest."""


@dataclass(frozen=True, slots=True)
class HandoffSample:
    """A greedy stream that began with a handoff and ended well."""

    model: str
    prefill: Target
    decode: Target
    prompt_ids: bytes
    """As the engine wrote them, with commas between them."""
    prompt_tokens: int
    output_ids: list[int]
    fields: Fields
    """Of the request: those that the output depends on."""


class HandoffSamples:
    """One in so many handoffs, of one gateway process."""

    def __init__(self, share: float) -> None:
        """`share`: of the handoffs offered, 0 to 1."""
        self._interval = round(1 / share) if share > 0 else 0
        # Processes that restart often would otherwise never reach their first one.
        self._count = random.randrange(self._interval) if self._interval else 0
        self._waiting: deque[HandoffSample] = deque(maxlen=MAX_SAMPLES)

    @property
    def is_on(self) -> bool:
        """Whether any handoff is sampled."""
        return self._interval > 0

    def count_handoff(self) -> bool:
        """Count a handoff; whether it is to be sampled."""
        self._count += 1
        return self._count % self._interval == 0

    def add(self, sample: HandoffSample) -> None:
        """Keep a sample until it is taken."""
        self._waiting.append(sample)

    def take(self) -> HandoffSample | None:
        """The oldest sample; None: none waits."""
        return self._waiting.popleft() if self._waiting else None
