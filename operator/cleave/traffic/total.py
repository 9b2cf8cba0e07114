"""Several gateways counted as one that never begins anew. Pure.

Called by the operator with the pages of a deployment's gateways. What is hard: gateways come, go
and start again, each with counters of its own, and a sum over them would fall and jump; so what is
added is what each has counted since it was looked at last.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from cleave.traffic.counts import Counts

_NOW = ("in_flight", "waiting")
"""Of this moment: summed, not accumulated."""
_SAME_FOR_ALL = ("ttft_target_ms", "tpot_target_ms")
_TIMES = ("at_s", "started_s")
_COUNTED = tuple(
    each.name for each in fields(Counts) if each.name not in (*_NOW, *_SAME_FOR_ALL, *_TIMES)
)

_RESTART_S = 5.0
"""The start of a process is computed from the clock, which may be set meanwhile."""
PATIENCE_S = 60.0
"""How long a gateway that does not answer is waited for before the others count without it."""


@dataclass(frozen=True, slots=True)
class Total:
    """What a set of gateways has counted since the first look at them."""

    counts: Counts | None = None
    """None: nobody has been heard."""
    heard: Mapping[str, Counts] = field(default_factory=dict)
    """The last page of each gateway, by address."""

    def add(self, gateways: frozenset[str], pages: Mapping[str, Counts], at_s: float) -> "Total":
        """With the pages that came of the gateways `gateways`; itself where it is better to wait.

        What one has counted while it did not answer would come all at once later, as a wave of
        traffic that there was not.
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
    """What has come since `before`; all of it where the gateway has begun anew meanwhile."""
    if abs(after.started_s - before.started_s) > _RESTART_S or after.requests < before.requests:
        return after
    return replace(
        after, **{name: getattr(after, name) - getattr(before, name) for name in _COUNTED}
    )


def _joined(first: Counts, second: Counts) -> Counts:
    return replace(
        first, **{name: getattr(first, name) + getattr(second, name) for name in _COUNTED}
    )
