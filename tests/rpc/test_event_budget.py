"""The share of a core that one agent's events take."""

import random

import pytest

from cleave.rpc.event_budget import SHARE, EventBudget


def flood(budget: EventBudget, clock, seconds: float, cost_s: float, size: int) -> float:
    """Send without pause for this time; returns the CPU time that it took."""
    end, spent = clock.now + seconds, 0.0
    while clock.now < end:
        pause = budget.count(cost_s, size)
        spent += cost_s
        clock.now += cost_s + pause
    return spent


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("cost_s", [0.000_01, 0.000_5, 0.006, 0.5])
def test_an_agent_that_sends_without_end_gets_its_share(cost_s: float) -> None:
    clock = Clock()
    spent = flood(EventBudget(clock), clock, 600.0, cost_s, 200)
    assert spent < SHARE * 600.0 + 0.25 + cost_s


def test_size_counts() -> None:
    clock = Clock()
    budget, events = EventBudget(clock), 0
    while clock.now < 200.0:
        clock.now += budget.count(0.0, 4 << 20)
        events += 1
    assert events < 400


def test_an_agent_that_reports_as_agents_do_never_waits() -> None:
    clock, rng = Clock(), random.Random(1)
    budget = EventBudget(clock)
    for _ in range(10_000):
        clock.now += rng.choice([0.05, 0.1, 0.1, 0.2])
        # A registration of several that come at once when an instance changes.
        for _ in range(4 if rng.random() < 0.02 else 1):
            assert budget.count(0.000_2, 500) == 0.0


def test_what_is_saved_up_is_bounded() -> None:
    clock = Clock()
    budget = EventBudget(clock)
    clock.now += 1e9
    assert flood(budget, clock, 10.0, 0.01, 200) < 0.25 + SHARE * 10.0 + 0.01
