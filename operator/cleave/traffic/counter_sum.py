"""Sums the counters of several gateways into ones that never decrease. Pure.

Called by the operator with the metrics pages of a deployment's gateways. What is hard: gateways
start, stop and restart, each with counters of its own, so their sum would jump up and down; so the
increase of each gateway since its last page is added up instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from cleave.traffic.counters import Counts

_NOW = ("in_flight", "waiting")
"""Gauges: summed over gateways, not accumulated."""
_SAME_FOR_ALL = ("ttft_target_ms", "tpot_target_ms")
_TIMES = ("at_s", "started_s")
_COUNTED = tuple(
    each.name for each in fields(Counts) if each.name not in (*_NOW, *_SAME_FOR_ALL, *_TIMES)
)

_RESTART_S = 5.0
"""Tolerance: a process start is computed from the clock, which may be adjusted meanwhile."""
PATIENCE_S = 60.0
"""How long to wait for a gateway that does not respond before the others are counted without it."""


@dataclass(frozen=True, slots=True)
class Total:
    """Counters of a set of gateways since they were first read."""

    counts: Counts | None = None
    """None: no gateway has responded yet."""
    heard: Mapping[str, Counts] = field(default_factory=dict)
    """The last page of each gateway, by address."""

    def add(self, gateways: frozenset[str], pages: Mapping[str, Counts], at_s: float) -> "Total":
        """The sum with the pages of `gateways` added; unchanged while it waits for a missing page.

        Without waiting, requests counted by a silent gateway would all be added later, as a burst
        of traffic that did not occur.
        """
        silent = (gateways & self.heard.keys()) - pages.keys()
        if not pages or (silent and self._waits(at_s)):
            return self
        grown = self.counts or Counts()
        for address, page in pages.items():
            if address in self.heard:
                grown = _joined(grown, _since(self.heard[address], page))
        gauges = {name: sum(getattr(page, name) for page in pages.values()) for name in _NOW}
        any_page = next(iter(pages.values()))
        same = {name: getattr(any_page, name) for name in _SAME_FOR_ALL}
        retained = {address: page for address, page in self.heard.items() if address in silent}
        counts = replace(grown, at_s=at_s, started_s=0.0, **gauges, **same)
        return Total(counts, {**retained, **pages})

    def _waits(self, at_s: float) -> bool:
        return self.counts is not None and at_s - self.counts.at_s < PATIENCE_S


def _since(before: Counts, after: Counts) -> Counts:
    """The increase since `before`; all of `after` if the gateway has restarted meanwhile."""
    if abs(after.started_s - before.started_s) > _RESTART_S or after.requests < before.requests:
        return after
    return replace(
        after, **{name: getattr(after, name) - getattr(before, name) for name in _COUNTED}
    )


def _joined(first: Counts, second: Counts) -> Counts:
    return replace(
        first, **{name: getattr(first, name) + getattr(second, name) for name in _COUNTED}
    )
