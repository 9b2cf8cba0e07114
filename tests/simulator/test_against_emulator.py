"""The simulator against the emulated engine's own scheduler, run in virtual time."""

import heapq
import itertools
import random
from array import array
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from cleave.policy.prompt_order import HANDOFF_SHARE
from cleave.policy.request_targets import RequestTargets
from cleave.simulator.fleet import (
    Admission,
    PrefillOrder,
    SimulatedEngine,
    SimulatedFleet,
    SimulatedPool,
    SimulatedTransfer,
)
from cleave.simulator.run import simulate
from cleave.simulator.trace import Trace
from cleave_worker.emulator.blocks import BlockPool
from cleave_worker.emulator.host_memory import HostMemory
from cleave_worker.emulator.scheduler import EmulatedScheduler, EngineLimits, EngineStep
from cleave_worker.emulator.sequence import EngineRequest, RemotePrefill, Sequence, SequenceState
from cleave_worker.scheduling.config import RoleSchedulingConfig

from tests.simulator.test_prefix_caches import build_engine, build_trace
from tests.support.fleets import OPT_13B, draw_trace

LATENCY_MS, TOKEN_MS = 1.0, 0.03


@dataclass
class Emulated:
    """What `emulator.Engine._run` does with its scheduler, without a clock."""

    scheduler: EmulatedScheduler
    step: EngineStep | None = None


@dataclass
class EmulatedFleet:
    engines: list[Emulated]
    now: float = 0.0
    events: list[tuple[float, int, int, object]] = field(default_factory=list)
    sequence: itertools.count = field(default_factory=itertools.count)
    first: dict[str, float] = field(default_factory=dict)
    end: dict[str, float] = field(default_factory=dict)

    def at(self, time: float, order: int, what: object) -> None:
        heapq.heappush(self.events, (time, order, next(self.sequence), what))

    def run(self) -> None:
        while self.events:
            self.now, _, _, what = heapq.heappop(self.events)
            what()

    def submit(self, engine: Emulated, request: EngineRequest) -> None:
        engine.scheduler.add(Sequence(request, self.now / 1000))
        self.wake(engine)

    def wake(self, engine: Emulated) -> None:
        self.at(self.now, 1, lambda: None if engine.step else self.form(engine))

    def form(self, engine: Emulated) -> None:
        step = engine.scheduler.schedule()
        for sequence in step.loads:
            tokens = len(sequence.blocks) * engine.scheduler.pool.block_size
            pulled = self.now + LATENCY_MS + tokens * TOKEN_MS
            self.at(pulled, 0, lambda s=sequence: self.load(engine, s))
        if step.scheduled:
            engine.step = step
            ms = OPT_13B.predict_iteration_ms(
                step.chunks, step.num_decode_tokens, step.context_tokens
            )
            self.at(self.now + ms, 1, lambda: self.complete(engine))

    def load(self, engine: Emulated, sequence: Sequence) -> None:
        engine.scheduler.load(sequence, [0] * len(sequence.blocks))
        source = self.engines[0]
        source.scheduler.release(sequence.request.id)
        self.wake(source)
        self.wake(engine)

    def complete(self, engine: Emulated) -> None:
        step, engine.step = engine.step, None
        for sequence, _, finish in engine.scheduler.complete(step):
            name = sequence.request.id
            sequence.first_token_at = sequence.first_token_at or self.now / 1000
            if sequence.request.do_remote_decode:
                self.at(self.now, 0, lambda n=name: self.hand_over(n))
                continue
            self.first.setdefault(name, self.now)
            if finish:
                self.end[name] = self.now
        self.form(engine)

    def hand_over(self, name: str) -> None:
        request = self.requests[name]
        left_ms = request.targets.ttft_left_ms - (self.now - self.arrivals[int(name)])
        targets = request.targets._replace(ttft_left_ms=left_ms)
        self.submit(self.engines[1], replace(request, targets=targets))


def emulate(trace: Trace, engines: list[SimulatedEngine]) -> tuple[np.ndarray, np.ndarray, int]:
    """First token and end of each request, and how many were preempted."""
    fleet = EmulatedFleet(
        [
            Emulated(
                EmulatedScheduler(
                    EngineLimits(e.max_num_seqs, e.max_num_batched_tokens),
                    BlockPool(e.kv_capacity_tokens // e.kv_block_size, e.kv_block_size),
                    clock=lambda: fleet.now / 1000,
                )
            )
            for e in engines
        ]
    )
    for emulated, e in zip(fleet.engines, engines, strict=True):
        config = RoleSchedulingConfig(e.order, admission=e.admission)
        emulated.scheduler.apply_scheduling(config)
    split = len(engines) == 2
    hand_off = RemotePrefill("", "", "", 0, ()) if split else None
    fleet.requests, fleet.arrivals = {}, trace.arrival_ms
    targets = RequestTargets(engines[0].ttft_ms, engines[0].tpot_ms)
    reserved = RequestTargets((1 - HANDOFF_SHARE) * targets.ttft_left_ms, targets.tpot_ms)
    rows = zip(trace.arrival_ms, trace.prompt_tokens, trace.output_tokens, strict=True)
    for number, (arrival, prompt, output) in enumerate(rows):
        # No two begin alike.
        name, tokens = str(number), array("I", range(number << 16, (number << 16) + prompt))
        whole = EngineRequest(
            name, tokens, int(output), ignore_eos=True, handoff=hand_off, targets=targets
        )
        fleet.requests[name] = whole
        entry = (
            EngineRequest(name, tokens, 1, ignore_eos=True, do_remote_decode=True, targets=reserved)
            if split
            else whole
        )
        fleet.at(arrival, 0, lambda r=entry: fleet.submit(fleet.engines[0], r))
    fleet.run()
    names = [str(number) for number in range(len(trace))]
    return (
        np.array([fleet.first[name] for name in names]),
        np.array([fleet.end[name] for name in names]),
        sum(engine.scheduler.num_preemptions for engine in fleet.engines),
    )


@pytest.mark.parametrize("budget", [64, 512, 8192])
@pytest.mark.parametrize(
    ("capacity", "max_num_seqs", "rate"), [(66_144, 256, 4.0), (66_144, 8, 1.0), (2_400, 256, 2.0)]
)
def test_a_mixed_instance_batches_as_the_emulated_engine_does(
    capacity: int, max_num_seqs: int, rate: float, budget: int
) -> None:
    engine = SimulatedEngine(
        OPT_13B, capacity, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
    )
    trace = draw_trace(150, rate, seed=budget)
    first, end, preemptions = emulate(trace, [engine])
    outcome = simulate(SimulatedFleet(mixed=(SimulatedPool(engine, 1),)), trace)
    np.testing.assert_allclose(outcome.first_token_ms, first, rtol=0, atol=1e-6)
    np.testing.assert_allclose(outcome.end_ms, end, rtol=0, atol=1e-6)
    assert outcome.num_preemptions.sum() == preemptions
    assert preemptions > 0 or capacity > 2_400


@pytest.mark.parametrize("host_blocks", [100, 150, 1_000])
def test_host_memory_has_of_each_prompt_what_that_of_the_emulated_engine_has(
    host_blocks: int,
) -> None:
    draw, size, total = random.Random(host_blocks), 4, 60
    texts = ["".join(draw.choice("ab") for _ in range(draw.randint(2, 9))) for _ in range(20)]
    prompts = [draw.choice(texts) + draw.choice("abc") * draw.randint(0, 3) for _ in range(300)]
    rows = [(size * len(text) + 1, text) for text in prompts]
    trace = build_trace(rows, outputs=5)
    engine = build_engine(total * size, host_capacity_tokens=host_blocks * size)
    outcome = simulate(SimulatedFleet(mixed=(SimulatedPool(engine, 1),)), trace)
    host = HostMemory(host_blocks)
    scheduler = EmulatedScheduler(EngineLimits(8, 8192), BlockPool(total, size), host=host)
    cached, loaded = [], []
    for number, text in enumerate(prompts):
        # What follows the blocks is the request's own.
        tokens = array("I", [ord(each) for each in text for _ in range(size)] + [1_000 + number])
        sequence = Sequence(EngineRequest(str(number), tokens, 5, ignore_eos=True))
        scheduler.add(sequence)
        while sequence.state is not SequenceState.FINISHED:
            step = scheduler.schedule()
            for each in step.loads:
                scheduler.load_prefix(each, each.on_host)
            scheduler.complete(step)
        cached.append(sequence.cached_tokens)
        loaded.append(sequence.pulled_tokens)
    assert outcome.cached_tokens.tolist() == cached
    assert outcome.loaded_tokens.tolist() == loaded
    assert outcome.loaded_tokens.any()


@pytest.mark.parametrize("budget", [64, 512, 8192])
@pytest.mark.parametrize(
    ("num_held", "room"), [(66_144, 66_144), (1_200, 66_144), (66_144, 3_000), (1_200, 2_000)]
)
def test_a_pair_hands_over_as_two_emulated_engines_do(
    num_held: int, room: int, budget: int
) -> None:
    prefill = SimulatedEngine(OPT_13B, num_held, max_num_batched_tokens=budget)
    decode = SimulatedEngine(OPT_13B, room, max_num_batched_tokens=budget)
    transfer = SimulatedTransfer(is_shared=False, latency_ms=LATENCY_MS, token_ms=TOKEN_MS)
    trace = draw_trace(150, 3.0, seed=budget)
    first, end, preemptions = emulate(trace, [prefill, decode])
    outcome = simulate(
        SimulatedFleet(
            (SimulatedPool(prefill, 1),), (SimulatedPool(decode, 1),), transfer=transfer
        ),
        trace,
    )
    np.testing.assert_allclose(outcome.first_token_ms, first, rtol=0, atol=1e-6)
    np.testing.assert_allclose(outcome.end_ms, end, rtol=0, atol=1e-6)
    assert outcome.num_preemptions.sum() == preemptions


@pytest.mark.parametrize(("is_split", "rate"), [(False, 18.0), (False, 45.0), (True, 45.0)])
def test_under_overload_engines_keep_the_targets_that_are_simulated(
    is_split: bool, rate: float
) -> None:
    ttft_ms, tpot_ms = 2_500.0, 60.0
    by_targets = SimulatedEngine(
        OPT_13B,
        66_144,
        max_num_batched_tokens=2_048,
        order=PrefillOrder.IN_TIME,
        admission=Admission.WITHIN_TPOT,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
    )
    trace = draw_trace(700, rate, seed=3)

    def attain(engine: SimulatedEngine) -> tuple[float, float]:
        """Share within both targets of the emulated engines and of the simulated ones."""
        pool, outputs = (SimulatedPool(engine, 1),), np.maximum(trace.output_tokens - 1, 1)
        fleet = SimulatedFleet(mixed=pool)
        if is_split:
            transfer = SimulatedTransfer(LATENCY_MS, TOKEN_MS, is_shared=False)
            fleet = SimulatedFleet(pool, pool, transfer=transfer)
        first, end, _ = emulate(trace, [engine] * (1 + is_split))
        outcome = simulate(fleet, trace)
        return tuple(
            float(np.mean((ttft <= ttft_ms) & (tpot <= tpot_ms)))
            for ttft, tpot in (
                (first - trace.arrival_ms, (end - first) / outputs),
                (outcome.ttft_ms, outcome.tpot_ms),
            )
        )

    plain = replace(by_targets, order=PrefillOrder.FCFS, admission=Admission.GREEDY)
    emulated, simulated = attain(by_targets)
    assert simulated > attain(plain)[1] + 0.1
    assert emulated == pytest.approx(simulated, abs=0.08)
