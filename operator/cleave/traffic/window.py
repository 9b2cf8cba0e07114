"""The traffic in a time window: the difference of two readings of the gateways' counters. Pure.

Built by the operator; read by change detection, refits and the planner's model check. What is hard:
gateways count requests when they end, which under overload is long after they arrive; arrivals are
therefore computed as requests ended plus the increase of requests in flight.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

from cleave.traffic.counters import Buckets, GatewayCounters

_EMPTY = Buckets()
_COUNTERS = (
    "prompts", "outputs", "reuse", "ttft", "tpot", "itl", "measured", "attained", "ttft_attained",
    "tpot_attained", "flex_tokens",
)  # fmt: skip
MIN_GAPS = 1_000
"""In fewer gaps between tokens, a stall or two decide their 99th percentile."""
_LIFETIME_QUANTILE = 0.9
_MAX_CHANCE_DEVIATIONS = 3.0
"""Standard deviations by which arrivals and ended requests differ at random."""


@dataclass(frozen=True, slots=True)
class TrafficWindow:
    """Traffic of one time window. None: no requests from which to compute the figure."""

    end_s: float
    """End, by the clock of the reader."""
    length_s: float
    num_requests: float
    """Number of arrivals."""
    prompts: Buckets = _EMPTY
    """Prompt tokens of answered requests."""
    outputs: Buckets = _EMPTY
    reuse: Buckets = _EMPTY
    """Prompt tokens by the time since an earlier prompt began alike, as in GatewayCounters."""
    ttft: Buckets = _EMPTY
    """In seconds."""
    tpot: Buckets = _EMPTY
    itl: Buckets = _EMPTY
    """Gaps between pieces of some streams."""
    measured: float = 0.0
    """Responses that were measured against the targets."""
    attained: float = 0.0
    """Measured responses that met both targets."""
    ttft_attained: float = 0.0
    """Those that met the TTFT target, whatever their TPOT."""
    tpot_attained: float = 0.0
    flex_tokens: float = 0.0
    """Of requests that only fill idle capacity; nothing else here counts these."""
    whole_below_tokens: int = 0
    """Prompt length up to which decode instances could compute prompts at the end; 0: none."""

    @property
    def start_s(self) -> float:
        """Start, by the same clock."""
        return self.end_s - self.length_s

    @property
    def rate(self) -> float:
        """Arrivals in req/s."""
        return self.num_requests / self.length_s

    @property
    def attainment(self) -> float | None:
        """Share of measured responses that met both targets."""
        return self.attained / self.measured if self.measured else None

    @property
    def lifetime_s(self) -> float:
        """Lifetime that 90 % of requests do not exceed, approximately; 0: no request ended."""
        histograms = (self.ttft, self.tpot, self.outputs)
        quantiles = (each.compute_quantile(_LIFETIME_QUANTILE) or 0.0 for each in histograms)
        first_s, token_s, tokens = quantiles
        return first_s + tokens * token_s

    @property
    def flex_share(self) -> float:
        """Tokens of requests that only fill idle capacity, relative to those of all others."""
        tokens = self.prompts.total + self.outputs.total
        return self.flex_tokens / tokens if tokens else math.inf if self.flex_tokens else 0.0

    @property
    def ttft_p50_ms(self) -> float | None:
        """Median of the TTFT."""
        return self.ttft.compute_quantile_ms(0.5)


def compute_window(before: GatewayCounters, after: GatewayCounters) -> TrafficWindow | None:
    """The window between two readings; None: no time has passed, or counters have restarted."""
    length_s = after.at_s - before.at_s
    if length_s <= 0 or after.started_s != before.started_s or after.requests < before.requests:
        return None
    ended, in_flight = after.requests - before.requests, after.in_flight - before.in_flight
    increases = {name: getattr(after, name) - getattr(before, name) for name in _COUNTERS}
    arrived, whole_below = max(ended + in_flight, 0.0), after.whole_below_tokens
    return TrafficWindow(after.at_s, length_s, arrived, **increases, whole_below_tokens=whole_below)


def join_windows(windows: Sequence[TrafficWindow]) -> TrafficWindow:
    """One window with the sum of all lengths and counts. Raises ValueError for none."""
    if not windows:
        raise ValueError("windows: there are none to join; read the counters twice")
    return reduce(_add, windows)


def list_settled(windows: Sequence[TrafficWindow], settle_s: float) -> tuple[TrafficWindow, ...]:
    """The windows whose latencies belong to their own traffic, not to earlier traffic.

    Leaves out the first `settle_s`, and windows of a backlog: while more requests end than arrive.
    """
    if not windows:
        return ()
    settled_s = windows[0].start_s + settle_s
    suffixes = (windows[at:] for at in range(len(windows) + 1))
    calm = next(each for each in suffixes if not _is_draining(each))
    return tuple(each for each in calm if each.start_s >= settled_s)


def _is_draining(windows: Sequence[TrafficWindow]) -> bool:
    """Whether up to some window significantly more requests ended than arrived."""
    arrived = accumulate(each.num_requests for each in windows)
    ended = accumulate(each.prompts.num for each in windows)
    pairs = zip(arrived, ended, strict=True)
    return any(b - a > _MAX_CHANCE_DEVIATIONS * math.sqrt(max(a, 1.0)) for a, b in pairs)


def _add(first: TrafficWindow, second: TrafficWindow) -> TrafficWindow:
    names = ("length_s", "num_requests", *_COUNTERS)
    sums = {name: getattr(first, name) + getattr(second, name) for name in names}
    end_s, whole_below = max(first.end_s, second.end_s), second.whole_below_tokens
    return TrafficWindow(end_s, **sums, whole_below_tokens=whole_below)
