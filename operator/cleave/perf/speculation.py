"""Speculative decoding in a latency model: the mean time of a token where drafts are accepted.

Called for the planner's problem. vLLM drafts k tokens for each request, verifies them in one
iteration of k + 1 rows a request, and emits the first ones that the model agrees with and one
more: the acceptance length, from 1 to k + 1 (Leviathan et al., "Fast Inference from Transformers
via Speculative Decoding", 2023, section 3.1). What is hard: the simulator, the search's bounds and
the emulated engines count one token a decode iteration. An iteration that emits a tokens therefore
becomes a iterations of an a-th of its time: rates and mean TPOT are those of the engine, single
gaps between tokens are evened out, and chunks of prompts find a times as many iterations (each
costs what it costs). Hops between pipeline stages count once a token.
"""

from dataclasses import dataclass, replace

from cleave.perf.estimate import Estimate, Estimator
from cleave.perf.timing import EngineTiming, interpolate_table


@dataclass(frozen=True, slots=True)
class Speculation:
    """What an engine drafts, and how much of it is accepted."""

    tokens: int
    """Tokens that are drafted for one iteration; k above."""
    acceptance_length: float
    """Mean tokens of a request that an iteration emits, from 1 to `tokens` + 1."""
    draft_share: float
    """Time of drafting one token as a share of a decode iteration of as many requests."""
    context_share: float
    """The same of its attention to the contexts."""

    def __str__(self) -> str:
        return f"{self.tokens} drafted tokens, {self.acceptance_length:g} emitted an iteration"


class SpeculatingEstimator:
    """Implements `cleave.perf.estimate.Estimator`: another estimator's engines, with drafts."""

    def __init__(self, estimator: Estimator, speculation: Speculation) -> None:
        self._estimator = estimator
        self._speculation = speculation

    def estimate(
        self, gpu: str, tensor: int, pipeline: int, data: int = 1, *, expert: bool = False
    ) -> Estimate | None:
        """The other estimator's result with the mean times of tokens; its source says so. The error
        of the drafts' part is not known."""
        base = self._estimator.estimate(gpu, tensor, pipeline, data, expert=expert)
        if base is None:
            return None
        source = f"{base.confidence.source}; {self._speculation}"
        trust = replace(base.confidence, source=source, error=None, serving=None)
        return replace(
            base, timing=apply_speculation(base.timing, self._speculation), confidence=trust
        )

    def explain_unsupported(
        self, gpu: str, tensor: int, pipeline: int, data: int = 1, *, expert: bool = False
    ) -> str | None:
        """The other estimator's reason."""
        return self._estimator.explain_unsupported(gpu, tensor, pipeline, data, expert=expert)


def apply_speculation(timing: EngineTiming, speculation: Speculation) -> EngineTiming:
    """`timing` with decode iterations that emit one token and take the mean time of it."""
    rows, length = speculation.tokens + 1, speculation.acceptance_length
    drafts = speculation.tokens * speculation.draft_share
    attention = 1 + speculation.tokens * speculation.context_share
    return replace(
        timing,
        decode_ms=tuple(
            (interpolate_table(1.0, timing.decode_ms, batch * rows) + drafts * alone_ms) / length
            for batch, alone_ms in enumerate(timing.decode_ms)
        ),
        # The rows of a request read its context once, by the kernel that serves prompts.
        decode_context_ms=tuple(
            ms * attention / length for ms in timing.mixed_context_ms or timing.decode_context_ms
        ),
        mixed_context_ms=(),
    )
