"""What a pair's canary handoffs say about it: whether it stays in the pair choice, when it is due
again, what a canary may cost. Pure.

Used by the gateway's witness. What is hard: a fault must take its pair out at once, before it
serves anything wrong, but a near-tie of greedy decoding, or a measurement that other handoffs blur,
is no fault. So a first fault only suspends the pair until more canaries confirm or refute it; and a
token that differs is a fault only if the engine that computed the prompt gave the other engine's
token a clearly lower probability.
"""

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cleave.policy.kv_transfer_sample import MIN_BYTES_RATIO, TransferSample

TIE_NATS = 0.5
"""Greatest difference of log-probability between two tokens of which either engine may pick one:
bfloat16 moves logits by some hundredths."""
MAX_SHIFT_NATS = 1.0
"""Greatest difference between the log-probabilities that two engines give one likely token."""
WINDOW = 8
"""Newest results of a pair that count."""
MAX_FAULTS = 2
"""Faults among them that take the pair out."""
NUM_CONFIRMATIONS = 2
"""Canaries that follow a first fault."""
NUM_REINSTATING = 3
"""Good canaries in a row that bring a failed pair back."""
NUM_DEFICITS = 5
"""Blurred results in a row, each with too few bytes, that count as a fault: bytes of others are
counted too early or too late by chance, never always."""
CONFIRM_S = 0.2
CONFIRM_SLOW_S = 2.0
"""Between canaries that decide whether a pair is slow, which a busy host may only seem to be."""
RETRY_S, MAX_RETRY_S = 2.0, 60.0
"""After a canary that showed nothing; it doubles with each further one."""
MIN_FAILED_S, MAX_FAILED_S = 2.0, 45.0
"""Between canaries of a failed pair: they show when it works again."""
NUM_RATES = 3
"""Newest rates of a pair of which the best counts: a busy host delays some pulls."""
SLOW_RATIO = 0.25
"""Rate of a slow pair, relative to the usual one. Two handoffs to one card at a time halve it; TCP
over 25 Gbit/s has a sixteenth of RDMA over 200."""
STEADY_RATIO = 0.4
"""Least rate, relative to the one that is due, that counts as usual: so that a pair which becomes
slow by steps does not take what is due down with it."""
SLOWER_LINK_SHARE = 0.25
"""Least share of slow pairs at which the links, not the pairs, may be what is slow."""
NUM_USUAL = 16
MIN_USUAL = 8
"""Newest and fewest good rates whose median is the usual one of a pair."""
MIN_TOKENS = 64
MAX_TOKENS = 4_096
"""More than most engines compute in one step, so that every chunk of a prompt is tested."""
SAVED_S = 120.0
"""An engine's share of so many seconds can be saved for later canaries."""
SLOW_LOSS_MS = 10.0
"""Least time that a slow pair loses in a canary: a shorter pull is mostly fixed costs."""


class TokenVerdict(enum.Enum):
    """How the first token of a handoff compares with that of the engine that computed it."""

    SAME = "same"
    NEAR_TIE = "near tie"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """The first token of a response."""

    token: str
    logprobs: Mapping[str, float]
    """Natural log-probabilities of the likeliest tokens; empty: the engine reports none."""


def compare_tokens(reference: TokenChoice, decoded: TokenChoice) -> TokenVerdict:
    """Compare the token of a handoff with that of the engine that computed the prompt."""
    shared = reference.logprobs.keys() & decoded.logprobs.keys()
    likely = [each for each in shared if reference.logprobs[each] > -math.log(100)]
    shifts = [abs(reference.logprobs[each] - decoded.logprobs[each]) for each in likely]
    if max(shifts, default=0.0) > MAX_SHIFT_NATS:
        return TokenVerdict.DIFFERENT
    if decoded.token == reference.token:
        return TokenVerdict.SAME
    is_tie = is_near_tie(reference.logprobs, reference.token, decoded.token)
    return TokenVerdict.NEAR_TIE if is_tie else TokenVerdict.DIFFERENT


def is_near_tie(logprobs: Mapping[str, float], best: str, other: str) -> bool:
    """Whether another engine may pick `other` where one that computed `logprobs` picks `best`."""
    gap = logprobs.get(best, math.inf) - logprobs.get(other, -math.inf)
    return gap <= TIE_NATS


@dataclass(frozen=True, slots=True)
class PullRate:
    """How fast one canary was pulled."""

    bytes_per_s: float
    """To one GPU."""
    pull_ms: float
    """Time for which each rank of the decode engine pulled."""


class BytesVerdict(enum.Enum):
    """Whether all bytes of a handoff were moved."""

    MOVED = "moved"
    BLURRED = "blurred"
    """Other handoffs count into the same counters, and there are too few bytes for all."""
    UNCLEAR = "unclear"
    """There are enough bytes, and a failure that may be another handoff's."""
    MISSING = "missing"


def find_block_bytes(samples: Iterable[float]) -> float:
    """The bytes per block of handoffs to one engine: the most that two samples agree on; 0: none
    do. A sample by itself may contain another handoff, whose bytes were counted before its tokens
    were, or lack a part of its own."""
    descending = sorted(samples, reverse=True)
    agreed = (low for high, low in pairwise(descending) if low >= MIN_BYTES_RATIO * high)
    return next(agreed, 0.0)


def assess_bytes(sample: TransferSample, block_bytes: float) -> BytesVerdict:
    """Whether the decode engine pulled a canary's KV; `block_bytes`: per block of earlier handoffs
    to this engine, 0: not known yet."""
    units = max(sample.num_blocks, 1)
    own = block_bytes * units
    if sample.is_isolated:
        if sample.num_bytes <= 0 or sample.num_bytes < MIN_BYTES_RATIO * own:
            return BytesVerdict.MISSING
        is_full = block_bytes > 0 or not sample.num_failed
    else:
        # Bytes are due for each token that came with a handoff, those of others included.
        num_pulled = sample.after.num_tokens - sample.before.num_tokens
        due = own * num_pulled / max(sample.num_tokens, 1)
        is_full = sample.num_bytes > 0 and sample.num_bytes >= due - 0.5 * own
    if not is_full:
        return BytesVerdict.BLURRED
    return BytesVerdict.UNCLEAR if sample.num_failed else BytesVerdict.MOVED


@dataclass(frozen=True, slots=True)
class RatedPair:
    """The newest rate of a pair and its usual one."""

    prefill: str
    decode: str
    bytes_per_s: float
    usual_bytes_per_s: float = 0.0
    """0: not known yet."""


def compute_due_rate(pair: RatedPair, like: Sequence[RatedPair]) -> float:
    """Bytes/s that are due from a pair; 0: there is nothing to compare it with.

    `like`: all pairs of its kind of link, itself included. A pair that is known is compared with
    itself, as far as the others are as fast as usual: their network may be busy. A new one is
    compared with the others or, where its link is a slower one, with those of such links.
    """
    if pair.usual_bytes_per_s:
        shares = [
            each.bytes_per_s / each.usual_bytes_per_s for each in like if each.usual_bytes_per_s
        ]
        if len(shares) > 1:
            return pair.usual_bytes_per_s * _get_upper_median(shares)
    if len(like) < 2:
        return 0.0
    due = _get_upper_median([each.bytes_per_s for each in like])
    slow = [each for each in like if each.bytes_per_s < SLOW_RATIO * due]
    if len(slow) < SLOWER_LINK_SHARE * len(like):
        return due
    fast = [each for each in like if each.bytes_per_s >= SLOW_RATIO * due]
    if _has_slower_link(pair, slow, fast):
        return _get_upper_median([each.bytes_per_s for each in slow])
    return due


def _has_slower_link(pair: RatedPair, slow: Sequence[RatedPair], fast: Sequence[RatedPair]) -> bool:
    """Whether many pairs are slow because of where they are, as between two nodes or racks: those
    of other engines are slow as well, and both engines of this pair are fast with others."""
    return (
        any(each.prefill != pair.prefill and each.decode != pair.decode for each in slow)
        and any(each.prefill == pair.prefill for each in fast)
        and any(each.decode == pair.decode for each in fast)
    )


def _get_upper_median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def is_slow(rate: PullRate, due: float) -> bool:
    """Whether a rate is clearly below the bytes/s that are due."""
    if rate.bytes_per_s <= 0 or due <= 0:
        return False
    lost_ms = rate.pull_ms * (1 - rate.bytes_per_s / due)
    return rate.bytes_per_s < SLOW_RATIO * due and lost_ms >= SLOW_LOSS_MS


@dataclass(frozen=True, slots=True)
class ResultOrder:
    """Which of two results of a pair is the newer one. Clocks differ, and results travel: so those
    of one source are compared by their numbers, others by their age when they were sent."""

    source: str
    """Empty: an earlier version's."""
    sequence: int
    at_s: float
    """Time of the handoff on the caller's clock, at most its travel time too late."""

    def is_before(self, other: "ResultOrder") -> bool:
        """Whether the other result is newer."""
        if self.source and self.source == other.source:
            return self.sequence < other.sequence
        return self.at_s < other.at_s


class PairStanding(enum.Enum):
    """Whether requests may use a pair."""

    UNPROVEN = "unproven"
    PROVEN = "proven"
    SUSPECT = "suspect"
    """Not until it is confirmed or refuted."""
    FAILED = "failed"
    """Not until NUM_REINSTATING canaries in a row are good."""


class PairHistory:
    """The newest results of one pair."""

    __slots__ = (
        "_num_blurred", "_num_deficits", "_num_good", "_recent", "_retry_s", "_seems_slow",
        "due_s", "recorded_s", "standing", "tested_s",
    )  # fmt: skip

    def __init__(self, due_s: float) -> None:
        """`due_s`: when its first canary is due, on the caller's clock."""
        self.standing = PairStanding.UNPROVEN
        self.due_s = due_s
        self.tested_s = -math.inf
        """Time of the newest canary that showed something."""
        self.recorded_s = -math.inf
        """When its standing was last sent to the decode side's agent."""
        self._seems_slow = False
        """Whether its newest canary was good but slow."""
        self._recent: tuple[bool, ...] = ()
        """Whether the newest WINDOW canaries were good, or those since it was used again."""
        self._num_good = 0
        """Good ones since the last fault."""
        self._num_blurred = self._num_deficits = 0
        """Blurred results in a row; of these the last ones with too few bytes."""
        self._retry_s = MIN_FAILED_S

    @property
    def is_urgent(self) -> bool:
        """Whether its next canary decides about the pair: it may exceed the budget."""
        is_returning = self.standing is PairStanding.FAILED and self._num_good > 0
        return is_returning or self._seems_slow or self.standing is PairStanding.SUSPECT

    @property
    def is_closed(self) -> bool:
        """Whether requests must not use the pair."""
        return self.standing in (PairStanding.SUSPECT, PairStanding.FAILED)

    def restore(self, standing: PairStanding) -> None:
        """Adopt the standing that another gateway recorded."""
        self.standing = standing

    def record_good(self, now_s: float, period_s: float, *, seems_slow: bool = False) -> None:
        """A canary was good; the next one is due after `period_s`, or soon if it was slow."""
        if seems_slow:
            period_s = min(period_s, CONFIRM_SLOW_S)
        self._seems_slow = seems_slow
        self.tested_s, self._num_blurred, self._num_deficits = now_s, 0, 0
        self._recent = (*self._recent, True)[-WINDOW:]
        self._num_good += 1
        self.due_s = now_s + period_s
        if self.standing is PairStanding.FAILED:
            if self._num_good < NUM_REINSTATING:
                self.due_s = now_s + MIN_FAILED_S
                return
            self._recent = ()
        elif self.standing is PairStanding.SUSPECT and self._num_good < NUM_CONFIRMATIONS:
            self.due_s = now_s + CONFIRM_S
            return
        self.standing = PairStanding.PROVEN

    def record_fault(self, now_s: float, confirm_s: float = CONFIRM_S) -> None:
        """A canary, or a request's own handoff, went wrong; the next one is due after `confirm_s`
        if it is the first."""
        self.tested_s, self._num_good, self._seems_slow = now_s, 0, False
        self._num_blurred = self._num_deficits = 0
        self._recent = (*self._recent, False)[-WINDOW:]
        if self.standing is PairStanding.FAILED:
            self._retry_s = min(2 * self._retry_s, MAX_FAILED_S)
        elif self._recent.count(False) >= MAX_FAULTS:
            self.standing, self._retry_s = PairStanding.FAILED, MIN_FAILED_S
        else:
            self.standing, self._retry_s = PairStanding.SUSPECT, confirm_s
        self.due_s = now_s + self._retry_s

    def record_blurred(self, now_s: float, *, is_deficit: bool) -> bool:
        """A canary showed nothing; whether that has happened so often, with too few bytes each
        time (`is_deficit`), that it is a fault."""
        self._num_deficits = self._num_deficits + 1 if is_deficit else 0
        self.due_s = now_s + min(RETRY_S * 2.0**self._num_blurred, MAX_RETRY_S)
        self._num_blurred = 0 if is_deficit else min(self._num_blurred + 1, 10)
        return self._num_deficits >= NUM_DEFICITS


class EngineBudget:
    """What canaries may cost one engine: a share of its time, saved up for a while."""

    def __init__(self, share: float, now_s: float) -> None:
        """`share`: of the engine's time, above 0."""
        self._share = share
        self._balance_ms = share * SAVED_S * 1000
        self._at_s = now_s

    def get_wait_s(self, now_s: float) -> float:
        """Seconds until the next canary may start; 0: now."""
        self._save(now_s)
        return max(-self._balance_ms, 0.0) / (1000 * self._share)

    def record(self, ms: float, now_s: float) -> None:
        """A canary has taken so long."""
        self._save(now_s)
        self._balance_ms -= ms

    def _save(self, now_s: float) -> None:
        saved_ms = self._share * (now_s - self._at_s) * 1000
        limit_ms = self._share * SAVED_S * 1000
        self._balance_ms = min(self._balance_ms + saved_ms, limit_ms)
        self._at_s = now_s


def choose_prompt_tokens(
    allowed_ms: float, prompt_ms: float, token_ms: float, max_tokens: int, draw: float
) -> int:
    """The length of the next canary's prompt, from a log-uniform distribution whose mean takes
    about `allowed_ms`. `prompt_ms`, `token_ms`: time of a prompt, and of each of its tokens;
    `max_tokens`: of the model; `draw`: uniform in 0..1."""
    mean = max(allowed_ms - prompt_ms, 0.0) / max(token_ms, 1e-3)
    low, high = max(mean / 4, MIN_TOKENS), max(2 * mean, 2 * MIN_TOKENS)
    chosen = low * (high / low) ** draw
    return max(int(min(chosen, MAX_TOKENS, max_tokens)), 1)
