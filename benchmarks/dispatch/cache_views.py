"""Dispatch by the prompts that were sent beside dispatch that sees what all engines cache, on
sessions of agents.

Called by run.py. Both choose by least cost; so the ratio is what knowing evictions would bring.
Engines schedule by default, or keep targets (`engine.scheduling`). What is hard: where the caches
are full, attainment of one draw of sessions rises and falls with the rate, so that its goodput is
one of several. So attainment is the mean over many draws, and the error of the difference is known.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import caches
import numpy as np
from fleets import Worker
from goodput import Targets, bisect
from numpy.typing import NDArray

from cleave.simulator.fleet import Admission, PrefillOrder, SimulatedFleet, SimulatedPool

_KEPT_TRACES = 8
"""Of one draw, at different rates."""
KEEPS_TARGETS = {"default": False, "InTimeFirst, WithinTpot": True}
"""By name of the engines' scheduling."""


@dataclass(frozen=True, slots=True)
class ViewRow:
    """One fleet with one scheduling of its engines."""

    fleet: str
    scheduling: str
    sent: float
    """Goodput by the prompts that were sent (PrefixAware), req/s."""
    seen: float
    """Goodput by what all engines cache."""
    difference: float
    """Attainment at the rate `sent`: PrefixAware's less the other's."""
    error: float
    """Standard error of `difference`, over the draws, which also chose the rate."""


def compare_views(worker: Worker, count: int, draws: int) -> Iterator[ViewRow]:
    """`count` instances, mixed and apart, with `draws` draws of 500 requests an instance."""
    traffics = [caches.draw_agents(500 * count, 1 + seed) for seed in range(draws)]
    targets = traffics[0].targets
    builds = [functools.lru_cache(_KEPT_TRACES)(each.build) for each in traffics]
    for name, fleet in caches.list_fleets(worker, count, traffics[0].decode_share):
        for scheduling, keeps in KEEPS_TARGETS.items():
            own = keep_targets(fleet, targets.ttft_ms, targets.tpot_ms) if keeps else fleet
            sent, seen = (
                _build_attain(each, own, targets, builds) for each in (caches.COST, caches.SEEN)
            )
            rates = [
                bisect(lambda rate, of=of: of(rate).mean() >= targets.attainment)  # type: ignore[misc]
                for of in (sent, seen)
            ]
            gaps = sent(rates[0]) - seen(rates[0])
            error = float(gaps.std(ddof=1) / draws**0.5)
            yield ViewRow(name, scheduling, rates[0], rates[1], float(gaps.mean()), error)


def keep_targets(fleet: SimulatedFleet, ttft_ms: float, tpot_ms: float) -> SimulatedFleet:
    """The fleet with engines that keep these targets."""

    def change(pools: tuple[SimulatedPool, ...]) -> tuple[SimulatedPool, ...]:
        return tuple(
            replace(
                pool,
                engine=replace(
                    pool.engine,
                    order=PrefillOrder.IN_TIME,
                    admission=Admission.WITHIN_TPOT,
                    ttft_ms=ttft_ms,
                    tpot_ms=tpot_ms,
                ),
            )
            for pool in pools
        )

    return replace(
        fleet,
        prefill=change(fleet.prefill),
        decode=change(fleet.decode),
        mixed=change(fleet.mixed),
    )


def _build_attain(
    policy: caches.Policy,
    fleet: SimulatedFleet,
    targets: Targets,
    builds: list[Callable[[float], caches.Trace]],
) -> Callable[[float], NDArray[np.float64]]:
    """Attainment of each draw, by rate."""
    servers = [caches.build_server(policy, fleet, build) for build in builds]

    @functools.cache
    def attain(rate: float) -> NDArray[np.float64]:
        shares = [
            serve(rate).compute_attainment(targets.ttft_ms, targets.tpot_ms) for serve in servers
        ]
        return np.array(shares)

    return attain
