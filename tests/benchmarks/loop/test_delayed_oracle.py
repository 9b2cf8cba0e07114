"""An oracle that has to wait until a change is seen."""

from cleave.api.role import Role
from cleave.planner.plan import EMULATED_GPU, PlannedPool
from cleave.planner.replan.replay import RunningPlan


def test_each_plan_comes_after_its_change_was_seen_and_its_instances_have_started(module) -> None:
    days, replanning = module("days"), module("replanning")
    delayed_oracle, virtual_fleet = module("delayed_oracle"), module("virtual_fleet")
    phases = (days.Phase("few", "azure-code", 2.0), days.Phase("many", "azure-code", 6.0))
    problem = days.ask(phases[0])
    plans = [
        RunningPlan(
            tuple(
                PlannedPool(role, count, gpu=EMULATED_GPU) for role in (Role.PREFILL, Role.DECODE)
            )
        )
        for count in (2, 4)
    ]
    day = virtual_fleet.VirtualFleet(
        days.draw(phases, 900.0), problem.slo, replanning.to_fleet(problem, plans[0])
    )
    (step,) = delayed_oracle.wait_for(day, problem, plans, [0.0, 900.0, 1_800.0])
    assert 900.0 < step.seen_s <= 1_020.0
    assert step.at_s == step.seen_s + replanning.START_S
    assert step.running_plan is plans[1]
    assert len(day.done) == 1
