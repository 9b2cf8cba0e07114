"""CPU cost of Cleave's gateway on one core, beside a C floor measured in the same rounds.

Called by `make bench`. Per round and proxy: streamed answers of several lengths (cost per request
and per token), whole answers as fast as they go (requests per second), and 16 requests in flight
(added time to first token). Rounds are interleaved over the proxies, so that a machine that slows
down for a while slows all of them. README.md explains how to read the figures.
"""

import argparse
import json
import os
import platform
import signal
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import scaling
from endurance import (
    CLIENTS,
    MILLION,
    Crowd,
    Sample,
    build_crowd_table,
    build_memory_table,
    measure_crowds,
    measure_memory,
    to_rows,
)
from environment import Cores, choose_cores, describe_cores, find_haproxy, list_cores, stage
from figures import Cost, Run, Spread, fit_cost, spread, system_share
from processes import (
    BenchError,
    Load,
    Subject,
    build_tools,
    measure_idle,
    run_load,
    settle,
    undisturbed,
)
from rich.console import Console
from rich.table import Table

WIDTH = 150
STARVED_SHARE = 0.9
WARM_UP = Load(tokens=4, connections=32, seconds=0.5)


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of one benchmark."""

    rounds: int
    seconds: float
    """Of each run."""
    step_us: int = 2000
    """All streams of an engine get one token each step."""
    lengths: tuple[int, ...] = (1, 16, 64, 256)
    cost_connections: int = 32
    rate_connections: int = 64
    rate_tokens: int = 16
    latency_connections: int = 16
    latency_runs: int = 4
    """How many times as long: a 99th percentile of 600 requests is one pause of the machine."""
    latency_tokens: int = 16


@dataclass(frozen=True, slots=True)
class Round:
    """What one round measured of one subject."""

    cost: Cost
    """Of streamed answers, without the idle share."""
    idle_share: float
    system_share: float
    requests_per_second: float
    whole_request_us: float
    busy_share: float
    """Of its core that the proxy got while it was to go as fast as it can."""
    ttft_p50_us: float
    ttft_p99_us: float


@dataclass(frozen=True, slots=True)
class Description:
    """What has to be known beside the figures."""

    machine: str
    settings: Settings
    notes: tuple[str, ...]


def measure_round(subject: Subject, settings: Settings, core: int) -> Round:
    def run(load: Load) -> Run:
        return run_load(subject, load, core)

    seconds = settings.seconds
    idle = measure_idle(subject.pid, seconds)
    streams = [run(Load(n, settings.cost_connections, seconds)) for n in settings.lengths]
    whole = run(Load(settings.rate_tokens, settings.rate_connections, seconds, stream=False))
    waits_s = settings.latency_runs * seconds
    latency = run(Load(settings.latency_tokens, settings.latency_connections, waits_s))
    return Round(
        cost=fit_cost(streams, idle),
        idle_share=idle,
        system_share=system_share(streams),
        requests_per_second=whole.requests_per_second,
        whole_request_us=whole.cpu_us_per_request,
        busy_share=whole.busy_share,
        ttft_p50_us=latency.ttft_p50_us,
        ttft_p99_us=latency.ttft_p99_us,
    )


def measure(
    subjects: Sequence[Subject], settings: Settings, core: int, console: Console
) -> dict[str, list[Round]]:
    rounds: dict[str, list[Round]] = defaultdict(list)
    for subject in subjects:
        run_load(subject, WARM_UP, core)
    for number in range(settings.rounds):
        for subject in subjects:
            console.print(f"round {number + 1} of {settings.rounds}: {subject.name}", style="dim")
            with undisturbed(subject, subjects):
                rounds[subject.name].append(measure_round(subject, settings, core))
    return rounds


# ---- the result ----


def summarize(rounds: Mapping[str, Sequence[Round]], subject: Subject) -> dict[str, Spread]:
    """Figures of one subject. Added TTFT and ratios are formed within each round."""
    own, direct = rounds[subject.name], rounds["direct"]
    figures = {
        "request_us": [r.cost.request_us for r in own],
        "token_us": [r.cost.token_us for r in own],
        "system_share": [r.system_share for r in own],
        "idle_share": [r.idle_share for r in own],
        "requests_per_second": [r.requests_per_second for r in own],
        "whole_request_us": [r.whole_request_us for r in own],
        "busy_share": [r.busy_share for r in own],
        "added_ttft_p50_us": [
            r.ttft_p50_us - d.ttft_p50_us for r, d in zip(own, direct, strict=True)
        ],
        "added_ttft_p99_us": [
            r.ttft_p99_us - d.ttft_p99_us for r, d in zip(own, direct, strict=True)
        ],
    }
    if subject.floor is not None:
        pairs = list(zip(own, rounds[subject.floor], strict=True))
        figures["request_ratio"] = [o.cost.request_us / f.cost.request_us for o, f in pairs]
        figures["token_ratio"] = [o.cost.token_us / f.cost.token_us for o, f in pairs]
    return {name: spread(values) for name, values in figures.items()}


def format_spread(figure: Spread | None, digits: int = 1) -> str:
    if figure is None:
        return "-"
    return f"{figure.median:,.{digits}f} ({figure.min:,.{digits}f}-{figure.max:,.{digits}f})"


def build_tables(summaries: Mapping[str, Mapping[str, Spread]]) -> list[Table]:
    costs = Table(title="CPU time: median (least-most) of the rounds")
    costs.add_column("proxy", no_wrap=True)
    for column in ("us/request", "us/token", "x floor, request", "x floor, token", "kernel"):
        costs.add_column(column, justify="right", no_wrap=True)
    rates = Table(title="One core's rate and the wait it adds: median (least-most)")
    rates.add_column("proxy", no_wrap=True)
    for column in ("max req/s", "us each", "TTFT p50 +us", "TTFT p99 +us", "idle"):
        rates.add_column(column, justify="right", no_wrap=True)
    for name, figures in summaries.items():
        costs.add_row(name, *format_costs(figures))
        rates.add_row(name, *format_rates(figures))
    return [costs, rates]


def format_costs(figures: Mapping[str, Spread]) -> Iterator[str]:
    yield format_spread(figures["request_us"])
    yield format_spread(figures["token_us"])
    yield format_spread(figures.get("request_ratio"), 2)
    yield format_spread(figures.get("token_ratio"), 2)
    yield f"{figures['system_share'].median:.0%}"


def format_rates(figures: Mapping[str, Spread]) -> Iterator[str]:
    yield format_spread(figures["requests_per_second"], 0)
    yield format_spread(figures["whole_request_us"])
    yield format_spread(figures["added_ttft_p50_us"], 0)
    yield format_spread(figures["added_ttft_p99_us"], 0)
    yield f"{figures['idle_share'].median:.2%}"


def find_starved(summaries: Mapping[str, Mapping[str, Spread]]) -> Iterator[str]:
    """Says whose rates and waits are another process's doing, not the proxy's."""
    for name, figures in summaries.items():
        share = figures["busy_share"].median
        if share < STARVED_SHARE:
            yield f"{name} got {share:.0%} of its core: max req/s and TTFT say little"


def print_report(summaries: Mapping[str, Mapping[str, Spread]], description: Description) -> None:
    out = Console(width=WIDTH)
    for table in build_tables(summaries):
        out.print(table)
    for line in (description.machine, *description.notes, *find_starved(summaries)):
        out.print(f"- {line}", markup=False, highlight=False)


# ---- the command ----


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "what",
        nargs="?",
        default="cost",
        choices=("cost", "memory", "idle", "scaling"),
        help="cost per request and token; memory over a million requests; 10,000 idle clients; "
        "1, 2, 4, ... up to --processes",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1, help="of each gateway of ours")
    parser.add_argument("--python", default=sys.executable, help="what runs ours: another 3.11")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="proxies; floors come along")
    parser.add_argument(
        "--asleep",
        action="store_true",
        help="clients and engines sleep until something comes; waking them is charged to proxies",
    )
    parser.add_argument(
        "--instances", type=int, default=4, help="of scaling: as how many the engine is known"
    )
    parser.add_argument("--seconds", type=float, default=1.2, help="of each run")
    parser.add_argument("--requests", type=int, default=MILLION, help="of memory, once it is warm")
    parser.add_argument("--clients", type=int, default=CLIENTS, help="of idle")
    parser.add_argument("--quick", action="store_true", help="does everything work? a few seconds")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    return parser.parse_args(arguments)


def choose_settings(arguments: argparse.Namespace) -> Settings:
    if arguments.quick:
        return Settings(rounds=1, seconds=0.2, lengths=(1, 16, 64))
    return Settings(rounds=arguments.rounds, seconds=arguments.seconds)


def describe(
    settings: Settings,
    cores: Cores,
    measured: Collection[str],
    gateways: str,
    *,
    awake: bool,
    quick: bool,
) -> Description:
    """`gateways`: the interpreter that runs them."""
    notes = [describe_cores(cores), f"gateways run by {gateways}"]
    if not awake:
        notes.append("clients and engines sleep until something comes: proxies pay for waking them")
    if find_haproxy() is None:
        notes.append("haproxy is not installed, so it is not measured")
    if not any(name.startswith("sglang") for name in measured):
        notes.append("sglang-router is not measured: it was left out, or cannot be installed")
    if quick:
        notes.append("--quick shows that the benchmark works: quote none of its figures")
    python = f"Python {platform.python_version()}"
    machine = f"{platform.platform()}, {os.cpu_count()} cores, {python}"
    return Description(machine, settings, tuple(notes))


def main() -> int:
    # Unwind on SIGTERM (`timeout`, CI), so that no engine or gateway outlives the benchmark.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    arguments, console = parse_arguments(), Console(stderr=True)
    try:
        build_tools()
        if arguments.what == "cost":
            report_costs(arguments, console)
        elif arguments.what == "scaling":
            report_scaling(arguments, console)
        else:
            report_endurance(arguments, console)
    except BenchError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    return 0


def report_endurance(arguments: argparse.Namespace, console: Console) -> None:
    cores, settings = choose_cores(list_cores()), choose_settings(arguments)
    values: Sequence[Sample | Crowd]
    if arguments.what == "memory":
        samples = measure_memory(cores, console, 10_000 if arguments.quick else arguments.requests)
        values, table = samples, build_memory_table(samples)
    else:
        clients = 1_000 if arguments.quick else arguments.clients
        # This process is all of the clients.
        settle(os.sched_getaffinity(0))
        crowds = measure_crowds(cores, settings.step_us, settings.seconds, clients)
        values, table = crowds, build_crowd_table(crowds)
    if arguments.output == "json":
        print(json.dumps(to_rows(values), indent=2))
    else:
        Console(width=WIDTH).print(table)


def report_scaling(arguments: argparse.Namespace, console: Console) -> None:
    settings, cores = choose_settings(arguments), list_cores()
    ladder = scaling.Ladder(
        arguments.processes,
        arguments.instances,
        settings.rounds,
        settings.seconds,
        settings.step_us,
        arguments.python,
        arguments.processes + 2 <= len(cores) and not arguments.asleep,
    )
    rungs = scaling.measure(ladder, cores, console)
    if arguments.output == "json":
        print(json.dumps([asdict(rung) for rung in rungs], indent=2))
    else:
        Console(width=WIDTH).print(scaling.build_table(rungs))


def report_costs(arguments: argparse.Namespace, console: Console) -> None:
    settings, cores = choose_settings(arguments), choose_cores(list_cores())
    processes, only, python = arguments.processes, arguments.only, arguments.python
    awake = cores.are_enough and not arguments.asleep
    with stage(cores, settings.step_us, processes, only, python, awake=awake) as subjects:
        rounds = measure(subjects, settings, cores.load, console)
    summaries = {s.name: summarize(rounds, s) for s in subjects if s.name != "direct"}
    quick = arguments.quick
    description = describe(settings, cores, summaries, python, awake=awake, quick=quick)
    if arguments.output == "json":
        proxies = {
            name: {figure: asdict(values) for figure, values in figures.items()}
            for name, figures in summaries.items()
        }
        print(json.dumps({**asdict(description), "proxies": proxies}, indent=2))
    else:
        print_report(summaries, description)


if __name__ == "__main__":
    sys.exit(main())
