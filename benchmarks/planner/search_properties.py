"""Random planning problems: looser ones that need more or serve less, and plans that an exhaustive
search beats.

    python benchmarks/planner/search_properties.py --first 0 --seconds 180

Each problem is planned, then with one thing made easier (TTFT, TPOT, rate, GPUs, link) and with
other requests; every placement on up to 8 GPUs is simulated beside the chosen one. With
`--own-targets` they have targets for gaps, or for one latency alone, which are made easier as well.
With `--part-gpus 8` the problems need several equal parts, of 8 GPUs instead of 128: what holds for
those of 300 to 1,500 GPUs costs little to try on 40 to 88, where rounding is coarser.
"""

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

from cleave.planner.problem import Problem
from cleave.planner.search import replication
from cleave.planner.search.context import SearchContext

from tests.support import random_problems

_MAX_EXHAUSTIVE_GPUS = 16


@dataclass(slots=True)
class Count:
    """What was found so far."""

    problems: int = 0
    placements: int = 0
    violations: int = 0
    seeds_apart: int = 0
    beaten: int = 0


def main() -> None:
    """Print each fault, then a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument("--seconds", type=float, default=180.0, help="no new problem after these")
    parser.add_argument("--part-gpus", type=int, help="GPUs of a part; draws problems of several")
    parser.add_argument("--own-targets", action="store_true", help="for gaps, TTFT or TPOT alone")
    given = parser.parse_args()
    count, started, number = Count(), time.monotonic(), given.first
    while time.monotonic() - started < given.seconds:
        if given.part_gpus:
            replication.PART_GPUS = given.part_gpus
            problem = random_problems.draw_large_problem(number, given.part_gpus)
        elif given.own_targets:
            problem = random_problems.draw_problem_with_own_targets(number)
        else:
            problem = random_problems.draw_problem(number)
        try_problem(problem, number, count)
        number += 1
    print("| problems | placements | violations | seeds apart | plans beaten | CPU seconds |")
    print("|---|---|---|---|---|---|")
    figures = (count.problems, count.placements, count.violations, count.seeds_apart, count.beaten)
    print("|", " | ".join(map(str, figures)), f"| {time.process_time():.0f} |")


def try_problem(problem: Problem, number: int, count: Count) -> None:
    """Count what the plan of one problem violates."""
    chosen = random_problems.choose(problem)
    count.problems += 1
    for name, looser in random_problems.loosen(problem):
        other = random_problems.choose(looser)
        if random_problems.is_worse(other, chosen, problem):
            count.violations += 1
            print(f"{number}: {name}: {chosen}, then {other}", flush=True)
    count.seeds_apart += has_seeds_apart(problem, chosen, number)
    if problem.max_gpus > _MAX_EXHAUSTIVE_GPUS:
        return
    count.placements += sum(1 for _ in random_problems.list_all(problem, int(min(8, chosen.gpus))))
    for better in random_problems.list_better(problem, chosen):
        count.beaten += 1
        print(f"{number}: beaten: {better}", flush=True)


def has_seeds_apart(problem: Problem, chosen: random_problems.Choice, number: int) -> bool:
    """Whether other requests lead to another number of GPUs though it is no close call."""
    other = replace(problem, seed=1)
    pairs = ((problem, chosen), (other, random_problems.choose(other)))
    (_, smaller), (larger_problem, larger) = sorted(pairs, key=lambda pair: pair[1].gpus)
    if smaller.placement is None or smaller.gpus == larger.gpus:
        return False
    search = SearchContext.from_problem(larger_problem)
    share = random_problems.measure_share(search, smaller.placement)
    is_apart = share <= problem.slo.attainment - random_problems.MARGIN
    if is_apart:
        print(f"{number}: seeds: {smaller}, then {larger}: {share:.3f} in time", flush=True)
    return is_apart


if __name__ == "__main__":
    main()
