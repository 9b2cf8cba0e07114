"""The simulator beside fleets that really serve: emulated engines, and vLLM on CPU.

    python benchmarks/fidelity/run.py emulated [--policy BestFit] [--flips --time-scale 1]
    python benchmarks/fidelity/run.py emulated --reuse
    python benchmarks/fidelity/run.py emulated --targets --shares 0.9,1.5
    python benchmarks/fidelity/run.py vllm

What clients saw is kept in --work, load by load: a run that was broken off goes on where it was,
and one that finds every load there only simulates them anew. README.md explains the figures.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from arrivals import CONVERSATIONS, Lengths, all_at_once, dither, draw_trace, foresee, read_lengths
from compare import Comparison, Slo, compare
from cores import CoresError
from deployments import StageError, deployed
from emulated import CASES as EMULATED_CASES
from emulated import Emulated
from fleet import Subject
from iteration_times import PassScale, fit_pass_scale, read_passes
from load import as_sent, offer
from recordings import keep, recall
from report import Report, describe_machine, print_report
from vllm_cpu import CASES as VLLM_CASES
from vllm_cpu import Vllm

from cleave.api.enums import DispatchPolicy
from cleave.profiling.client import OpenAIClient
from cleave.simulator.run import simulate

ROOT = Path(__file__).parent.parent.parent
EMULATED_SHARES = (0.3, 0.45, 0.6, 0.7, 0.8, 0.9, 1.0)
VLLM_SHARES = (0.5, 0.7, 0.9)
"""Few and long: chance alone moves the attainment of 250 requests by 2 points."""
CAPACITY_REQUESTS = 2000
TRIAL = "trial.npz"
SLO_REQUESTS = 5000
SLO_SHARE = 0.7
"""Of capacity: the load at which targets are chosen."""
SLO_PERCENTILE = 90
DRAWS = 20
"""Simulations of each load besides the one with its arrivals as they were sent."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One benchmark."""

    shares: tuple[float, ...]
    """Of the simulated capacity."""
    requests: int
    seed: int
    data: Path
    work: Path
    reuse: bool = False
    """Whether requests are turns of conversations."""


def run(subject: Subject, settings: Settings) -> dict[str, list[Comparison]]:
    """Serve the loads that are not kept yet, then simulate all of them; by what passes take."""
    folder = settings.work / subject.case.name
    folder.mkdir(parents=True, exist_ok=True)
    lengths = read_lengths(settings.data, subject.length_scale, subject.max_model_len)
    if settings.reuse:
        shared = round(CONVERSATIONS.shared_tokens * subject.length_scale)
        turns = replace(CONVERSATIONS, shared_tokens=shared)
        lengths = replace(lengths, conversations=turns, block_tokens=subject.block_size)
    files = {share: folder / f"load-{share:g}.npz" for share in settings.shares}
    if not all(file.exists() for file in (folder / TRIAL, *files.values())):
        serve(subject, settings, lengths, folder, files)
    slo = choose_slo(subject, folder, lengths, settings)
    return compare_with_twin(subject, folder, slo, lengths, files, settings.seed)


def serve(
    subject: Subject,
    settings: Settings,
    lengths: Lengths,
    folder: Path,
    files: dict[float, Path],
) -> None:
    """Bring the fleet up and offer it the missing loads."""
    name, seed = subject.case.name, settings.seed
    say(f"{name}: bringing it up")
    with deployed(subject.spec(folder), subject.case, folder) as stage:
        subject.prepare(stage, folder)
        client = OpenAIClient(stage.url, subject.model, timeout_s=600.0)
        urls = [*stage.engines.get("prefill", ()), *stage.engines.get("mixed", ())]
        engines = [stage.connect(url) for url in urls]

        def offer_at(rate: float, seed: int, file: Path) -> None:
            trace = draw_trace(lengths, rate, settings.requests, seed)
            since_s = time.monotonic()
            seen = asyncio.run(offer(client, trace, subject.time_scale, seed, engines))
            for fault in seen.faults[:3]:
                say(fault)
            if not file.exists():
                keep(file, trace, seen, read_passes(folder, since_s, time.monotonic()))

        # Passes of new shapes take longer, and what a fleet does in its first seconds says nothing:
        # this load is compared with nothing, but measures what passes take in traffic.
        say(f"{name}: a trial")
        capacity = find_capacity(subject, folder, PassScale(), lengths, seed)
        offer_at(capacity * SLO_SHARE, seed + 1, folder / TRIAL)
        capacity = find_capacity(
            subject, folder, fit_trial_pass_scale(subject, folder), lengths, seed
        )
        for share, file in files.items():
            if not file.exists():
                rate = capacity * share
                say(f"{name}: {share:.0%} of capacity, {rate:.2f} requests/s")
                offer_at(rate, seed, file)


def compare_with_twin(
    subject: Subject,
    folder: Path,
    slo: Slo,
    lengths: Lengths,
    files: dict[float, Path],
    seed: int,
) -> dict[str, list[Comparison]]:
    """Simulate every kept load and compare."""
    found: dict[str, list[Comparison]] = {}
    trial = fit_trial_pass_scale(subject, folder)
    for share, file in files.items():
        trace, seen, passes = recall(file)
        sent, seen = as_sent(trace, seen)
        scales = {"": PassScale()}
        if len(passes):
            scales = {
                ", passes as profiled": replace(trial, prompt=1.0, decode=1.0),
                ", passes as in the trial": trial,
                ", passes as in each load": fit_pass_scale(passes, subject.timing(folder)),
            }
        for words, pass_scale in scales.items():
            fleet = subject.twin(folder, pass_scale)
            predicted_trace = foresee(sent, lengths)
            outcomes = [
                simulate(fleet, draw)
                for draw in (predicted_trace, *dither(predicted_trace, DRAWS, seed))
            ]
            found.setdefault(f"{subject.case.name}{words}", []).append(
                compare(share, sent, seen, outcomes, slo, pass_scale)
            )
    return found


def fit_trial_pass_scale(subject: Subject, folder: Path) -> PassScale:
    """What passes took in the load that is compared with nothing."""
    _, _, passes = recall(folder / TRIAL)
    return fit_pass_scale(passes, subject.timing(folder))


def find_capacity(
    subject: Subject, folder: Path, pass_scale: PassScale, lengths: Lengths, seed: int
) -> float:
    """Requests per second that the twin serves with its queue always full."""
    trace = all_at_once(lengths, CAPACITY_REQUESTS, seed)
    end_ms = simulate(subject.twin(folder, pass_scale), foresee(trace, lengths)).end_ms
    return CAPACITY_REQUESTS / float(np.nanmax(end_ms)) * 1000


def choose_slo(subject: Subject, folder: Path, lengths: Lengths, settings: Settings) -> Slo:
    """The subject's targets; else those that one request in ten misses each, simulated at SLO_SHARE
    of capacity."""
    if subject.targets is not None:
        return subject.targets
    pass_scale = fit_trial_pass_scale(subject, folder)
    rate = find_capacity(subject, folder, pass_scale, lengths, settings.seed) * SLO_SHARE
    trace = draw_trace(lengths, rate, SLO_REQUESTS, settings.seed)
    outcome = simulate(subject.twin(folder, pass_scale), foresee(trace, lengths))
    ttft_ms, tpot_ms = (
        float(np.percentile(times, SLO_PERCENTILE)) for times in (outcome.ttft_ms, outcome.tpot_ms)
    )
    return Slo(ttft_ms, tpot_ms)


def say(line: str) -> None:
    sys.stderr.write(line + "\n")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kind", choices=("emulated", "vllm"))
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "fidelity")
    parser.add_argument("--cases", help="such as 1P1D,2M; absent: all")
    parser.add_argument("--shares", help="of capacity, such as 0.8,0.9; absent: all")
    parser.add_argument("--requests", type=int, default=200, help="of each load")
    parser.add_argument("--time-scale", type=float, default=0.5, help="of emulated engines")
    parser.add_argument(
        "--policy",
        choices=list(DispatchPolicy),
        default=DispatchPolicy.PREFIX_AWARE,
        type=DispatchPolicy,
        help="of the gateway before emulated engines",
    )
    parser.add_argument(
        "--flips", action="store_true", help="of emulated instances; needs --time-scale 1"
    )
    parser.add_argument(
        "--targets",
        action="store_true",
        help="emulated engines schedule by the targets: order InTimeFirst, admission WithinTpot",
    )
    parser.add_argument(
        "--reuse", action="store_true", help="requests are turns of conversations; needs no --flips"
    )
    parser.add_argument(
        "--share-cores",
        action="store_true",
        help="of vLLM: leave fronts on the cores of passes; then only shares of caches compare",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="does everything work? two loads")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args(arguments)
    if options.flips and (options.kind, options.time_scale) != ("emulated", 1.0):
        # The pool manager checks once a second and waits seconds, at any time scale.
        parser.error("--flips: only emulated engines at --time-scale 1; add that, or leave it out")
    if options.reuse and options.flips:
        # Tokens are counted on the engines that compute prompts from the start.
        parser.error("--reuse: not with --flips; leave one of them out")
    return options


def choose_subjects(arguments: argparse.Namespace) -> list[Subject]:
    selected = arguments.cases.split(",") if arguments.cases else None
    subjects: list[Subject]
    if arguments.kind == "emulated":
        subjects = [
            Emulated(
                case, arguments.time_scale, arguments.policy, arguments.flips, arguments.targets
            )
            for case in EMULATED_CASES
        ]
    else:
        subjects = [
            Vllm(case, arguments.quick, arguments.reuse, arguments.share_cores)
            for case in VLLM_CASES
        ]
    return [each for each in subjects if selected is None or each.case.name in selected]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    shares = EMULATED_SHARES if options.kind == "emulated" else VLLM_SHARES
    if options.shares:
        shares = tuple(float(share) for share in options.shares.split(","))
    requests = options.requests
    if options.quick:
        shares, requests = shares[1:3], min(requests, 100)
    subjects = choose_subjects(options)
    scale = subjects[0].time_scale
    kind = f"{options.kind}-{options.policy}" if options.kind == "emulated" else options.kind
    kind += "-flips" * options.flips + "-targets" * options.targets + "-reuse" * options.reuse
    work = options.work / f"{kind}-x{scale:g}-n{requests}-s{options.seed}"
    settings = Settings(shares, requests, options.seed, options.data, work, options.reuse)
    try:
        found = {
            name: comparisons
            for each in subjects
            for name, comparisons in run(each, settings).items()
        }
    except (StageError, CoresError) as error:
        say(f"error: {error}")
        return 1
    report = Report(options.kind, describe_machine(), scale, found)
    (work / "report.json").write_text(report.to_json())
    print(report.to_json()) if options.output == "json" else print_report(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
