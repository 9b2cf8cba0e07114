"""Shared simulated fleets and traces."""

import math
import random
from dataclasses import replace

import numpy as np

from cleave.perf import named_profiles
from cleave.perf.published import distserve
from cleave.perf.timing import EngineTiming
from cleave.simulator.fleet import (
    Admission,
    Batching,
    DispatchPolicy,
    FlipThresholds,
    PrefillOrder,
    SimulatedEngine,
    SimulatedFleet,
    SimulatedPool,
    SimulatedTransfer,
)
from cleave.simulator.trace import Trace

OPT_13B = named_profiles.to_timing(distserve.FITS["distserve/opt-13b/tp1"])


def fixed_timing(prompt_ms: float = 10.0, decode_ms: float = 1.0, stages: int = 1) -> EngineTiming:
    """A constant `prompt_ms` per prompt iteration and `decode_ms` per decode iteration."""
    return EngineTiming(1.0, (prompt_ms, prompt_ms), 0.0, (decode_ms, decode_ms), (0.0,), stages)


def draw_trace(
    count: int, rate: float, seed: int = 0, prompt: int | None = None, output: int | None = None
) -> Trace:
    """Poisson arrivals at `rate` req/s; lengths fixed where given."""
    random_ = np.random.default_rng(seed)
    return Trace(
        np.cumsum(random_.exponential(1000 / rate, count)),
        np.full(count, prompt) if prompt else random_.integers(20, 600, count),
        np.full(count, output) if output else random_.integers(1, 200, count),
    )


def draw_case(seed: int) -> tuple[SimulatedFleet, Trace]:
    """A random fleet and short trace: all policies, little or ample memory, one to three stages."""
    draw = random.Random(seed)
    kind, tight = draw.choice(["pd", "m", "p", "d", "pdm", "pm"]), draw.random() < 0.6

    def pools(role: str) -> tuple[SimulatedPool, ...]:
        if role not in kind:
            return ()
        return tuple(
            SimulatedPool(_draw_engine(draw, tight), draw.randint(1, 2))
            for _ in range(draw.randint(1, 2))
        )

    fleet = SimulatedFleet(
        pools("p"),
        pools("d"),
        pools("m"),
        SimulatedTransfer(
            is_shared=draw.random() < 0.5,
            latency_ms=draw.choice([0.0, 2.0]),
            token_ms=draw.choice([0.0, 0.5]),
            overlapped_token_ms=draw.choice([0.0, 0.2]),
            overlap_from_tokens=draw.choice([10, 1 << 40]),
            receiver_ms=draw.choice([0.0, 3.0]),
            receiver_token_ms=draw.choice([0.0, 0.1]),
        ),
        draw.choice(
            [
                DispatchPolicy.SHORTEST_WAIT,
                DispatchPolicy.PENDING_TOKENS,
                DispatchPolicy.ROUND_ROBIN,
            ]
        ),
        dispatch_ms=draw.choice([0.0, 1.7]),
        first_token_by_decode=draw.random() < 0.6,
        defers_dispatch=draw.random() < 0.25,
    )
    if random.Random(f"asynchronous {seed}").random() < 0.4:
        fleet = schedule_ahead(fleet)
    count, gap_ms = draw.choice([1, 5, 20, 40]), draw.choice([1.0, 10.0, 100.0])
    trace = Trace(
        np.cumsum([draw.expovariate(1 / gap_ms) for _ in range(count)]),
        np.array([draw.randint(1, 60) for _ in range(count)]),
        np.array([draw.randint(1, 40) for _ in range(count)]),
    )
    predictions = random.Random(f"foretold {seed}")
    if predictions.random() < 0.3:
        predicted = np.array([predictions.randint(1, 50) for _ in range(count)])
        trace = replace(trace, predicted_tokens=predicted)
    if not fleet.defers_dispatch and draw.random() < 0.5:
        thresholds = FlipThresholds(
            draw.uniform(1.0, 40.0), draw.uniform(0.1, 0.9), 0.0, 900.0, 3_000.0
        )
        return replace(fleet, flipping=thresholds), trace
    return fleet, trace


def give_ranks(fleet: SimulatedFleet, seed: int) -> SimulatedFleet:
    """The fleet without flips; instances of one pipeline stage have data-parallel ranks."""
    draw = random.Random(f"ranks {seed}")

    def change(pools: tuple[SimulatedPool, ...]) -> tuple[SimulatedPool, ...]:
        return tuple(
            replace(pool, engine=replace(pool.engine, ranks=draw.choice([1, 2, 3, 5])))
            if pool.engine.timing.stages == 1
            else pool
            for pool in pools
        )

    prefill, decode, mixed = map(change, (fleet.prefill, fleet.decode, fleet.mixed))
    return replace(fleet, prefill=prefill, decode=decode, mixed=mixed, flipping=None)


def schedule_ahead(fleet: SimulatedFleet) -> SimulatedFleet:
    """The fleet with engines that schedule one iteration ahead."""

    def change(pools: tuple[SimulatedPool, ...]) -> tuple[SimulatedPool, ...]:
        return tuple(replace(pool, engine=_schedule_ahead(pool.engine)) for pool in pools)

    return replace(
        fleet, prefill=change(fleet.prefill), decode=change(fleet.decode), mixed=change(fleet.mixed)
    )


def _schedule_ahead(engine: SimulatedEngine) -> SimulatedEngine:
    return replace(engine, timing=replace(engine.timing, schedules_ahead=True))


def slow_down(fleet: SimulatedFleet, factor: float) -> SimulatedFleet:
    """The fleet with iterations that take `factor` times as long."""

    def slow(pools: tuple[SimulatedPool, ...]) -> tuple[SimulatedPool, ...]:
        return tuple(replace(pool, engine=_slow_engine(pool.engine, factor)) for pool in pools)

    return replace(
        fleet, prefill=slow(fleet.prefill), decode=slow(fleet.decode), mixed=slow(fleet.mixed)
    )


def _slow_engine(engine: SimulatedEngine, factor: float) -> SimulatedEngine:
    timing = engine.timing
    slower = replace(
        timing,
        prompt_ms=tuple(each * factor for each in timing.prompt_ms),
        decode_ms=tuple(each * factor for each in timing.decode_ms),
    )
    return replace(engine, timing=slower)


def _draw_engine(draw: random.Random, tight: bool) -> SimulatedEngine:
    points = draw.randint(2, 6)
    timing = EngineTiming(
        prompt_step=draw.choice([1.0, 16.0, 100.0]),
        prompt_ms=tuple(sorted(draw.uniform(1, 30) for _ in range(draw.randint(2, 4)))),
        prompt_square_ms=draw.choice([0.0, 1e-3]),
        decode_ms=tuple(sorted(draw.uniform(1, 20) for _ in range(points))),
        decode_context_ms=tuple(draw.uniform(0, 0.05) for _ in range(draw.randint(1, points))),
        stages=draw.choice([1, 1, 1, 2, 3]),
        hop_ms=draw.choice([0.0, 0.3]),
        hop_token_ms=draw.choice([0.0, 0.01]),
        mixed_context_ms=draw.choice([(), (0.02,), (0.0, 0.01, 0.06)]),
    )
    return SimulatedEngine(
        timing,
        kv_capacity_tokens=draw.randint(60, 200) if tight else 100_000,
        kv_block_size=draw.choice([1, 4, 16]),
        batching=draw.choice(list(Batching)),
        max_num_seqs=draw.choice([1, 3, 8, 256]),
        max_num_batched_tokens=draw.choice([8, 40, 64, 8192]),
        order=draw.choice(list(PrefillOrder)),
        prefill_sched_batch=draw.choice([2, 4, 16]),
        admission=draw.choice(list(Admission)),
        ttft_ms=draw.choice([math.inf, 1e-3, 30.0, 100.0]),
        tpot_ms=draw.choice([math.inf, 1e-3, 10.0, 20.0]),
    )
