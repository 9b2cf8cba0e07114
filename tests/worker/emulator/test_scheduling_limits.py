"""The emulated engine's scheduler follows terms, which change while it runs."""

import itertools
import random
import time
from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest

from cleave.policy.admission import Admission
from cleave.policy.prompt_order import PrefillOrder
from cleave.policy.request_targets import RequestTargets
from cleave_worker.emulator.blocks import BlockPool
from cleave_worker.emulator.scheduler import EmulatedScheduler, EngineLimits
from cleave_worker.emulator.sequence import EngineRequest, RemotePrefill, Sequence, SequenceState
from cleave_worker.scheduling.config import RoleSchedulingConfig

BLOCK = 4
CLOCK = itertools.count()
HAND_OFF = RemotePrefill("elsewhere", "r", "127.0.0.1", 1, ())


def make(
    terms: RoleSchedulingConfig,
    num_blocks: int = 1000,
    seqs: int = 8,
    tokens: int = 32,
    clock: Callable[[], float] = time.monotonic,
) -> EmulatedScheduler:
    limits = EngineLimits(seqs, tokens, prefix_caching=False)
    scheduler = EmulatedScheduler(limits, BlockPool(num_blocks, BLOCK), clock=clock)
    scheduler.apply_scheduling(terms)
    return scheduler


def add(
    scheduler: EmulatedScheduler, prompt_len: int, max_tokens: int = 4, **more: object
) -> Sequence:
    prompt = array("I", [prompt_len] * prompt_len)
    request = EngineRequest("r", prompt, max_tokens, ignore_eos=True, **more)
    one = Sequence(request, submitted_at=next(CLOCK))
    scheduler.add(one)
    return one


def run(scheduler: EmulatedScheduler) -> list[Sequence]:
    """Everything to its end; who started, in order."""
    started: list[Sequence] = []
    for _ in range(10_000):
        step = scheduler.schedule()
        if not step.scheduled:
            return started
        started += [one for one, _ in step.scheduled if one not in started]
        scheduler.complete(step)
    pytest.fail("the scheduler does not come to an end")


@pytest.mark.parametrize(
    ("order", "lengths"),
    [
        (PrefillOrder.FCFS, [9, 3, 7, 5, 1]),
        (PrefillOrder.SJF, [3, 7, 9, 1, 5]),
        (PrefillOrder.LJF, [9, 7, 3, 5, 1]),
    ],
)
def test_prompts_start_in_the_order_of_the_terms_a_batch_at_a_time(
    order: PrefillOrder, lengths: list[int]
) -> None:
    scheduler = make(RoleSchedulingConfig(order, prefill_sched_batch=3), seqs=1)
    for length in (9, 3, 7, 5, 1):
        add(scheduler, length)
    assert [one.prompt_len for one in run(scheduler)] == lengths


def test_a_pass_keeps_to_the_terms_but_never_above_what_the_engine_was_started_with() -> None:
    scheduler = make(RoleSchedulingConfig(max_num_batched_tokens=8, max_num_seqs=2))
    for _ in range(20):
        add(scheduler, 30)
    step = scheduler.schedule()
    assert (step.num_tokens, len(step.scheduled)) == (8, 1)
    scheduler.complete(step)
    scheduler.apply_scheduling(
        RoleSchedulingConfig(max_num_batched_tokens=1_000, max_num_seqs=1_000)
    )
    assert scheduler.schedule().num_tokens == 32


def test_fewer_seats_let_those_who_run_go_on() -> None:
    scheduler = make(RoleSchedulingConfig(), tokens=64)
    for _ in range(6):
        add(scheduler, 4)
    scheduler.complete(scheduler.schedule())
    scheduler.apply_scheduling(RoleSchedulingConfig(max_num_seqs=2))
    late = add(scheduler, 4)
    assert len(scheduler.schedule().scheduled) == 6
    assert late in run(scheduler)


def test_a_long_prompt_leaves_room_for_those_who_wait_and_takes_all_of_it_alone() -> None:
    scheduler = make(RoleSchedulingConfig(long_prefill_token_threshold=8))
    add(scheduler, 100)
    step = scheduler.schedule()
    assert [count for _, count in step.scheduled] == [32]
    scheduler.complete(step)
    add(scheduler, 5)
    assert [count for _, count in scheduler.schedule().scheduled] == [8, 5]


def test_decoding_requests_are_let_in_by_what_all_will_hold() -> None:
    # 40 tokens of KV. Each request holds 8 at first and 8 + 20 - 1 at its end.
    second_at, preemptions = {}, {}
    for admission in (Admission.GREEDY, Admission.RESERVE_STATIC, Admission.RESERVE_DYNAMIC):
        scheduler = make(RoleSchedulingConfig(admission=admission), num_blocks=10)
        first = add(scheduler, 8, max_tokens=20)
        scheduler.complete(scheduler.schedule())
        second = add(scheduler, 8, max_tokens=20)
        while second.state is SequenceState.WAITING:
            num_generated = first.num_outputs
            scheduler.complete(scheduler.schedule())
        second_at[admission] = num_generated
        add(scheduler, 8, max_tokens=20)
        run(scheduler)
        preemptions[admission] = scheduler.num_preemptions
    # Static: 27 fit beside the 9 of the first. Dynamic: both fit until the first has ended.
    assert second_at == {
        Admission.GREEDY: 1,
        Admission.RESERVE_STATIC: 1,
        Admission.RESERVE_DYNAMIC: 16,
    }
    assert preemptions[Admission.GREEDY] > preemptions[Admission.RESERVE_STATIC] > 0
    assert preemptions[Admission.RESERVE_DYNAMIC] == 0


def test_prompts_that_decode_elsewhere_reserve_nothing() -> None:
    scheduler = make(RoleSchedulingConfig(admission=Admission.RESERVE_STATIC), num_blocks=10)
    for _ in range(4):
        add(scheduler, 8, max_tokens=1_000, do_remote_decode=True)
    assert len(scheduler.schedule().scheduled) == 4


def test_preemption_spares_who_was_preempted_often() -> None:
    def preempted(limit: int) -> list[int]:
        scheduler = make(RoleSchedulingConfig(preemption_limit=limit), num_blocks=60)
        sent = [add(scheduler, 8, max_tokens=40 + 5 * n) for n in range(6)]
        run(scheduler)
        return [one.num_preemptions for one in sent]

    assert preempted(0) == [0, 0, 0, 0, 0, 2]
    assert preempted(1) == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("seed", range(30))
def test_terms_that_change_at_any_time_lose_no_request_and_change_no_token(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks = rng.randrange(14, 40)
    scheduler = make(
        RoleSchedulingConfig(), num_blocks, seqs=rng.randrange(1, 9), tokens=rng.choice([3, 16, 64])
    )
    added: list[Sequence] = []
    aborted: set[Sequence] = set()
    for turn in range(5_000):
        if len(added) < 30 and rng.random() < 0.4:
            pulls = rng.random() < 0.2
            added.append(
                add(
                    scheduler,
                    rng.randrange(1, 30),
                    rng.randrange(1, 20),
                    handoff=HAND_OFF if pulls else None,
                    do_remote_decode=not pulls and rng.random() < 0.2,
                )
            )
            added[-1].request = replace(added[-1].request, id=str(turn))
        if rng.random() < 0.2:
            scheduler.apply_scheduling(draw_terms(rng))
        step = scheduler.schedule()
        for one in step.loads:
            scheduler.recompute(one)
        if rng.random() < 0.02 and added:
            aborted.add(victim := rng.choice(added))
            scheduler.abort(victim)
        for output in scheduler.complete(step):
            if output.finish and output.sequence.request.do_remote_decode:
                scheduler.release(output.sequence.request.id)
        if not step.scheduled and not step.loads and len(added) == 30:
            break
    assert scheduler.num_waiting == len(scheduler.running) == 0, f"seed {seed}"
    assert scheduler.pool.num_free == num_blocks
    for one in set(added) - aborted:
        plain = make(RoleSchedulingConfig())
        alone = add(plain, one.prompt_len, one.request.max_tokens)
        run(plain)
        assert one.tokens == alone.tokens, f"seed {seed}"


def draw_terms(rng: random.Random) -> RoleSchedulingConfig:
    return RoleSchedulingConfig(
        rng.choice(list(PrefillOrder)),
        rng.randrange(1, 6),
        rng.choice([0, 1, 4]),
        rng.choice([0, 2, 8]),
        rng.choice([0, 3]),
        rng.choice(list(Admission)),
        rng.choice([0, 1, 2]),
    )


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def serve(scheduler: EmulatedScheduler, clock: Clock, ms: float) -> list[Sequence]:
    """An iteration that takes so long; whose tokens it computed."""
    step = scheduler.schedule()
    clock.now += ms / 1000
    for output in scheduler.complete(step):
        output.sequence.first_token_at = output.sequence.first_token_at or clock.now
    return [one for one, _ in step.scheduled]


def submit(scheduler: EmulatedScheduler, clock: Clock, **more: object) -> Sequence:
    one = add(scheduler, 8, **more)
    one.submitted_at = clock.now
    return one


def test_requests_that_miss_their_target_wait_behind_those_that_meet_it() -> None:
    clock = Clock()
    scheduler = make(RoleSchedulingConfig(PrefillOrder.IN_TIME), seqs=1, clock=clock)
    targets = RequestTargets(ttft_left_ms=1_000.0, tpot_ms=50.0)
    first = submit(scheduler, clock, targets=targets, max_tokens=30)
    late = [submit(scheduler, clock, targets=targets) for _ in range(2)]
    while first.state is not SequenceState.FINISHED:
        serve(scheduler, clock, 40.0)
    fresh = submit(scheduler, clock, targets=targets)
    without = submit(scheduler, clock)
    assert run(scheduler) == [fresh, without, *late]


def test_a_prompt_that_cannot_be_computed_in_time_counts_as_late() -> None:
    clock = Clock()
    scheduler = make(RoleSchedulingConfig(PrefillOrder.IN_TIME), seqs=1, clock=clock)
    for length in range(40):
        add(scheduler, 1 + length % 30, max_tokens=1)
        serve(scheduler, clock, 10.0 * (1 + length % 30))
    # 10 ms per token.
    long = submit(scheduler, clock, targets=RequestTargets(70.0, 50.0))
    short = submit(scheduler, clock, targets=RequestTargets(90.0, 50.0))
    pulled = submit(scheduler, clock, targets=RequestTargets(60.0, 50.0), handoff=HAND_OFF)
    scheduler.schedule()
    assert short.state is SequenceState.RUNNING
    assert scheduler.num_waiting == 2
    del long, pulled


def test_a_request_joins_only_if_iterations_stay_within_its_tpot() -> None:
    clock = Clock()
    terms = RoleSchedulingConfig(admission=Admission.WITHIN_TPOT)
    scheduler = make(terms, clock=clock)
    targets = RequestTargets(tpot_ms=50.0)

    def decode_ms() -> float:
        # 1 ms per block of 4 tokens that is in use.
        return float(scheduler.pool.num_blocks - scheduler.pool.num_free)

    first = submit(scheduler, clock, targets=targets, max_tokens=150)
    while first.num_outputs < 120:
        serve(scheduler, clock, decode_ms())
    # 32 blocks are in use. A pulled prompt costs no time but in iterations.
    joined = [submit(scheduler, clock, targets=targets, handoff=HAND_OFF) for _ in range(12)]
    scheduler.schedule()
    # 2 blocks each, and 47.5 ms: 95 % of the target.
    assert sum(one.state is SequenceState.LOADING for one in joined) == 7


def test_an_engine_without_work_admits_above_the_target() -> None:
    clock = Clock()
    terms = RoleSchedulingConfig(admission=Admission.WITHIN_TPOT)
    scheduler = make(terms, clock=clock)
    targets = RequestTargets(tpot_ms=1.0)
    for _ in range(3):
        submit(scheduler, clock, targets=targets, max_tokens=50)
    while scheduler.num_waiting or scheduler.running:
        serve(scheduler, clock, 40.0)
    assert scheduler.num_preemptions == 0
