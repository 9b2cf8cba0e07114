"""A recorded or randomly drawn sequence of requests: the input of a simulation."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; arrays of equal length."""

    arrival_ms: NDArray[np.float64]
    """Since the start of the trace, never decreasing."""
    prompt_tokens: NDArray[np.int64]
    """At least 1 each."""
    output_tokens: NDArray[np.int64]
    """At least 1 each."""
    predicted_tokens: NDArray[np.int64] | None = None
    """Output tokens that dispatch and admission assume; None: the actual ones."""

    def __len__(self) -> int:
        return len(self.arrival_ms)

    @property
    def rate(self) -> float:
        """Mean arrivals in req/s; 0 when all arrive at once."""
        span_ms = float(self.arrival_ms[-1] - self.arrival_ms[0]) if len(self) > 1 else 0.0
        return (len(self) - 1) / span_ms * 1000 if span_ms else 0.0
