"""A day in minutes: a fleet of 32 emulated GPUs whose traffic moves, served in several ways.

    python benchmarks/day/run.py                      # every mode and the oracle
    python benchmarks/day/run.py --modes static,flips --quick

What each mode gave is kept in --work: a run that was broken off goes on where it was. Runs in a
network of its own (scripts/isolated). README.md explains the figures.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT)]

import numpy as np  # noqa: E402
from chart import draw  # noqa: E402
from deployment import (  # noqa: E402
    INSTANCES,
    MAX_MODEL_LEN,
    MODES,
    ORACLE,
    Mode,
    Pools,
    make_workload,
    placed,
    plan,
    planned,
    say,
)
from environment import PER_NODE, Stage, log_line, opened_stage, write_json  # noqa: E402
from report import build_table  # noqa: E402
from rich.console import Console  # noqa: E402
from scoring import ReportedCounts, Result, Seen, join, read_result, read_seen, score, write_seen  # noqa: E402
from traffic import PHASES, Day, Lengths, draw_day, read_lengths  # noqa: E402

from cleave.simulator.trace import Trace  # noqa: E402
from cleave.traffic.recordings.history_error import HistoryError  # noqa: E402

from e2e.cluster.cluster import has_addresses  # noqa: E402

PHASE_S, QUICK_PHASE_S = 60.0, 20.0
LEAST_INTERVAL_S, LOOKS = 10, 6
"""Between two looks whether another plan would be better, the least there is; and their number
in a phase, where that is longer."""
END_TIMEOUT_S = 60.0
WIDTH = 150


@dataclass(frozen=True, slots=True)
class Settings:
    """One benchmark."""

    day: Day
    lengths: dict[str, Lengths]
    time_scale: float
    work: Path

    @property
    def phase_s(self) -> float:
        """Of the wall's clock."""
        return self.day.phase_ms / 1e3 * self.time_scale

    @property
    def interval_s(self) -> int:
        """Between two looks, of the wall's clock."""
        return max(LEAST_INTERVAL_S, round(self.phase_s / LOOKS))

    def result_file(self, mode: str) -> Path:
        """A mode's figures."""
        return self.work / f"{mode}.json"

    def seen_file(self, mode: str) -> Path:
        """What clients saw in a mode."""
        return self.work / f"{mode}.npz"

    def workload(self, index: int) -> object:
        """What is known of a phase's traffic."""
        return make_workload(self.day.phases[index], self.lengths, self.time_scale)

    def best(self, index: int) -> Pools:
        """The planner's answer for a phase."""
        lost = PER_NODE if self.day.phases[index].loses_node else 0
        return plan(self.workload(index), self.time_scale, INSTANCES - lost)


def run_mode(stage: Stage, mode: Mode, settings: Settings) -> tuple[Result, Seen]:
    """The whole day in one mode."""
    manifest = (
        planned(settings.workload(0), settings.time_scale, settings.interval_s, flips=mode.flips)
        if mode.replans
        else placed(settings.best(0), settings.time_scale, flips=mode.flips)
    )
    lost_at_s = [
        index * settings.phase_s
        for index, phase in enumerate(settings.day.phases)
        if phase.loses_node
    ]
    with stage.serving(manifest):
        since_s = time.time()
        seen = serve(stage, settings, mode.name, settings.day.trace, lost_at_s)
        counts = look_back(stage, since_s, time.time())
        (settings.work / f"{mode.name}.events").write_text(stage.events())
        write_json(settings.work / f"{mode.name}.status.json", stage.status())
    return score(mode.name, settings.day, seen, settings.time_scale, counts), seen


def run_oracle(stage: Stage, settings: Settings) -> tuple[Result, Seen]:
    """Each phase by itself, on its best plan, which is there before its first request."""
    parts, counts = [], []
    with stage.serving(placed(settings.best(0), settings.time_scale, flips=False)):
        for index, phase in enumerate(settings.day.phases):
            pools = settings.best(index)
            log_line(f"oracle: {phase.name} on {say(pools)}")
            if phase.loses_node:
                stage.lose_node()
            stage.change(placed(pools, settings.time_scale, flips=False))
            since_s = time.time()
            name = f"{ORACLE}-{index}"
            parts.append(serve(stage, settings, name, settings.day.cut(index), []))
            counts.append(look_back(stage, since_s, time.time()))
    whole = ReportedCounts(0, len(parts) - 1, sum(each.instance_s for each in counts))
    seen = join(parts)
    return score(ORACLE, settings.day, seen, settings.time_scale, whole), seen


def serve(
    stage: Stage, settings: Settings, name: str, trace: Trace, lost_at_s: Sequence[float]
) -> Seen:
    """Ask all of `trace`; a node is lost at each of these moments after the first request."""
    sent_file, seen = (settings.work / f"{name}-{part}.npz" for part in ("asked", "seen"))
    np.savez(
        sent_file,
        arrival_ms=trace.arrival_ms,
        prompt_tokens=trace.prompt_tokens,
        output_tokens=trace.output_tokens,
    )
    load = stage.load(sent_file, seen, settings.time_scale)
    begun = time.monotonic()
    try:
        for at_s in lost_at_s:
            time.sleep(max(0.0, begun + at_s - time.monotonic()))
            log_line(f"{name}: a node is lost")
            stage.lose_node()
        span_s = trace.arrival_ms[-1] / 1e3 * settings.time_scale
        code = load.wait(span_s + END_TIMEOUT_S)
    finally:
        load.kill()
        load.wait()
    if code:
        raise RuntimeError(f"the load ended with {code}")
    return read_seen(seen)


def look_back(stage: Stage, since_s: float, until_s: float) -> ReportedCounts:
    """What Prometheus has of that time."""
    flips = stage.prometheus.look_back("sum(cleave_gateway_flips_total)", since_s, until_s, 1)
    ready = stage.prometheus.look_back(
        'sum(max by (model, role) (cleave_gateway_instances{state="ready"}))', since_s, until_s, 1
    )
    changes = [each for each in stage.status().get("plans", ()) if each["verdict"] == "Applied"]
    counted = [float(value) for series in flips for _, value in series["values"]]
    instance_s = sum(float(value) for series in ready for _, value in series["values"])
    grown = counted[-1] - counted[0] if counted else 0.0
    return ReportedCounts(round(grown), len(changes), instance_s)


def run_modes(names: Sequence[str], settings: Settings) -> None:
    """One after the other on one stage; each result is written as soon as it is there."""
    os.environ.pop("KUBECONFIG", None)
    with (
        tempfile.TemporaryDirectory(prefix="cleave-day-") as folder,
        opened_stage(Path(folder)) as stage,
    ):
        for name in names:
            log_line(f"{name}: {len(settings.day.trace):,} requests")
            found, seen = (
                run_oracle(stage, settings)
                if name == ORACLE
                else run_mode(stage, MODES[name], settings)
            )
            write_seen(settings.seen_file(name), seen)
            write_json(settings.result_file(name), asdict(found))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--modes", default=",".join([ORACLE, *MODES]), help="some of these")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "day")
    parser.add_argument("--phase", type=float, metavar="S", help="of the wall's clock; 60")
    parser.add_argument("--time-scale", type=float, default=0.5, help="of the trace's clock")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="does everything work? quote nothing")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    return parser.parse_args(arguments)


def isolate() -> None:
    """Start again in a network in which pods' addresses are local."""
    if not has_addresses():
        isolated = str(ROOT / "scripts" / "isolated")
        os.execv(isolated, [isolated, sys.executable, *sys.argv])


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    names = args.modes.split(",")
    if unknown := set(names) - {ORACLE, *MODES}:
        sys.exit(f"--modes: {', '.join(sorted(unknown))}: is none of {ORACLE}, {', '.join(MODES)}")
    isolate()
    try:
        lengths = read_lengths(args.data, MAX_MODEL_LEN)
    except HistoryError as error:
        sys.exit(f"--data: {error}")
    phase_s = args.phase or (QUICK_PHASE_S if args.quick else PHASE_S)
    day = draw_day(PHASES, lengths, phase_s * 1e3 / args.time_scale, args.seed)
    work = args.work / f"x{args.time_scale:g}-p{phase_s:g}-s{args.seed}"
    work.mkdir(parents=True, exist_ok=True)
    settings = Settings(day, lengths, args.time_scale, work)
    missing = [name for name in names if not settings.result_file(name).exists()]
    if missing:
        run_modes(missing, settings)
    results = [read_result(settings.result_file(name)) for name in names]
    seen = {name: read_seen(settings.seen_file(name)) for name in names}
    document = {
        "time_scale": args.time_scale,
        "phase_s": phase_s,
        "results": [asdict(each) for each in results],
    }
    write_json(work / "report.json", document)
    draw(work / "day.html", day, seen)
    if args.output == "json":
        print((work / "report.json").read_text())
    else:
        Console(width=WIDTH).print(build_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
