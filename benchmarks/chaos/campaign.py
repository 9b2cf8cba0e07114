"""Many runs of run.py, piece by piece, with all results in one JSON: `campaign.py --seconds 400`.

A piece hurts several fleets side by side, each with a seed of its own, and adds their reports to
the file. It may be broken off and continued later; `--show` prints the table of all pieces so far.
Exit code 1: a fleet of this piece was wrong.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RUN = Path(__file__).with_name("run.py")
ROOT = Path(__file__).parents[2]
FIRST_SEED = 10_000
UP_AND_SETTLED_S = 600
"""Beyond a piece's seconds: fleets come up, finish their last faults and go down."""
MOST_FAULTS = 5_000
FOUND = ("RIGHT", "NOT_RESUMABLE", "ENGINES_FAILED", "NO_INSTANCE", "GATEWAY_LOST", "BUFFERS_FULL")
"""Columns of the table, by case (see e2e/chaos/verdict.py)."""

Piece = dict[str, Any]
"""A report of run.py, with its date, commit and options."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "chaos.json")
    parser.add_argument("--fleets", type=int, default=2, help="side by side")
    parser.add_argument("--seconds", type=float, default=400, help="no fault begins later")
    parser.add_argument(
        "--first-seed",
        type=int,
        default=FIRST_SEED,
        help="where the results of earlier pieces are"
        " elsewhere, so that their faults are not drawn again",
    )
    parser.add_argument("--show", action="store_true", help="print the table and do nothing else")
    options, of_run = parser.parse_known_args()
    pieces: list[Piece] = (
        json.loads(options.results.read_text()) if options.results.exists() else []
    )
    if options.show:
        print_campaign(pieces, Console())
        return 0
    new = hurt_fleets(options.first_seed + len(pieces), options.fleets, options.seconds, of_run)
    write(options.results, pieces + new)
    print_campaign(new, Console())
    return 1 if len(new) < options.fleets or any(piece["violation"] for piece in new) else 0


def hurt_fleets(first_seed: int, fleets: int, seconds: float, of_run: list[str]) -> list[Piece]:
    """Reports of a piece, of those fleets that gave one."""
    stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"date": stamp, "commit": find_commit(), "options": of_run}
    command = [sys.executable, str(RUN), "emulated", "--faults", str(MOST_FAULTS)]
    command += ["--seconds", str(seconds), "-o", "json", *of_run]
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for number in range(fleets):
            out = Path(folder) / f"{number}.json"
            with out.open("w") as file:
                seed = str(first_seed + number)
                runs.append((subprocess.Popen([*command, "--seed", seed], stdout=file), out))
        for run, _ in runs:
            try:
                run.wait(seconds + UP_AND_SETTLED_S)
            except subprocess.TimeoutExpired:
                run.terminate()
                run.wait()
        texts = [out.read_text() for _, out in runs]
    return [about | json.loads(text) for text in texts if text]


def find_commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def write(results: Path, pieces: list[Piece]) -> None:
    """At once or not at all: what earlier pieces found stays."""
    results.parent.mkdir(parents=True, exist_ok=True)
    part = results.with_name(f"{results.name}.{os.getpid()}")
    part.write_text(json.dumps(pieces, indent=1) + "\n")
    part.replace(results)


def print_campaign(pieces: list[Piece], out: Console) -> None:
    """What happened, by kind of fault; for people."""
    faults, touched = sum_up(pieces)
    table = Table("fault", "number", *[case.lower().replace("_", " ") for case in FOUND])
    for kind, number in faults.most_common():
        cases = touched.get(kind, Counter())
        table.add_row(kind, f"{number:,}", *[f"{cases[case]:,}" for case in FOUND])
    out.print(table)
    out.print(f"{sum(piece['poisoned'] for piece in pieces)} engines ended by poison requests")
    requests = sum(piece["requests"] for piece in pieces)
    cases = sum((Counter(piece["cases"]) for piece in pieces), Counter())
    seconds = sum(piece["seconds"] for piece in pieces)
    out.print(f"{len(pieces)} fleets, {seconds:,.0f} s, {faults.total():,} faults")
    out.print(f"{requests:,} requests: {dict(cases.most_common())}")
    for piece in pieces:
        if piece["violation"]:
            out.print(f"VIOLATION, seed {piece['seed']}: {piece['violation'][:400]}", markup=False)


def sum_up(pieces: list[Piece]) -> tuple[Counter[str], dict[str, Counter[str]]]:
    """Faults by kind; by kind, how requests ended that ran while one lasted."""
    faults: Counter[str] = Counter()
    touched: dict[str, Counter[str]] = {}
    for piece in pieces:
        faults += Counter(piece["faults"])
        for kind, cases in piece["touched"].items():
            touched.setdefault(kind, Counter()).update(cases)
    return faults, touched


if __name__ == "__main__":
    sys.exit(main())
