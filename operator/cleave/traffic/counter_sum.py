"""Sums the counters of several gateways into monotonic ones. Pure.

Called by the operator with the metrics pages of a deployment's gateways. What is hard: gateways
start, stop and restart with separate counters, so a plain sum would jump up and down; instead the
increases of each gateway since its last page are added up.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from cleave.traffic.counters import GatewayCounters

_GAUGES = ("in_flight", "waiting")
"""Gauges: summed over gateways, not accumulated."""
_SAME_FOR_ALL = ("ttft_target_ms", "tpot_target_ms", "whole_below_tokens")
_OTHERS = {*_GAUGES, *_SAME_FOR_ALL, "at_s", "started_s"}
_COUNTERS = tuple(each.name for each in fields(GatewayCounters) if each.name not in _OTHERS)

_RESTART_TOLERANCE_S = 5.0
"""Tolerance: a process start is computed from the clock, which may be adjusted meanwhile."""
MISSING_TIMEOUT_S = 60.0
"""How long to wait for a gateway that does not respond before the others are counted without it."""


@dataclass(frozen=True, slots=True)
class CounterSum:
    """Counters of a set of gateways since they were first read."""

    counts: GatewayCounters | None = None
    """None: no gateway has responded yet."""
    last_counters: Mapping[str, GatewayCounters] = field(default_factory=dict)
    """The last page of each gateway, by address."""

    def add(
        self, gateways: frozenset[str], pages: Mapping[str, GatewayCounters], at_s: float
    ) -> "CounterSum":
        """The sum with the pages of `gateways` added; unchanged while it waits for a missing page.

        Without waiting, requests counted by an unresponsive gateway would all be added later, as a
        burst of traffic that did not occur.
        """
        missing = (gateways & self.last_counters.keys()) - pages.keys()
        if not pages or (missing and self._is_waiting(at_s)):
            return self
        total = self.counts or GatewayCounters()
        for address, page in pages.items():
            if address in self.last_counters:
                total = _add(total, _subtract(self.last_counters[address], page))
        gauges = {name: sum(getattr(page, name) for page in pages.values()) for name in _GAUGES}
        any_page = next(iter(pages.values()))
        same = {name: getattr(any_page, name) for name in _SAME_FOR_ALL}
        retained = {address: self.last_counters[address] for address in missing}
        counts = replace(total, at_s=at_s, started_s=0.0, **gauges, **same)
        return CounterSum(counts, {**retained, **pages})

    def is_newer(self, address: str, page: GatewayCounters) -> bool:
        """Whether the page was read after the last one of this gateway that was added."""
        last = self.last_counters.get(address)
        return last is None or page.at_s > last.at_s

    def _is_waiting(self, at_s: float) -> bool:
        return self.counts is not None and at_s - self.counts.at_s < MISSING_TIMEOUT_S


def _subtract(before: GatewayCounters, after: GatewayCounters) -> GatewayCounters:
    """The increase since `before`; all of `after` if the gateway has restarted meanwhile."""
    is_later = abs(after.started_s - before.started_s) > _RESTART_TOLERANCE_S
    if is_later or after.requests < before.requests:
        return after
    increases = {name: getattr(after, name) - getattr(before, name) for name in _COUNTERS}
    return replace(after, **increases)


def _add(first: GatewayCounters, second: GatewayCounters) -> GatewayCounters:
    sums = {name: getattr(first, name) + getattr(second, name) for name in _COUNTERS}
    return replace(first, **sums)
