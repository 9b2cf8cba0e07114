"""Runs a storm and reports the result, to machines and to people."""

import asyncio
import os
import platform
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import httpx
from rich.console import Console
from rich.table import Table

from e2e.chaos.faults import Fault
from e2e.chaos.fleet import Fleet
from e2e.chaos.gateways import Counts, add
from e2e.chaos.invariants import measure_baseline
from e2e.chaos.load import Load
from e2e.chaos.machine import Machine
from e2e.chaos.machine_faults import count_poisoned
from e2e.chaos.run import Storm, ViolationError

MOST_AT_ONCE = 32
"""Faults."""
ReportProgress = Callable[[str, int, int], None]
"""What happens now, faults so far, faults in all."""


@dataclass(frozen=True)
class Report:
    """What a run has seen."""

    machine: str
    seed: int
    fleet: dict[str, int]
    seconds: float
    faults: dict[str, int]
    faults_missed: dict[str, int]
    requests: int
    cases: dict[str, int]
    reasons: dict[str, int]
    left: int
    worst_pause_s: float
    worst_first_byte_s: float
    gateways: Counts
    touched: dict[str, dict[str, int]]
    """Kind of fault -> case -> requests that ran while one lasted."""
    losses: list[str]
    """The first requests that were lost as documented, and the faults around them."""
    poisoned: int
    """Engines that poison requests have ended."""
    processor_share: float
    """The least that the run got of the processor time it asked for."""
    violation: str = ""


async def run_storm(
    fleet: Fleet,
    machine: Machine,
    load: Load,
    drawn: Sequence[Fault],
    burst: int,
    seed: int,
    report_progress: ReportProgress,
    **limits: float,
) -> Report:
    """`limits`: of the storm, where they are not its usual ones."""
    # Each fault that lasts takes a thread; there are six by default on two cores.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MOST_AT_ONCE))
    storm = Storm(
        fleet.deployment,
        machine,
        fleet.gateways,
        fleet.roles,
        load,
        measure_baseline(fleet.gateways),
        lambda what, done: report_progress(what, done, len(drawn)),
        **limits,
    )
    violation = ""
    try:
        with ended_by_interrupt(storm):
            await storm.run(drawn, burst)
        report_progress("done", len(drawn), len(drawn))
    except ViolationError as fault:
        complaints = [f"log of gateway {g.name}:\n{g.read_complaints()}" for g in fleet.gateways]
        violation = "\n".join([str(fault), *complaints])
    return build_report(fleet, load, storm, seed, violation)


@contextmanager
def ended_by_interrupt(storm: Storm) -> Iterator[None]:
    """Ctrl-C lets faults that have begun end, and reports; a second one breaks the run off."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        storm.lasting_s = 0
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, end)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def build_report(fleet: Fleet, load: Load, storm: Storm, seed: int, violation: str) -> Report:
    counts: Counts = {}
    for gateway in fleet.gateways:
        # After a violation it may just be dying; its last report will do.
        with suppress(httpx.HTTPError):
            gateway.count()
        counts = add(counts, add(gateway.counted, gateway.counting))
    tally = load.tally
    return Report(
        machine=f"{platform.platform()}, {os.cpu_count()} cores",
        seed=seed,
        fleet=dict(Counter(fleet.roles.values())),
        seconds=round(time.monotonic() - storm.zero_s, 1),
        faults=dict(storm.happened.most_common()),
        faults_missed=dict(storm.missed),
        requests=tally.requests,
        cases=dict(tally.cases.most_common()),
        reasons=dict(tally.reasons.most_common(20)),
        left=tally.left,
        worst_pause_s=round(tally.worst_pause_s, 2),
        worst_first_byte_s=round(tally.worst_first_s, 2),
        gateways={name: number for name, number in sorted(counts.items()) if number},
        touched={kind: dict(cases) for kind, cases in sorted(storm.touched.items())},
        losses=storm.losses,
        poisoned=count_poisoned(fleet.deployment),
        processor_share=round(storm.beat.least_share, 2),
        violation=violation,
    )


def print_report(report: Report, out: Console) -> None:
    """For people."""
    table = Table("", "", show_header=False, title=f"chaos, seed {report.seed}")
    table.add_row("faults", f"{sum(report.faults.values())} in {report.seconds:.0f} s")
    for kind, number in report.faults.items():
        table.add_row(f"  {kind}", str(number))
    table.add_row("requests", str(report.requests))
    for case, number in report.cases.items():
        table.add_row(f"  {case.lower().replace('_', ' ')}", str(number))
    table.add_row("  broken off by clients", str(report.left))
    table.add_row("worst pause within an answer", f"{report.worst_pause_s:.1f} s")
    table.add_row("least share of processor time", f"{report.processor_share:.0%}")
    table.add_row("worst wait for a first byte", f"{report.worst_first_byte_s:.1f} s")
    for series, number in report.gateways.items():
        if series.startswith(("recoveries", "handoffs", "retries")):
            table.add_row(series, f"{number:.0f}")
    out.print(table)
    out.print(report.machine)
    for reason, number in report.reasons.items():
        out.print(f"{number} x {reason}", markup=False, highlight=False)
    if report.violation:
        out.print(f"VIOLATION, seed {report.seed}: {report.violation}", markup=False)
