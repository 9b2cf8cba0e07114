"""A day of moving traffic in virtual time: plans that stay, lend, follow, or know the future.

`python benchmarks/loop/run.py`; about three minutes. `--quick`: does everything work? Quote none of
its figures. The planner, change detection, guard and decision are the operator's own; engines and
router are the simulator's.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from rich.console import Console
from rich.table import Table
from world import PERIOD_S, World

from cleave.api.manifest import validate
from cleave.controller.loop import drift
from cleave.perf.corrected import NONE, Correction, correct
from cleave.planner import emulated, replay, search
from cleave.planner.guard import SETTLE_S
from cleave.planner.plan import PlannedPool
from cleave.planner.problem import Problem
from cleave.planner.replay import Running
from cleave.planner.revision import Left, Terms, Verdict, revise
from cleave.policy.pooling import Terms as Lending
from cleave.policy.pooling import make_terms
from cleave.simulator.fleet import Fleet
from cleave.simulator.trace import Trace
from cleave.traffic.published import find
from cleave.traffic.refit import RefitError, refit
from cleave.traffic.window import Window

TTFT_MS, TPOT_MS = 2_500.0, 60.0
LONGEST = 8_192
MOST_GPUS = 24
START_S = 120.0
"""From a plan to its first request."""
INTERVAL_S = 300.0
MODES = ("static", "flips", "replans", "both", "oracle")


@dataclass(frozen=True)
class Phase:
    """Traffic that lasts for a while."""

    name: str
    workload: str
    rate: float
    burstiness: float = 1.0


PHASES = (
    Phase("code", "azure-code", 8.0),
    Phase("conversation", "azure-conversation", 8.0),
    Phase("twice as much", "azure-conversation", 16.0),
    Phase("bursts", "azure-conversation", 12.0, burstiness=4.0),
    Phase("code again", "azure-code", 14.0),
    Phase("night", "azure-code", 3.0),
)


@dataclass(frozen=True)
class Day:
    """One mode's."""

    mode: str
    attained: float
    phases: tuple[float, ...]
    gpu_hours: float
    replans: int
    flips: int
    plans: tuple[str, ...]


def main() -> None:
    """Serve the day in each mode, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--slower", type=float, default=1.0, help="passes, than the profile says")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    stated = parser.parse_args()
    phase_s = 600.0 if stated.quick else 2_400.0
    truth = Correction(stated.slower, stated.slower)
    problem = ask()
    trace = draw(phase_s)
    days = []
    for mode in stated.modes.split(","):
        began = time.perf_counter()
        days.append(live(mode, problem, trace, phase_s, truth))
        print(f"{mode}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    best = next((day.attained for day in days if day.mode == "oracle"), None)
    rows = [row(day, best) for day in days]
    if stated.output == "json":
        print(json.dumps(rows, indent=2))
        return
    show(rows)


def ask() -> Problem:
    """What the deployment states: the first phase."""
    document = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "day"},
        "spec": {
            "model": {"source": "facebook/opt-13b", "maxModelLen": LONGEST},
            "slo": {"ttftMs": TTFT_MS, "tpotMs": TPOT_MS},
            "engine": {"type": "Emulated"},
            "planning": {"disaggregation": "Always", "maxGPUs": MOST_GPUS},
            "workload": {
                "rate": 1,
                "promptTokens": {"mean": 1000, "p90": 2000},
                "outputTokens": {"mean": 100, "p90": 200},
            },
        },
    }
    return for_phase(emulated.problem(validate(document)), PHASES[0])


def for_phase(problem: Problem, phase: Phase) -> Problem:
    """The same with the traffic of a phase."""
    demand = find(phase.workload).demand(phase.rate, phase.burstiness)
    return replace(problem, demand=demand.limited(LONGEST))


def draw(phase_s: float) -> Trace:
    """The whole day."""
    arrivals, prompts, outputs = [], [], []
    for number, phase in enumerate(PHASES):
        demand = find(phase.workload).demand(phase.rate, phase.burstiness).limited(LONGEST)
        drawn = demand.draw(int(phase_s * phase.rate * 2) + 100, seed=number)
        came = drawn.arrival_ms < phase_s * 1000
        arrivals.append(drawn.arrival_ms[came] + number * phase_s * 1000)
        prompts.append(drawn.prompt_tokens[came])
        outputs.append(drawn.output_tokens[came])
    return Trace(np.concatenate(arrivals), np.concatenate(prompts), np.concatenate(outputs))


def plan(problem: Problem, lending: Lending | None) -> Running:
    """The planner's answer, or the best that it has where none holds the targets."""
    told = search.plan(problem)
    return Running(told.best.pools, told.best.algorithm, lending)


def live(mode: str, problem: Problem, trace: Trace, phase_s: float, truth: Correction) -> Day:
    """One mode through the day; `truth`: what passes really take, by the model's."""
    lending = make_terms(TTFT_MS) if mode in ("flips", "both") else None
    real = replace(problem, estimator=correct(problem.estimator, truth))
    end_s = len(PHASES) * phase_s
    history = [(0.0, plan(real if mode == "oracle" else problem, lending))]
    world = World(trace, problem.slo, to_fleet(real, history[0][1]))
    if mode == "oracle":
        for number, phase in enumerate(PHASES[1:], 1):
            running = plan(for_phase(real, phase), None)
            history.append((number * phase_s, running))
            world.change(to_fleet(real, running), number * phase_s)
    elif mode in ("replans", "both"):
        history += follow(problem, real, world, history[0][1], end_s)
    score = world.close(end_s)
    ends = [at for at, _ in history[1:]] + [end_s]
    spent = sum(gpus(run.pools) * (end - at) for (at, run), end in zip(history, ends, strict=True))
    edges = [number * phase_s for number in range(len(PHASES) + 1)]
    return Day(
        mode,
        score.between(0, end_s),
        tuple(score.between(*pair) for pair in pairwise(edges)),
        spent / 3600,
        len(history) - 1,
        score.num_flips,
        tuple(f"{at:.0f} s: {label(run.pools)}" for at, run in history),
    )


def follow(
    problem: Problem, real: Problem, world: World, running: Running, end_s: float
) -> Iterator[tuple[float, Running]]:
    """As the operator does: a look each minute, the planner asked at changes and now and then."""
    windows: list[Window] = []
    left: list[Left] = []
    planned_for, settled_s, asked_s, correction = None, 0.0, 0.0, NONE
    pending: tuple[float, Running] | None = None
    course = drift.Course()
    for now_s in np.arange(4 * PERIOD_S, end_s, 4 * PERIOD_S).tolist():
        windows += world.look(now_s - 4 * PERIOD_S, now_s)
        if pending is not None:
            if now_s < pending[0]:
                continue
            world.change(to_fleet(real, pending[1]), now_s)
            running, settled_s, pending = pending[1], now_s, None
            yield now_s, running
        course = drift.follow(course, planned_for, windows, settled_s)
        change = course.change
        last_s = max(asked_s, settled_s)
        late_s = now_s - last_s - INTERVAL_S
        if not (change and change.at_s > last_s) and (
            late_s < 0 or course.puts_off(late_s, INTERVAL_S)
        ):
            continue
        since_s = max(change.since_s, settled_s) if change else settled_s
        mixed_s = max(change.at_s - since_s, 0.0) if change else 0.0
        terms = Terms(start_s=START_S, cooldown_s=INTERVAL_S, settle_s=SETTLE_S + mixed_s)
        recent = drift.list_recent(windows, since_s, INTERVAL_S, terms.settle_s)
        try:
            workload = refit(recent)
            found = revise(problem, running, recent, correction, terms, left)
        except RefitError:
            continue
        asked_s, correction = now_s, found.judgement.correction
        told = found.decision
        print(f"  {now_s:6.0f} s  {told.verdict}: {told.reason}; {correction}", file=sys.stderr)
        if found.decision.verdict is Verdict.APPLY:
            left.append(Left(running.pools, now_s))
            planned_for = workload
            best = found.proposed
            pending = now_s + START_S, replace(running, pools=best.pools, algorithm=best.algorithm)
        planned_for = planned_for or workload


def to_fleet(problem: Problem, running: Running) -> Fleet:
    """As the simulator takes it."""
    return replay.to_fleet(problem, running, replay.draft_of(problem, running))


def gpus(pools: Sequence[PlannedPool]) -> int:
    """Of all pools."""
    return sum(pool.gpus for pool in pools)


def label(pools: Sequence[PlannedPool]) -> str:
    """`2P + 4D`."""
    return " + ".join(f"{pool.replicas}{str(pool.role)[0].upper()}" for pool in pools)


def row(day: Day, best: float | None) -> dict[str, object]:
    """For people and for JSON."""
    return {
        "mode": day.mode,
        "attained": day.attained,
        "of oracle": day.attained / best if best else None,
        **{phase.name: share for phase, share in zip(PHASES, day.phases, strict=True)},
        "GPU hours": day.gpu_hours,
        "replans": day.replans,
        "flips": day.flips,
        "plans": "; ".join(day.plans),
    }


def show(rows: Sequence[dict[str, object]]) -> None:
    """As a table."""
    table = Table()
    for column in rows[0]:
        table.add_column(column)
    for each in rows:
        table.add_row(*(f"{x:.3f}" if isinstance(x, float) else str(x) for x in each.values()))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
