"""The benchmark that compares the simulator's steps with those of vLLM's scheduler."""

import beside_vllm
import pytest
from pair_steps import SimulatedPair, VllmPair
from step_by_step import EmulatedSteps, History, SimulatedSteps, Step, VllmSteps

pytestmark = [
    pytest.mark.vllm,
    # vLLM and what it imports warn of their own future.
    pytest.mark.filterwarnings("ignore"),
]


def test_histories_are_those_of_vllms_scheduler() -> None:
    pytest.importorskip("vllm")
    vllm = VllmSteps()
    simulated = beside_vllm.compare(80, 0, SimulatedSteps(), vllm)
    emulated = beside_vllm.compare(80, 0, EmulatedSteps(), vllm)
    pair = beside_vllm.compare(34, 0, SimulatedPair(), VllmPair())
    assert pair.steps > 2_000
    assert not pair.different
    for found in (simulated, emulated):
        assert found.histories == 80
        assert found.steps > 5_000
        assert found.preemptions > 10
        assert not found.different


def test_a_prompt_is_older_than_what_joins_in_the_iteration_that_computes_its_end() -> None:
    pytest.importorskip("vllm")
    assert not beside_vllm.compare(1, 631, SimulatedPair(), VllmPair()).different


def test_pairs_that_schedule_ahead_are_those_of_vllms_scheduler() -> None:
    pytest.importorskip("vllm")
    # 38: a pull that waits finds its prefix when another one ends. 278: a prompt that lacks blocks
    # keeps those that are left from pulls.
    both, pair = SimulatedPair(is_async=True), VllmPair()
    found = [beside_vllm.compare(count, seed, both, pair) for seed, count in ((0, 40), (278, 1))]
    assert sum(each.preemptions for each in found) > 100
    assert not any(each.different for each in found)


def test_iterations_that_are_simulated_at_once_are_read_one_by_one() -> None:
    history = History(4, 8, 4, 8, 0, False, False, False, (0.125, 0.25), (6, 9), (3, 2), ("", ""))
    assert list(SimulatedSteps().run(history)) == [
        Step(0.125, 6, {0: 6}, 6, ()),
        Step(1.125, 8, {0: 7, 1: 7}, 4, ()),
        Step(2.125, 3, {0: 8, 1: 9}, 3, ()),
        Step(3.125, 1, {1: 10}, 5, ()),
    ]
