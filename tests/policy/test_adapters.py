"""Which adapters a running engine loads and unloads next, and under which names."""

import random
from dataclasses import replace

import pytest

from cleave.policy.adapters import (
    LONGEST_RETRY_S,
    MAX_ADAPTERS,
    AdapterSource,
    AdapterState,
    AdapterStep,
    StepKind,
    choose_next_step,
    compute_retry_delay,
    find_fault,
    hash_adapters,
)

OLD, NEW = AdapterSource("sql", "/a/sql-1"), AdapterSource("sql", "/a/sql-2")
LAW = AdapterSource("law", "org/law")


def choose(ordered: list[AdapterSource], *states: AdapterState, now_s: float = 100.0):
    known = {each.adapter.engine_name: each for each in states}
    return choose_next_step(ordered, known, now_s, overlap_s=10.0, linger_s=30.0)


def load(adapter: AdapterSource, at_s: float = 0.0) -> AdapterState:
    return AdapterState(adapter, loaded_s=at_s)


def test_sources_of_one_name_have_names_of_their_own_in_engines() -> None:
    assert OLD.engine_name != NEW.engine_name
    assert OLD.engine_name == AdapterSource("sql", "/a/sql-1").engine_name
    assert OLD.engine_name.startswith("sql@")


def test_what_is_missing_is_loaded_in_the_order_given() -> None:
    assert choose([OLD, LAW]) == AdapterStep(StepKind.LOAD, OLD)
    assert choose([OLD, LAW], load(OLD)) == AdapterStep(StepKind.LOAD, LAW)
    assert choose([OLD, LAW], load(OLD), load(LAW)) == AdapterStep(StepKind.WAIT)


def test_a_removed_adapter_is_withdrawn_and_unloaded_when_its_requests_have_arrived() -> None:
    state = load(OLD)
    assert choose([], state) == AdapterStep(StepKind.WITHDRAW, OLD)
    state = replace(state, withdrawn_s=100.0)
    assert choose([], state) == AdapterStep(StepKind.WAIT, wait_s=30.0)
    assert choose([], state, now_s=130.0) == AdapterStep(StepKind.UNLOAD, OLD)


def test_an_old_source_serves_until_the_new_one_is_loaded_and_a_while_beside_it() -> None:
    assert choose([NEW], load(OLD)) == AdapterStep(StepKind.LOAD, NEW)
    failed = AdapterState(NEW, num_failures=1, retry_s=101.0, fault="no such folder")
    assert choose([NEW], load(OLD), failed) == AdapterStep(StepKind.WAIT, wait_s=1.0)
    assert choose([NEW], load(OLD), load(NEW, 95.0)) == AdapterStep(StepKind.WAIT, wait_s=5.0)
    assert choose([NEW], load(OLD), load(NEW, 90.0)) == AdapterStep(StepKind.WITHDRAW, OLD)


def test_loading_goes_before_unloading() -> None:
    gone = replace(load(OLD), withdrawn_s=0.0)
    assert choose([LAW], gone) == AdapterStep(StepKind.LOAD, LAW)


def test_a_failed_load_is_tried_again_when_it_is_due_and_holds_up_no_other() -> None:
    failed = AdapterState(OLD, num_failures=3, retry_s=104.0, fault="no such folder")
    assert choose([OLD, LAW], failed) == AdapterStep(StepKind.LOAD, LAW)
    assert choose([OLD], failed) == AdapterStep(StepKind.WAIT, wait_s=4.0)
    assert choose([OLD], failed, now_s=104.0) == AdapterStep(StepKind.LOAD, OLD)


def test_retries_of_a_load_become_rare() -> None:
    delays = [compute_retry_delay(failures) for failures in range(1, 40)]
    assert delays[:4] == [1.0, 2.0, 4.0, 8.0]
    assert delays[-1] == LONGEST_RETRY_S


@pytest.mark.parametrize("seed", range(20))
def test_every_sequence_of_orders_ends_with_what_was_ordered_last(seed: int) -> None:
    rng = random.Random(seed)
    every = [AdapterSource(name, f"/a/{name}-{n}") for name in "abc" for n in range(2)]
    states: dict[str, AdapterState] = {}
    now_s = 0.0
    for _ in range(5):
        ordered = [s for name in "abc" for s in rng.sample([e for e in every if e.name == name], 1)]
        ordered = rng.sample(ordered, rng.randint(0, 3))
        for _ in range(rng.choice((1, 3, 1_000))):
            step = choose_next_step(ordered, states, now_s, overlap_s=10.0, linger_s=30.0)
            name = step.adapter.engine_name if step.adapter else ""
            if step.kind is StepKind.LOAD:
                assert step.adapter
                states[name] = AdapterState(step.adapter, loaded_s=now_s)
            elif step.kind is StepKind.WITHDRAW:
                states[name] = replace(states[name], withdrawn_s=now_s)
            elif step.kind is StepKind.UNLOAD:
                del states[name]
            elif step.wait_s is None:
                break
            else:
                assert step.wait_s > 0, f"seed {seed}"
                now_s += step.wait_s
    ordered = every[:1]
    for _ in range(100):
        step = choose_next_step(ordered, states, now_s, overlap_s=10.0, linger_s=30.0)
        if step == AdapterStep(StepKind.WAIT):
            break
        now_s += step.wait_s or 0.0
        if step.adapter and step.kind is StepKind.LOAD:
            states[step.adapter.engine_name] = AdapterState(step.adapter, loaded_s=now_s)
        elif step.adapter and step.kind is StepKind.WITHDRAW:
            name = step.adapter.engine_name
            states[name] = replace(states[name], withdrawn_s=now_s)
        elif step.adapter:
            del states[step.adapter.engine_name]
    assert [*states] == [ordered[0].engine_name], f"seed {seed}"


def test_the_digest_depends_on_names_and_sources_only() -> None:
    assert hash_adapters([OLD, LAW]) == hash_adapters([LAW, OLD])
    assert len({hash_adapters(each) for each in ([], [OLD], [NEW], [OLD, LAW])}) == 4
    assert hash_adapters([]) == ""


@pytest.mark.parametrize(
    ("adapters", "fault"),
    [
        ([OLD, LAW], ""),
        ([OLD, NEW], "adapter sql is named twice"),
        ([AdapterSource("a@b", "/a")], "adapter name 'a@b' does not match"),
        ([AdapterSource("x" * 200, "/a")], "does not match"),
        ([AdapterSource("a", "a")], "source of adapter a must be an absolute folder or ORG/NAME"),
        ([AdapterSource("a", "/" + "x" * 2_000)], "must be an absolute folder"),
        ([AdapterSource(f"a{n}", "/a") for n in range(MAX_ADAPTERS + 1)], "129 adapters"),
    ],
)
def test_orders_that_no_engine_could_follow_are_found(adapters: list, fault: str) -> None:
    assert find_fault(adapters).startswith(fault) if not fault else fault in find_fault(adapters)
