"""The scheduler's invariants, driven without time or I/O."""

import random
from array import array

import pytest

from cleave_worker.emulator.blocks import BlockPool
from cleave_worker.emulator.host_memory import HostMemory
from cleave_worker.emulator.scheduler import EmulatedScheduler, EngineLimits
from cleave_worker.emulator.sequence import (
    EngineRequest,
    FinishReason,
    RemotePrefill,
    Sequence,
    SequenceState,
)

BLOCK = 4
HAND_OFF = RemotePrefill("elsewhere", "r", "127.0.0.1", 1, ())


def make(
    num_blocks: int = 1000,
    seqs: int = 8,
    tokens: int = 32,
    cache: bool = True,
    host: HostMemory | None = None,
) -> EmulatedScheduler:
    pool = BlockPool(num_blocks, BLOCK)
    return EmulatedScheduler(EngineLimits(seqs, tokens, cache), pool, host=host)


def sequence(prompt: list[int], max_tokens: int = 10, **more: object) -> Sequence:
    return Sequence(EngineRequest("r", array("I", prompt), max_tokens, **more))


def run(scheduler: EmulatedScheduler) -> None:
    for _ in range(10_000):
        step = scheduler.schedule()
        if not step.scheduled:
            return
        scheduler.complete(step)
    pytest.fail("the scheduler does not come to an end")


def alone(prompt: list[int], **more: object) -> list[int]:
    one = sequence(prompt, **more)
    scheduler = make()
    scheduler.add(one)
    run(scheduler)
    return list(one.tokens)


@pytest.mark.parametrize("seed", range(60))
def test_any_load_on_scarce_blocks_leaks_nothing_and_changes_no_token(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks = rng.randrange(14, 30)
    limits = rng.randrange(1, 9), rng.choice([3, 16, 64])
    host = HostMemory(rng.choice([3, 100])) if rng.random() < 0.5 else None
    scheduler = make(num_blocks, *limits, cache=rng.random() < 0.5, host=host)
    stem = [rng.randrange(50) for _ in range(20)]
    todo = [
        sequence(
            [*stem[: rng.randrange(20)], *(rng.randrange(50) for _ in range(rng.randrange(1, 20)))],
            max_tokens=rng.randrange(1, 12),
            handoff=HAND_OFF if rng.random() < 0.2 else None,
            ignore_eos=rng.random() < 0.5,
        )
        for _ in range(25)
    ]
    added: list[Sequence] = []
    loading: list[Sequence] = []
    aborted: set[Sequence] = set()
    for _ in range(5000):
        if todo and rng.random() < 0.4:
            added.append(todo.pop())
            scheduler.add(added[-1])
        step = scheduler.schedule()
        loading += step.loads
        assert step.num_tokens == sum(count for _, count in step.scheduled) <= limits[1]
        assert len(scheduler.running) <= limits[0]
        owned = [block for one in scheduler.running for block in one.blocks]
        assert scheduler.pool.num_free + len(set(owned)) <= num_blocks
        if rng.random() < 0.02 and added:
            aborted.add(victim := rng.choice(added))
            scheduler.abort(victim)
            loading = [one for one in loading if one is not victim]
        if loading and (rng.random() < 0.3 or not step.scheduled):
            deliver(scheduler, loading.pop(), rng)
        elif not step.scheduled and not todo:
            break
        scheduler.complete(step)
        alive = [one for one in added if one.state is not SequenceState.FINISHED]
        assert scheduler.pending_prompt_tokens == sum(one.pending_prompt_tokens for one in alive)
    assert not todo
    assert scheduler.num_waiting == 0
    assert scheduler.running == []
    assert scheduler.pool.num_free == num_blocks
    for one in set(added) - aborted:
        request = one.request
        more = {"max_tokens": request.max_tokens, "ignore_eos": request.ignore_eos}
        assert list(one.tokens) == alone(list(request.prompt), **more), f"seed {seed}"


def deliver(scheduler: EmulatedScheduler, one: Sequence, rng: random.Random) -> None:
    """End a pull: with the KV that another engine computed, or in a failure."""
    if one.on_host:
        scheduler.load_prefix(one, one.on_host)
        return
    if rng.random() < 0.3:
        scheduler.recompute(one)
        return
    owner = make()
    finished = sequence(list(one.request.prompt), max_tokens=1, do_remote_decode=True)
    owner.add(finished)
    run(owner)
    contents = owner.get_leased_contents("r")
    assert contents is not None
    first = one.cached_tokens // BLOCK
    scheduler.load(one, [contents[block] for block in finished.blocks[first:]])


def test_what_the_pool_has_evicted_is_copied_back_and_gives_the_same_tokens() -> None:
    scheduler = make(num_blocks=12, host=HostMemory(100))
    prompt = list(range(22))
    for tokens in (prompt, [7] * 40, prompt):
        one = sequence(tokens, max_tokens=3, ignore_eos=True)
        scheduler.add(one)
        step = scheduler.schedule()
        if not step.scheduled:
            scheduler.load_prefix(one, one.on_host)
        else:
            scheduler.complete(step)
        run(scheduler)
    assert (one.cached_tokens, one.pulled_tokens) == (4, 16), "one block is left in the pool"
    assert list(one.tokens) == alone(prompt, max_tokens=3, ignore_eos=True)
    assert scheduler.pool.num_free == 12
    assert scheduler.pending_prompt_tokens == 0


def test_sequences_start_in_order_of_arrival() -> None:
    scheduler = make(seqs=2)
    sequences = [sequence([n] * 5, max_tokens=3, ignore_eos=True) for n in range(6)]
    for one in sequences:
        scheduler.add(one)
    started: list[Sequence] = []
    while (step := scheduler.schedule()).scheduled:
        started += [one for one, _ in step.scheduled if one not in started]
        scheduler.complete(step)
    assert started == sequences


def test_a_long_prompt_is_computed_in_chunks_beside_running_decodes() -> None:
    scheduler = make(tokens=8)
    short = sequence([1, 2], max_tokens=9, ignore_eos=True)
    long = sequence([3] * 20, ignore_eos=True)
    scheduler.add(short)
    scheduler.complete(scheduler.schedule())
    scheduler.add(long)
    counts = []
    for _ in range(4):
        step = scheduler.schedule()
        counts.append([count for _, count in step.scheduled])
        scheduler.complete(step)
    assert counts == [[1, 7], [1, 7], [1, 6], [1, 1]]


def test_a_prompt_that_is_computed_in_chunks_waits_for_room_for_all_of_it() -> None:
    scheduler = make(num_blocks=10, tokens=8)
    short, long = sequence([0] * 8, max_tokens=3), sequence([1] * 36)
    scheduler.add(short)
    scheduler.add(long)
    batches = []
    for _ in range(4):
        step = scheduler.schedule()
        batches.append([(each is long, count) for each, count in step.scheduled])
        scheduler.complete(step)
    assert batches == [[(False, 8)], [(False, 1)], [(False, 1)], [(True, 8)]]


def test_a_prompt_that_waits_for_room_keeps_nothing_in_the_cache() -> None:
    scheduler = make(num_blocks=4, tokens=64)
    pool = scheduler.pool
    older, newer = pool.allocate(1), pool.allocate(1)
    waiting = sequence([0] * 16)
    pool.publish(older[0], waiting.compute_block_keys(1, BLOCK)[0])
    pool.publish(newer[0], b"other")
    pool.free(older)
    pool.free(newer)
    pool.allocate(1)
    scheduler.add(waiting)
    assert not scheduler.schedule().scheduled
    pool.allocate(2)
    assert pool.count_cached([b"other"]) == 1, "it was freed last"


def test_the_cost_of_a_step_distinguishes_chunks_from_single_tokens() -> None:
    scheduler = make(tokens=64)
    scheduler.add(sequence([1] * 9, ignore_eos=True))
    scheduler.complete(scheduler.schedule())
    scheduler.add(sequence([2] * 5))
    step = scheduler.schedule()
    assert (step.num_decode_tokens, step.context_tokens, step.chunks) == (1, 10, [(0, 5)])


def test_the_youngest_sequence_makes_room_and_its_tokens_stay_the_same() -> None:
    prompts = [[n] * 12 for n in range(4)]
    scheduler = make(num_blocks=14, cache=False)
    sequences = [sequence(prompt, max_tokens=30, ignore_eos=True) for prompt in prompts]
    for one in sequences:
        scheduler.add(one)
    run(scheduler)
    assert scheduler.num_preemptions > 0
    assert sequences[0].num_preemptions == 0
    assert sequences[-1].num_preemptions > 0
    for one, prompt in zip(sequences, prompts, strict=True):
        assert list(one.tokens) == alone(prompt, max_tokens=30, ignore_eos=True)


def test_a_preempted_sequence_goes_on_before_later_arrivals() -> None:
    scheduler = make(num_blocks=8, tokens=64, cache=False)
    first, second = (sequence([n] * 12, max_tokens=18, ignore_eos=True) for n in range(2))
    late = sequence([9] * 12, max_tokens=2, ignore_eos=True)
    for one in (first, second, late):
        scheduler.add(one)
    resumed = False
    while (step := scheduler.schedule()).scheduled:
        scheduled = [one for one, _ in step.scheduled]
        resumed = resumed or (second.num_preemptions > 0 and second in scheduled)
        assert resumed or late not in scheduled
        scheduler.complete(step)
    assert resumed
    assert late.state is SequenceState.FINISHED


def test_a_shared_prefix_is_computed_once() -> None:
    scheduler = make()
    stem = list(range(17))
    first, second = sequence([*stem, 1]), sequence([*stem, 2])
    scheduler.add(first)
    run(scheduler)
    scheduler.add(second)
    step = scheduler.schedule()
    assert second.cached_tokens == 16
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (36, 16)
    assert [count for _, count in step.scheduled] == [2]
    scheduler.complete(step)
    run(scheduler)
    assert list(second.tokens) == alone([*stem, 2])


def test_a_wholly_cached_prompt_still_computes_its_last_block() -> None:
    scheduler = make()
    for _ in range(2):
        one = sequence([7] * 16)
        scheduler.add(one)
        run(scheduler)
    assert one.cached_tokens == 12
    assert list(one.tokens) == alone([7] * 16)


def test_the_prefix_cache_can_be_switched_off() -> None:
    scheduler = make(cache=False)
    for _ in range(2):
        one = sequence([7] * 16)
        scheduler.add(one)
        run(scheduler)
    assert one.cached_tokens == 0
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (32, 0)


def pulled(contents: list[int] | None = None, edit=None) -> list[int]:
    """Tokens of a prompt whose KV came from elsewhere."""
    prompt = list(range(22))
    owner = make()
    finished = sequence(prompt, max_tokens=1, do_remote_decode=True)
    owner.add(finished)
    run(owner)
    found = owner.get_leased_contents("r")
    assert found is not None
    contents = [found[block] for block in finished.blocks]
    reader = make()
    one = sequence(prompt, ignore_eos=True, handoff=HAND_OFF)
    reader.add(one)
    assert reader.schedule().loads == [one]
    assert reader.pending_prompt_tokens == 1
    reader.load(one, edit(contents) if edit else contents)
    step = reader.schedule()
    assert [count for _, count in step.scheduled] == [1], "only the last prompt token"
    reader.complete(step)
    run(reader)
    return list(one.tokens)[22:]


def test_pulled_kv_leads_to_the_tokens_of_a_colocated_run() -> None:
    assert pulled() == alone(list(range(22)), ignore_eos=True)[22:]


@pytest.mark.parametrize("block", range(6))
def test_one_wrong_block_changes_the_tokens(block: int) -> None:
    def edit(contents: list[int]) -> list[int]:
        contents[block] ^= 1
        return contents

    wrong, right = pulled(edit=edit), pulled()
    assert sum(a != b for a, b in zip(wrong, right, strict=True)) >= len(right) - 1


@pytest.mark.parametrize(
    "edit",
    [
        lambda contents: [*contents[1::-1], *contents[2:]],
        lambda contents: [*contents[:-1], 0],
        lambda contents: [0, *contents[:-1]],
    ],
    ids=["swapped", "truncated", "shifted"],
)
def test_misplaced_blocks_change_the_tokens(edit) -> None:
    assert pulled(edit=edit) != pulled()


def test_blocks_of_a_held_prefill_stay_until_released() -> None:
    scheduler = make(num_blocks=10)
    scheduler.add(sequence([1] * 9, max_tokens=1, do_remote_decode=True))
    run(scheduler)
    assert (scheduler.num_leased, scheduler.pool.num_free) == (1, 7)
    assert scheduler.release("r")
    assert not scheduler.release("r")
    assert (scheduler.num_leased, scheduler.pool.num_free) == (0, 10)


def test_a_sequence_that_ends_early_is_stopped_and_may_not_before_min_tokens() -> None:
    finishes: dict[int, tuple[FinishReason | None, int]] = {}
    for minimum in (0, 600):
        scheduler = make(num_blocks=1000)
        one = sequence([5, 6], max_tokens=1500, min_tokens=minimum)
        scheduler.add(one)
        last = None
        while (step := scheduler.schedule()).scheduled:
            for output in scheduler.complete(step):
                last = output.finish
        finishes[minimum] = last, one.num_outputs
    assert finishes[0][0] is FinishReason.STOP
    assert finishes[0][1] < 600 <= finishes[600][1]


def test_loaded_sequences_run_though_waiting_ones_find_no_block() -> None:
    scheduler = make(num_blocks=4)
    one = sequence([1] * 14, max_tokens=2, handoff=HAND_OFF)
    scheduler.add(one)
    scheduler.add(sequence([2] * 14, max_tokens=2))
    assert scheduler.schedule().loads == [one]
    scheduler.load(one, [1, 2, 3, 4])
    run(scheduler)
    assert scheduler.pool.num_free == 4
    assert scheduler.num_waiting == 0
