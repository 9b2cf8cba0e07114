"""The traffic to plan for, as a source of random requests: every simulation starts here.

Built from `spec.workload`, a recorded trace or published statistics; drawn by the search at many
rates. What is hard: a comparison of two rates must not compare two samples. Lengths and the pattern
of arrivals therefore depend on the seed alone, and the first requests are the same however many are
drawn: another rate is the same sequence with scaled gaps (common random numbers).
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from cleave.api import workload as api
from cleave.simulator.trace import MAX_BLOCKS_PER_PROMPT, PromptBlocks, Trace
from cleave.traffic import history
from cleave.traffic.conversations import Conversations, Turns
from cleave.traffic.recordings.history_error import HistoryError

TokenCounts = NDArray[np.int64]
Values = NDArray[np.float64]

MAX_P90_TO_MEAN = 2.27
"""Largest possible ratio of the 90th percentile to the mean of a log-normal: exp(1.2816^2 / 2)."""

_Z90 = 1.2815515655446004
_PROMPTS, _OUTPUTS, _GAPS = range(3)
"""Separate random streams of one seed, so that a change of one does not affect the others."""
_SURVEY_REQUESTS = 20_000
"""Requests drawn to estimate a mean or a share that has no formula."""
_LEAST_DRAWN = 1024
"""Requests drawn at least; fewer are the first of these."""


class DemandError(ValueError):
    """The traffic cannot be drawn; one line with field, value and remedy."""


class Marginal(Protocol):
    """Distribution of one length."""

    def draw(self, rng: np.random.Generator, num: int) -> Values:
        """`num` lengths; the first ones are the same for every larger `num`."""


@dataclass(frozen=True, slots=True)
class FixedLength:
    """One constant length."""

    tokens: float

    def draw(self, rng: np.random.Generator, num: int) -> Values:  # noqa: ARG002
        """The length, `num` times."""
        return np.full(num, self.tokens)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Logarithm normally distributed with mean `mu` and standard deviation `sigma`."""

    mu: float
    sigma: float

    @classmethod
    def from_mean_and_p90(cls, mean: float, p90: float) -> Self:
        """The distribution with this mean and 90th percentile.

        p90 / mean = exp(z sigma - sigma^2 / 2) with z = 1.2816. The smaller of both solutions is
        used; the larger one has its mass near 0. Raises DemandError for ratios outside 1 to 2.27.
        """
        ratio = p90 / mean if mean > 0 else math.nan
        if not 1 <= ratio <= MAX_P90_TO_MEAN:
            raise DemandError(
                f"p90 {p90:g} of mean {mean:g}: no log-normal distribution has it; it lies between "
                f"1 and {MAX_P90_TO_MEAN} means; replay a trace for such lengths"
            )
        sigma = _Z90 - math.sqrt(_Z90**2 - 2 * math.log(ratio))
        return cls(math.log(mean) - sigma**2 / 2, sigma)

    def draw(self, rng: np.random.Generator, num: int) -> Values:
        """`num` lengths."""
        lengths: Values = np.exp(self.mu + self.sigma * rng.standard_normal(num))
        return lengths

    def share_below(self, tokens: float) -> float:
        """Share of lengths up to `tokens` > 0."""
        above = math.log(tokens) - self.mu
        if self.sigma == 0:
            return 1.0 if above >= 0 else 0.0
        return 0.5 * (1 + math.erf(above / self.sigma / math.sqrt(2)))


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Linear interpolation between given quantiles, drawn by inverse transform."""

    levels: tuple[float, ...]
    """Increasing, from 0 to 1."""
    tokens: tuple[float, ...]
    """The length at each level."""

    def draw(self, rng: np.random.Generator, num: int) -> Values:
        """`num` lengths."""
        lengths: Values = np.interp(rng.random(num), self.levels, self.tokens)
        return lengths


class JointLengthDistribution(Protocol):
    """Joint distribution of prompt and output lengths."""

    def draw(self, num: int, seed: int) -> tuple[Values, Values]:
        """`num` prompt and output lengths in tokens, not yet rounded or limited."""


@dataclass(frozen=True, slots=True)
class IndependentLengths:
    """Independent prompt and output lengths."""

    prompt_tokens: Marginal
    output_tokens: Marginal

    def draw(self, num: int, seed: int) -> tuple[Values, Values]:
        """`num` pairs."""
        return (
            self.prompt_tokens.draw(_create_generator(seed, _PROMPTS), num),
            self.output_tokens.draw(_create_generator(seed, _OUTPUTS), num),
        )


@dataclass(frozen=True, slots=True, eq=False)
class RecordedLengths:
    """Recorded pairs, drawn with replacement, which preserves correlation of prompt and output."""

    prompt_tokens: TokenCounts
    output_tokens: TokenCounts

    def draw(self, num: int, seed: int) -> tuple[Values, Values]:
        """`num` pairs."""
        shares = _create_generator(seed, _PROMPTS).random(num)
        picks = (shares * len(self.prompt_tokens)).astype(np.int64)
        return self.prompt_tokens[picks].astype(float), self.output_tokens[picks].astype(float)


class RequestSource(Hashable, Protocol):
    """A source of requests at one per second. Hashable, so that its samples can be cached."""

    def draw(self, num: int, seed: int) -> tuple[Values, Values, Values]:
        """Arrival times in seconds, prompt and output lengths of `num` requests."""

    def draw_blocks(self, num: int, seed: int, longest: int | None) -> PromptBlocks | None:
        """Which of these prompts, cut to `longest` tokens, begin alike; None: none do, or it is
        unknown."""

    @property
    def has_reuse(self) -> bool:
        """Whether prompts begin alike, as far as is known."""

    def scale_rates(self, ratio: float) -> "RequestSource":
        """The source for rates that are `ratio` times as high: more conversations at a time."""


@dataclass(frozen=True, slots=True)
class GeneratedRequests:
    """Lengths from a distribution; independent, gamma-distributed gaps between arrivals."""

    lengths: JointLengthDistribution
    burstiness: float = 1.0
    """Coefficient of variation of the gaps: 0 regular, 1 Poisson, above bursty."""
    conversations: Conversations | None = None
    """Which requests are turns of one conversation; None: no prompt repeats."""

    def draw(self, num: int, seed: int) -> tuple[Values, Values, Values]:
        """`num` requests."""
        arrivals = np.cumsum(_draw_gaps(self.burstiness, num, seed))
        if self.conversations is None:
            return arrivals, *self.lengths.draw(num, seed)
        turns, prompts, outputs = self._draw_turns(self.conversations, num, seed)
        return arrivals, prompts[turns.order], outputs[turns.order]

    def draw_blocks(self, num: int, seed: int, longest: int | None) -> PromptBlocks | None:
        """The blocks of the turns of conversations."""
        if self.conversations is None:
            return None
        turns, prompts, _ = self._draw_turns(self.conversations, num, seed)
        prompt_tokens = _cut_lengths(prompts, longest)
        # Of one sample for all draws, so that their blocks are equal.
        survey = _cut_lengths(self.lengths.draw(_SURVEY_REQUESTS, 0)[0], longest)
        size = self.conversations.choose_block_tokens(float(np.mean(survey)))
        return self.conversations.build_blocks(turns, prompt_tokens, size)

    @property
    def has_reuse(self) -> bool:
        """Whether there are conversations."""
        return self.conversations is not None

    def scale_rates(self, ratio: float) -> "GeneratedRequests":
        """The same intervals between turns, with more or fewer requests in them."""
        if self.conversations is None:
            return self
        between = self.conversations.interval_requests * ratio
        return replace(self, conversations=replace(self.conversations, interval_requests=between))

    def _draw_turns(
        self, conversations: Conversations, num: int, seed: int
    ) -> tuple[Turns, Values, Values]:
        """Prompt and output lengths of all turns; prompts grow within each conversation."""
        turns = conversations.draw_turns(num, seed)
        prompts, outputs = self.lengths.draw(len(turns.owner), seed)
        order = turns.sort_by(prompts)
        return turns, prompts[order], outputs[order]


@dataclass(frozen=True, slots=True, eq=False)
class TraceReplay:
    """A recorded trace, replayed in a loop from its first request (seed 0) or a random one."""

    trace: Trace
    burstiness: float | None = None
    """Coefficient of variation of gaps that replace the recorded ones; None: these stay."""

    def draw(self, num: int, seed: int) -> tuple[Values, Values, Values]:
        """`num` requests."""
        order = self._draw_positions(num, seed) % len(self.trace)
        return (
            self._draw_arrivals(order, seed),
            self.trace.prompt_tokens[order].astype(float),
            self.trace.output_tokens[order].astype(float),
        )

    def draw_blocks(self, num: int, seed: int, longest: int | None) -> PromptBlocks | None:
        """The recorded blocks; prompts of the next lap of the loop are new ones."""
        if self.trace.blocks is None:
            return None
        laps, order = np.divmod(self._draw_positions(num, seed), len(self.trace))
        blocks = self.trace.blocks.select(order, laps)
        return blocks.cut(_cut_lengths(self.trace.prompt_tokens[order], longest))

    @property
    def has_reuse(self) -> bool:
        """Whether blocks are recorded."""
        return self.trace.blocks is not None

    def scale_rates(self, ratio: float) -> "TraceReplay":  # noqa: ARG002
        """The same: other rates replay the recorded requests faster or slower."""
        return self

    def _draw_arrivals(self, order: TokenCounts, seed: int) -> Values:
        if self.burstiness is not None:
            return np.cumsum(_draw_gaps(self.burstiness, len(order), seed))
        gaps = np.diff(self.trace.arrival_ms) / 1000 * self.trace.rate
        # The loop is closed with a mean gap, since the gap before the first request is unknown.
        return np.cumsum(np.append(1.0, gaps)[order])

    def _draw_positions(self, num: int, seed: int) -> TokenCounts:
        """Positions of `num` requests in the endless loop."""
        recorded = len(self.trace)
        start = int(_create_generator(seed, _GAPS).random() * recorded) if seed else 0
        return start + np.arange(num)


@dataclass(frozen=True, slots=True)
class UniquePrompts:
    """The requests of another source, as if no prompt repeated: for comparisons."""

    source: RequestSource

    def draw(self, num: int, seed: int) -> tuple[Values, Values, Values]:
        """`num` requests."""
        return self.source.draw(num, seed)

    def draw_blocks(self, num: int, seed: int, longest: int | None) -> PromptBlocks | None:  # noqa: ARG002
        """None."""
        return None

    @property
    def has_reuse(self) -> bool:
        """False."""
        return False

    def scale_rates(self, ratio: float) -> "UniquePrompts":
        """As the other source."""
        return UniquePrompts(self.source.scale_rates(ratio))


@dataclass(frozen=True, slots=True)
class Demand:
    """The requests to plan for."""

    rate: float
    """Expected arrivals in req/s."""
    source: RequestSource
    max_model_len: int | None = None
    """Prompts are truncated below it, outputs to the rest; None: no limit."""
    remarks: tuple[str, ...] = ()
    """What was assumed or left out when its trace was read, one sentence each."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise DemandError(f"rate {self.rate:g}: must be above 0 requests per second")

    def draw(self, num_requests: int, rate: float | None = None, seed: int = 0) -> Trace:
        """Draw requests at `rate` (default: the expected one), in new arrays.

        Equal seeds give equal lengths and, apart from the rate, equal gaps; a longer draw begins
        with the shorter one.
        """
        rate = self.rate if rate is None else rate
        if not (math.isfinite(rate) and rate > 0):
            raise DemandError(f"rate {rate:g}: must be above 0 requests per second")
        if num_requests < 1:
            raise DemandError(f"num_requests {num_requests}: must be at least 1")
        unit = self._draw_unit(num_requests, seed)
        prompt_tokens, output_tokens = unit.prompt_tokens.copy(), unit.output_tokens.copy()
        return Trace(unit.arrival_ms / rate, prompt_tokens, output_tokens, blocks=unit.blocks)

    @property
    def has_reuse(self) -> bool:
        """Whether prompts begin alike, as far as is known."""
        return self.source.has_reuse

    def without_reuse(self) -> "Demand":
        """The same requests, whose prompts never repeat."""
        return replace(self, source=UniquePrompts(self.source))

    def with_reuse_of(self, other: "Demand") -> "Demand":
        """The same lengths and arrivals with what repeats in `other`: in its conversations, or in
        the order and with the blocks of its trace. Only generated requests can take it over."""
        source = other.with_rate(self.rate).source
        if not isinstance(self.source, GeneratedRequests):
            return self
        if isinstance(source, GeneratedRequests):
            return replace(self, source=replace(self.source, conversations=source.conversations))
        if isinstance(source, TraceReplay) and source.has_reuse:
            return replace(self, source=_build_replay(source.trace, self.source))
        return self

    def with_rate(self, rate: float) -> "Demand":
        """The same requests at another rate; conversations keep their intervals."""
        return replace(self, rate=rate, source=self.source.scale_rates(rate / self.rate))

    def with_max_model_len(self, max_model_len: int) -> "Demand":
        """The same requests for a model with at most this many tokens of prompt and output."""
        if max_model_len < 2:
            raise DemandError(f"max_model_len {max_model_len}: must be at least 2")
        return replace(self, max_model_len=max_model_len)

    def compute_share_longer_than(self, max_model_len: int) -> float:
        """Share of requests that `with_max_model_len` would cut, estimated from a sample."""
        drawn = replace(self, max_model_len=None)._draw_survey()
        return float(np.mean(drawn.prompt_tokens + drawn.output_tokens > max_model_len))

    @property
    def longest_request(self) -> int:
        """Most tokens of prompt and output, estimated from a sample; of a trace, all of it."""
        drawn = self.source.trace if isinstance(self.source, TraceReplay) else self._draw_survey()
        longest = int(np.max(drawn.prompt_tokens + drawn.output_tokens))
        return min(longest, self.max_model_len or longest)

    @property
    def mean_prompt_tokens(self) -> float:
        """Estimated from a sample, as the limited distribution has no formula."""
        return float(np.mean(self._draw_survey().prompt_tokens))

    @property
    def mean_output_tokens(self) -> float:
        """Estimated from a sample."""
        return float(np.mean(self._draw_survey().output_tokens))

    @property
    def blocks_per_prompt(self) -> float:
        """Mean number of blocks that are compared, estimated from a sample; 0 without reuse."""
        blocks = self._draw_survey().blocks if self.has_reuse else None
        return blocks.per_prompt if blocks else 0.0

    def _draw_survey(self) -> Trace:
        return self._draw_unit(_SURVEY_REQUESTS, 0)

    def _draw_unit(self, num: int, seed: int) -> Trace:
        """The first of a number of requests that is rounded up, so that a search, whose trials all
        differ in length, draws and keeps few."""
        enough = max(1 << (num - 1).bit_length(), _LEAST_DRAWN)
        return _draw_unit(self.source, self.max_model_len, enough, seed).take_first(num)


def build_from_spec(spec: api.Workload, base_dir: Path) -> Demand:
    """Build the demand of `spec.workload`; a relative trace path starts at `base_dir`.

    A trace alone is replayed; with a rate, its requests arrive at that rate with the given
    burstiness, and its lengths are resampled unless their order matters because prompts repeat.
    Raises DemandError.
    """
    if spec.trace is not None:
        try:
            trace = history.read_trace(base_dir / spec.trace.path)
        except HistoryError as error:
            raise DemandError(str(error)) from error
        return replace(_build_from_recording(trace, spec), remarks=trace.remarks)
    if spec.prompt_tokens is None or spec.output_tokens is None or spec.rate is None:
        raise DemandError("rate: set it with promptTokens and outputTokens, or set a trace")
    lengths = IndependentLengths(*map(_build_marginal, (spec.prompt_tokens, spec.output_tokens)))
    return _add_reuse(Demand(spec.rate, GeneratedRequests(lengths, spec.gap_variation)), spec)


def _build_from_recording(trace: Trace, spec: api.Workload) -> Demand:
    if spec.rate is None:
        return build_from_trace(trace)
    if trace.blocks is not None and spec.reuse is None:
        return Demand(spec.rate, TraceReplay(_bound_blocks(trace), spec.gap_variation))
    return _add_reuse(resample_trace(trace, spec.rate, spec.gap_variation), spec)


def build_from_trace(trace: Trace) -> Demand:
    """Replay the trace. Raises DemandError when it has no rate."""
    if trace.rate == 0:
        raise DemandError(
            f"the {len(trace)} recorded requests span no time: set a rate in addition to the trace"
        )
    return Demand(trace.rate, TraceReplay(_bound_blocks(trace)))


def _bound_blocks(trace: Trace) -> Trace:
    """The trace with MAX_BLOCKS_PER_PROMPT blocks in a mean prompt at most."""
    if trace.blocks is None:
        return trace
    factor = math.ceil(trace.blocks.per_prompt / MAX_BLOCKS_PER_PROMPT)
    return trace if factor <= 1 else replace(trace, blocks=trace.blocks.join(factor))


def _build_replay(trace: Trace, observed: GeneratedRequests) -> TraceReplay:
    """The trace with other lengths and gaps: a request that is longer than a share of the recorded
    ones is longer than that share of the observed ones. So the prompts of a conversation grow as
    they did; what a prompt has beyond its recorded blocks never repeats."""
    prompts, outputs = observed.lengths.draw(_SURVEY_REQUESTS, 0)
    prompt_tokens = _map_by_rank(trace.prompt_tokens, _cut_lengths(prompts, None))
    output_tokens = _map_by_rank(trace.output_tokens, _cut_lengths(outputs, None))
    blocks = trace.blocks and trace.blocks.cut(prompt_tokens)
    replayed = Trace(trace.arrival_ms, prompt_tokens, output_tokens, blocks=blocks)
    return TraceReplay(replayed, observed.burstiness)


def _map_by_rank(recorded: TokenCounts, drawn: TokenCounts) -> TokenCounts:
    """By recorded length the drawn one of the same rank; equal lengths keep their order."""
    shares = (np.arange(len(recorded)) + 0.5) / len(recorded)
    mapped = np.empty(len(recorded), np.int64)
    mapped[np.argsort(recorded, kind="stable")] = np.sort(drawn)[(shares * len(drawn)).astype(int)]
    return mapped


def resample_trace(trace: Trace, rate: float, burstiness: float = 1.0) -> Demand:
    """Lengths of the trace drawn with replacement, arriving at `rate`."""
    lengths = RecordedLengths(trace.prompt_tokens, trace.output_tokens)
    return Demand(rate, GeneratedRequests(lengths, burstiness))


def build_fixed(
    prompt_tokens: int, output_tokens: int, rate: float, burstiness: float = 1.0
) -> Demand:
    """Requests of equal lengths."""
    lengths = IndependentLengths(FixedLength(prompt_tokens), FixedLength(output_tokens))
    return Demand(rate, GeneratedRequests(lengths, burstiness))


def _add_reuse(demand: Demand, spec: api.Workload) -> Demand:
    """`demand` in the conversations that `spec.reuse` states, if any."""
    reuse = spec.reuse
    if reuse is None or not isinstance(demand.source, GeneratedRequests):
        return demand
    conversations = Conversations(
        reuse.turns,
        reuse.turn_interval_s * demand.rate,
        round(reuse.new_tokens),
        round(reuse.shared_tokens),
    )
    return replace(demand, source=replace(demand.source, conversations=conversations))


def _draw_gaps(burstiness: float, num: int, seed: int) -> Values:
    """Gamma-distributed gaps between arrivals, with a mean of 1."""
    if burstiness == 0:
        return np.ones(num)
    shape = burstiness**-2
    return _create_generator(seed, _GAPS).standard_gamma(shape, num) / shape


def _build_marginal(lengths: api.LengthDistribution) -> Marginal:
    if lengths.p90 is None:
        return FixedLength(lengths.mean)
    return LogNormal.from_mean_and_p90(lengths.mean, lengths.p90)


def _create_generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.default_rng((seed, stream))


@lru_cache(maxsize=16)
def _draw_unit(source: RequestSource, max_model_len: int | None, num: int, seed: int) -> Trace:
    """`num` requests at one per second, cached: a search draws the same ones many times."""
    arrivals, prompts, outputs = source.draw(num, seed)
    longest = None if max_model_len is None else max_model_len - 1
    prompt_tokens, output_tokens = _cut_lengths(prompts, longest), _cut_lengths(outputs, None)
    if max_model_len is not None:
        output_tokens = np.minimum(output_tokens, max_model_len - prompt_tokens)
    blocks = source.draw_blocks(num, seed, longest)
    return Trace(arrivals * 1000, prompt_tokens, output_tokens, blocks=blocks)


def _cut_lengths(lengths: Values | TokenCounts, longest: int | None) -> TokenCounts:
    """Rounded, at least 1 and at most `longest` (None: no limit)."""
    rounded: TokenCounts = np.maximum(np.rint(lengths), 1).astype(np.int64)
    return rounded if longest is None else np.minimum(rounded, longest)
