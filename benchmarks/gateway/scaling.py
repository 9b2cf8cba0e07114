"""What a gateway of several processes costs, and how far it goes. Called by run.py (`scaling`).

For 1, 2, 4, ... processes in turn: answers per second as fast as the load generator asks, and CPU
time per answer over all of its processes. What is hard: engine and load generator need cores as
well. As long as there are enough, each process has one for itself and rates mean something; beyond
that all share, and only the CPU time does.
"""

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from environment import Cores, Stage
from figures import Run
from processes import Load, run_load
from rich.console import Console
from rich.table import Table

NAME = "cleave"
CONNECTIONS = 96
"""Many, for the kernel spreads them over the processes by luck; less than a tenant may let wait."""
TOKENS = 16


@dataclass(frozen=True, slots=True)
class Rung:
    """One number of processes; medians of the rounds."""

    processes: int
    requests_per_second: float
    request_us: float
    """CPU time of a whole answer, over all processes."""
    streamed_us: float
    """The same of a streamed one."""
    busy_cores: float
    """That they used together."""
    alone: bool
    """Whether engine and load generator had other cores."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """What is measured."""

    most: int
    """Processes."""
    instances: int
    """As how many the engine is known. With one a gateway soon holds requests back, and processes
    that share it are never alone with its books."""
    rounds: int
    seconds: float
    step_us: int
    python: str
    """What runs the gateway."""
    awake: bool
    """Engine and clients look on while there is something to come; they need cores for that."""


def measure(ladder: Ladder, available: Sequence[int], console: Console) -> list[Rung]:
    """From one process to `most`, doubling."""
    cores, most = sorted(available), ladder.most
    places = Cores(proxy=cores[0], engine=cores[-2], load=cores[-1], rest=cores[-2])
    counts = sorted({count for count in (1, 2, 4, 8, 16) if count < most} | {most})
    found: dict[int, list[tuple[Run, Run]]] = {count: [] for count in counts}
    with ExitStack() as stack:
        engines = Stage(stack, places, instances=ladder.instances, awake=ladder.awake)
        engines.start_engines(ladder.step_us)
        for number in range(ladder.rounds):
            for count in counts:
                console.print(f"round {number + 1} of {ladder.rounds}: {count}", style="dim")
                found[count].append(_measure_one(ladder, places, count))
    return [_sum_up(count, runs, len(cores)) for count, runs in found.items()]


def build_table(rungs: Sequence[Rung]) -> Table:
    """Rates beside that of one process."""
    table = Table(title="Processes of one gateway: medians of the rounds")
    for column in ("processes", "req/s", "x one", "us/whole", "us/stream", "cores used", "alone"):
        table.add_column(column, justify="right", no_wrap=True)
    for rung in rungs:
        table.add_row(
            str(rung.processes),
            f"{rung.requests_per_second:,.0f}",
            f"{rung.requests_per_second / rungs[0].requests_per_second:.2f}",
            f"{rung.request_us:.1f}",
            f"{rung.streamed_us:.1f}",
            f"{rung.busy_cores:.2f}",
            "yes" if rung.alone else "no",
        )
    return table


def _measure_one(ladder: Ladder, places: Cores, count: int) -> tuple[Run, Run]:
    """(whole answers, streamed ones)"""
    seconds, instances = ladder.seconds, ladder.instances
    with ExitStack() as stack:
        stage = Stage(stack, places, count, python=ladder.python, instances=instances)
        subject = replace(stage.start_gateway(NAME), awake=ladder.awake)
        warm_up, whole, streamed = (
            Load(TOKENS, CONNECTIONS, each, stream)
            for each, stream in ((0.5, True), (seconds, False), (seconds, True))
        )
        run_load(subject, warm_up, places.load)
        return run_load(subject, whole, places.load), run_load(subject, streamed, places.load)


def _sum_up(count: int, runs: Sequence[tuple[Run, Run]], cores: int) -> Rung:
    wholes, streams = zip(*runs, strict=True)
    return Rung(
        processes=count,
        requests_per_second=statistics.median(run.requests_per_second for run in wholes),
        request_us=statistics.median(run.cpu_us_per_request for run in wholes),
        streamed_us=statistics.median(run.cpu_us_per_request for run in streams),
        busy_cores=statistics.median(run.busy_share for run in wholes),
        alone=count + 2 <= cores,
    )
