"""A fleet whose plan changes: what it observes does not depend on what comes later."""

import numpy as np
import pytest

from cleave.planner.replan.replay import RunningPlan


@pytest.fixture
def virtual_fleet(module):
    days, replanning = module("days"), module("replanning")
    problem = days.ask(days.DAYS["small"][0])
    fleet = replanning.to_fleet(problem, RunningPlan(pools(2, 2)))
    trace = days.draw(days.DAYS["small"][:2], 60.0, seed=3)
    return module("virtual_fleet").VirtualFleet(trace, problem.slo, fleet)


def pools(prefill: int, decode: int):
    from cleave.api.role import Role
    from cleave.planner.plan import EMULATED_GPU, PlannedPool

    return tuple(
        PlannedPool(role, count, gpu=EMULATED_GPU)
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode))
    )


def test_a_look_ahead_shows_what_a_look_at_that_moment_does(virtual_fleet) -> None:
    early = list(virtual_fleet.look(0.0, 30.0))
    virtual_fleet._ahead = None
    later = list(virtual_fleet.look(0.0, 105.0))
    assert later[:2] == early
    assert sum(each.num_requests for each in early) > 100


def test_who_came_before_a_change_ends_on_the_instances_of_then(virtual_fleet, module) -> None:
    days, replanning = module("days"), module("replanning")
    alone = virtual_fleet.close(60.0)
    problem = days.ask(days.DAYS["small"][0])
    virtual_fleet.change(replanning.to_fleet(problem, RunningPlan(pools(4, 4))), 60.0)
    both = virtual_fleet.close(120.0)
    assert np.array_equal(both.met[: len(alone.met)], alone.met)
    assert np.all(both.arrival_s[: len(alone.met)] < 60.0)
    assert len(both.met) == len(virtual_fleet.trace)
