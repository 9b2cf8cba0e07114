"""A day of moving traffic in virtual time: plans that stay, lend, follow, or know the future.

`python benchmarks/loop/run.py`; about two minutes. `--quick`: does everything work? Quote none of
its figures. The planner, change detection, guard and decision are the operator's own; engines and
router are the simulator's.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from best_split import choose_split, cut
from days import DAYS, TTFT_MS, Phases, ask, draw, for_phase
from delayed_oracle import wait_for
from replanning import Follower, Step, gpus, to_fleet
from rich.console import Console
from rich.table import Table
from slo_violations import STAGES, find_losses
from virtual_fleet import Score, VirtualFleet

from cleave.perf.latency_correction import Correction, apply_correction
from cleave.planner import plan_search
from cleave.planner.plan import PlannedPool
from cleave.planner.problem import Problem
from cleave.planner.replan.replay import RunningPlan
from cleave.policy.role_flipping import build_thresholds
from cleave.simulator.trace import Trace

PHASE_S, QUICK_PHASE_S = 2_400.0, 600.0
MODES = ("oracle", "late", "static", "flips", "best-split", "replans", "both")


@dataclass(frozen=True, eq=False)
class Day:
    """What has to be served, and what is known of it."""

    phases: Phases
    phase_s: float
    problem: Problem
    """As the first phase states it, with the model as the profile has it."""
    real: Problem
    """With the passes that engines take."""
    trace: Trace

    @property
    def edges(self) -> list[float]:
        """When phases begin, and the end."""
        return [number * self.phase_s for number in range(len(self.phases) + 1)]


@dataclass(frozen=True, eq=False)
class Lived:
    """A day in one mode."""

    mode: str
    score: Score
    first: RunningPlan
    steps: Sequence[Step]


def main() -> None:
    """Serve the day in each mode, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--day", choices=DAYS, default="day")
    parser.add_argument("--modes", default=",".join(MODES), help="beside the oracle")
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    parser.add_argument("--slower", type=float, default=1.0, help="passes, than the profile says")
    parser.add_argument(
        "--targets",
        action="store_true",
        help="engines schedule by the targets: order InTimeFirst, admission WithinTpot",
    )
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    arguments = parser.parse_args()
    day = make_day(
        DAYS[arguments.day],
        QUICK_PHASE_S if arguments.quick else PHASE_S,
        arguments.seed,
        Correction(arguments.slower, arguments.slower),
        arguments.targets,
    )
    plans = plan_phases(day)
    modes = [MODES[0], *(mode for mode in arguments.modes.split(",") if mode != MODES[0])]
    lived = [live(mode, day, plans) for mode in modes]
    rows = [row(day, each, lived[0].score) for each in lived]
    if arguments.output == "json":
        print(json.dumps(rows, indent=2))
        return
    show(rows)


def make_day(
    phases: Phases, phase_s: float, seed: int, truth: Correction, keeps_targets: bool
) -> Day:
    """`truth`: what passes really take, by the model's; `keeps_targets`: as in `ask`."""
    problem = ask(phases[0], keeps_targets)
    real = replace(problem, estimator=apply_correction(problem.estimator, truth))
    return Day(phases, phase_s, problem, real, draw(phases, phase_s, seed))


def plan_phases(day: Day) -> list[RunningPlan]:
    """What an oracle runs in each phase."""
    return [plan(for_phase(day.real, phase)) for phase in day.phases]


def set_roles(day: Day, mode: str) -> Day:
    """With flips where the mode has them."""
    flipping = build_thresholds(TTFT_MS) if mode in ("flips", "both") else None
    policies = replace(day.problem.policies, flipping=flipping)
    problem, real = (replace(each, policies=policies) for each in (day.problem, day.real))
    return replace(day, problem=problem, real=real)


def plan(problem: Problem) -> RunningPlan:
    """The planner's answer, or the best that it has where none holds the targets."""
    best = plan_search.plan(problem).best
    if best is None:
        sys.exit("the planner has no plan for a phase")
    return RunningPlan(best.pools).change_plan(best)


def live(mode: str, day: Day, plans: Sequence[RunningPlan]) -> Lived:
    """The day in one mode; `plans`: the oracle's."""
    began = time.perf_counter()
    day = set_roles(day, mode)
    first = plans[0] if mode in ("oracle", "late") else plan(day.problem)
    virtual_fleet = VirtualFleet(day.trace, day.problem.slo, to_fleet(day.real, first))
    end_s = day.edges[-1]
    steps: list[Step] = []
    if mode == "oracle":
        for at_s, running in zip(day.edges[1:-1], plans[1:], strict=True):
            virtual_fleet.change(to_fleet(day.real, running), at_s)
            steps.append(Step(at_s, at_s, at_s, running))
    elif mode == "best-split":
        fleet, slo = virtual_fleet.fleet, day.problem.slo
        for start_s, stop_s in pairwise(day.edges):
            split = choose_split(fleet, cut(day.trace, start_s, stop_s), slo)
            if start_s:
                virtual_fleet.change(split, start_s)
            else:
                virtual_fleet.fleet = split
    elif mode == "late":
        steps = wait_for(virtual_fleet, day.real, plans, day.edges)
    elif mode in ("replans", "both"):
        follower = Follower(day.problem, day.real, virtual_fleet, first)
        follower.follow(end_s)
        steps = follower.steps
    score = virtual_fleet.close(end_s)
    print(f"{mode}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return Lived(mode, score, first, steps)


def row(day: Day, lived: Lived, oracle: Score) -> dict[str, object]:
    """For people and for JSON."""
    edges, score = day.edges, lived.score
    plans = [(0.0, lived.first), *((step.at_s, step.running_plan) for step in lived.steps)]
    ends = [at_s for at_s, _ in plans[1:]] + [edges[-1]]
    spent = sum(gpus(run.pools) * (end - at) for (at, run), end in zip(plans, ends, strict=True))
    attained = score.between(0, edges[-1])
    lost = find_losses(score, oracle, lived.steps, edges)
    return {
        "mode": lived.mode,
        "attained": attained,
        "of oracle": attained / oracle.between(0, edges[-1]),
        **{
            phase.name: score.between(*pair)
            for phase, pair in zip(day.phases, pairwise(edges), strict=True)
        },
        **{f"lost {stage}": lost[stage] for stage in STAGES},
        "GPU hours": spent / 3600,
        "replans": len(lived.steps),
        "flips": score.num_flips,
        "plans": "; ".join(f"{at:.0f} s: {label(run.pools)}" for at, run in plans),
    }


def label(pools: Sequence[PlannedPool]) -> str:
    """`2P + 4D`."""
    return " + ".join(f"{pool.replicas}{str(pool.role)[0].upper()}" for pool in pools)


def show(rows: Sequence[dict[str, object]]) -> None:
    """As a table."""
    table = Table()
    for column in rows[0]:
        table.add_column(column)
    for each in rows:
        table.add_row(*(f"{x:.3f}" if isinstance(x, float) else str(x) for x in each.values()))
    Console(width=220).print(table)


if __name__ == "__main__":
    main()
