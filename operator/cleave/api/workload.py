"""The traffic that a deployment is planned for."""

from typing import Annotated

from pydantic import Field

from cleave.api.base import ApiModel, ValidationRule

Tokens = Annotated[float, Field(ge=1, le=10_000_000)]


class LengthDistribution(ApiModel):
    """A log-normal distribution of token counts, given by its mean and 90th percentile."""

    mean: Tokens
    """Mean number of tokens."""
    p90: Tokens | None = None
    """90th percentile of the number of tokens; absent: every request has the mean."""

    rules = (
        ValidationRule(
            cel="!has(self.p90) || self.p90 >= self.mean && self.p90 <= self.mean * 2.27",
            is_valid=lambda s: s.p90 is None or s.mean <= s.p90 <= s.mean * 2.27,
            message="no log-normal distribution has this p90: it lies between 1 and 2.27 means; "
            "state a trace for such lengths",
            field="p90",
        ),
    )


class TraceSource(ApiModel):
    """A trace of recorded requests, instead of distributions."""

    path: Annotated[str, Field(min_length=1, max_length=1024)]
    """Path of a CSV or JSONL file on the machine that runs the planner."""


class Reuse(ApiModel):
    """Conversations: prompts that begin like earlier ones, so that engines have cached a part."""

    turns: Annotated[float, Field(ge=1, le=10_000)]
    """Mean number of requests of a conversation. Each prompt begins with the one before it."""
    turn_interval_s: Annotated[float, Field(ge=0, le=86_400)]
    """Mean seconds between two requests of a conversation."""
    new_tokens: Tokens
    """Tokens at the end of a prompt that are new, at least: the last answer and the question."""
    shared_tokens: Annotated[float, Field(ge=0, le=10_000_000)] = 0
    """Tokens with which all prompts begin, such as a system prompt."""


class Workload(ApiModel):
    """Expected requests: distributions or a trace."""

    rate: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """Requests per second to plan for; absent: the rate of the trace."""
    prompt_tokens: LengthDistribution | None = None
    """Distribution of prompt lengths."""
    output_tokens: LengthDistribution | None = None
    """Distribution of output lengths."""
    burstiness: Annotated[float, Field(ge=0, le=20)] | None = None
    """Coefficient of variation of the times between arrivals: 0 is regular, 1 is Poisson (the
    default), above 1 is bursty. Not allowed with a trace without a rate, as it has times."""
    trace: TraceSource | None = None
    """Recorded requests: lengths are taken from it, and arrival times unless a rate is given."""
    reuse: Reuse | None = None
    """Conversations among these requests; absent: no prompt repeats, except in a trace with hashes
    of blocks."""

    rules = (
        ValidationRule(
            cel="has(self.trace) != (has(self.promptTokens) && has(self.outputTokens))",
            is_valid=lambda w: bool(w.trace) != bool(w.prompt_tokens and w.output_tokens),
            message="state either trace, or both promptTokens and outputTokens",
            field="",
        ),
        ValidationRule(
            cel="has(self.trace) || has(self.rate)",
            is_valid=lambda w: w.trace is not None or w.rate is not None,
            message="is needed where no trace states the arrivals",
            field="rate",
        ),
        ValidationRule(
            cel="!has(self.burstiness) || has(self.rate)",
            is_valid=lambda w: w.burstiness is None or w.rate is not None,
            message="has no effect on a trace that is replayed; state a rate too, or remove it",
            field="burstiness",
        ),
        ValidationRule(
            cel="!has(self.reuse) || has(self.rate)",
            is_valid=lambda w: w.reuse is None or w.rate is not None,
            message="has no effect on a trace that is replayed, whose hash_ids say what repeats; "
            "state a rate too, or remove it",
            field="reuse",
        ),
    )

    @property
    def gap_variation(self) -> float:
        """The burstiness; Poisson's if none is given."""
        return 1.0 if self.burstiness is None else self.burstiness
