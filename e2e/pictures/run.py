"""Draws the dashboards over a few minutes of emulated fleets:
`python -m e2e.pictures.run OUTDIR --minutes 5`, with `--cluster` in `scripts/isolated`; both are
`make pictures`.

Panel by panel, with the queries and names of the dashboards' own JSON (docs/decisions/chart.md).
What is hard: everything that a panel counts has to happen, misses, flips and lost engines included.
A panel without data ends the run, but for `MAY_BE_EMPTY`.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cleave.rpc.v1 import agent_pb2

from e2e.pictures.boards import (
    Board,
    Panel,
    Series,
    build_series,
    compute_rate_interval,
    fill_variables,
    read_boards,
)
from e2e.pictures.clients import Clients
from e2e.pictures.fleet import MODEL, SCRAPE_S, Fleet, started
from e2e.pictures.operated import operated
from e2e.pictures.page import build_page, take_pictures
from e2e.support.prometheus import ROOT, Prometheus, find_programs

log = logging.getLogger(__name__)

BOARDS = ROOT / "charts" / "cleave" / "files" / "dashboards"
DRAWN = ("serving", "pools")
"""Of a fleet on one machine."""
DRAWN_OF_CLUSTER = ("control",)
"""About the operator, which there is on clusters only."""
MAY_BE_EMPTY: Mapping[str, str] = {
    "Shed requests": "on a slow machine clients ask too slowly for a rush",
}
"""Panels that may have no data, and why."""
SEED = 27
_POINTS = 120
"""Of a line."""
_LOOK_S = 3.0
_INJURIES: tuple[tuple[float, "agent_pb2.Role", dict[str, object]], ...] = (
    (0.78, agent_pb2.ROLE_PREFILL, {"corrupt_handoff": 8}),
    (0.84, agent_pb2.ROLE_DECODE, {"die": True}),
)
"""Faults by the share of the time after which they happen."""


class EmptyPanelsError(RuntimeError):
    """Panels have no data; the message names them."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A fleet's time that is over: what every panel of every board shows of it."""

    since_s: float
    until_s: float
    lines: Mapping[str, Mapping[Panel, list[Series]]]
    """By board and panel."""
    outcomes: Counter[str]
    """Of the clients' requests."""


def record(programs: Path, folder: Path, duration_s: float, boards: Sequence[Board]) -> Recording:
    """Bring a fleet up, let clients ask for `duration_s`, and ask every panel's queries."""
    with started(programs, folder) as fleet:
        since_s = time.time()
        clients = Clients(fleet.deployment.url, MODEL, SEED)
        asyncio.run(_pass_time(fleet, clients, duration_s))
        # What the last requests have done is scraped by then.
        time.sleep(2 * SCRAPE_S)
        until_s = time.time()
        lines = {
            board.name: ask_panels(fleet.prometheus, board, since_s, until_s) for board in boards
        }
    return Recording(since_s, until_s, lines, clients.outcomes)


def record_cluster(
    programs: Path, folder: Path, duration_s: float, boards: Sequence[Board]
) -> Recording:
    """The same of a cluster whose operator plans again; needs the network of scripts/isolated."""
    with operated(programs, folder, SCRAPE_S) as found:
        since_s = time.time()
        found.pass_time(duration_s)
        until_s = time.time()
        lines = {
            board.name: ask_panels(found.prometheus, board, since_s, until_s) for board in boards
        }
        outcomes = Counter({"answered": found.stream.answered})
        outcomes.update(found.stream.failures)
    return Recording(since_s, until_s, lines, outcomes)


def ask_panels(
    prometheus: Prometheus, board: Board, since_s: float, until_s: float
) -> dict[Panel, list[Series]]:
    """The lines of all panels of a board. Raises QueryError."""
    return {panel: ask(prometheus, panel, since_s, until_s) for panel in board.panels}


def ask(prometheus: Prometheus, panel: Panel, since_s: float, until_s: float) -> list[Series]:
    """The lines of a panel, as Grafana would draw them. Raises QueryError."""
    step_s = max(SCRAPE_S, int((until_s - since_s) / _POINTS))
    interval_s = compute_rate_interval(SCRAPE_S, step_s)
    variables = {"namespace": ".*", "model": MODEL, "__rate_interval": f"{interval_s}s"}
    return [
        series
        for query in panel.queries
        for series in build_series(
            query.legend,
            prometheus.look_back(fill_variables(query.text, variables), since_s, until_s, step_s),
            step_s,
        )
    ]


async def _pass_time(fleet: Fleet, clients: Clients, duration_s: float) -> None:
    began = time.monotonic()
    talking = asyncio.create_task(clients.talk(duration_s))
    due = list(_INJURIES)
    while not talking.done():
        await asyncio.to_thread(fleet.find_engines)
        if due and time.monotonic() - began > due[0][0] * duration_s:
            _, role, faults = due.pop(0)
            await asyncio.to_thread(fleet.injure, role, **faults)
        await asyncio.wait([talking], timeout=_LOOK_S)
    await talking


def find_empty(recording: Recording) -> set[str]:
    """Titles of the panels without any line that should have one."""
    empty = {
        panel.title
        for lines in recording.lines.values()
        for panel, drawn in lines.items()
        if not drawn
    }
    return empty - MAY_BE_EMPTY.keys()


def draw(recording: Recording, boards: Sequence[Board], folder: Path) -> None:
    """Write one picture for each board. Raises EmptyPanelsError."""
    pages = {
        folder / f"{board.name}.png": build_page(
            board, recording.lines[board.name], recording.since_s, recording.until_s
        )
        for board in boards
    }
    take_pictures(pages)
    if missing := find_empty(recording):
        raise EmptyPanelsError(f"no data in: {', '.join(sorted(missing))}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 drawn, 1 panels are empty or something is missing, 2 bad usage."""
    parser = argparse.ArgumentParser("python -m e2e.pictures.run", description="Draw dashboards.")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--minutes", type=float, default=5.0, help="of traffic (default: 5)")
    parser.add_argument(
        "--cluster", action="store_true", help="draw Control plane, over a cluster of its own"
    )
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    programs = find_programs(build=True)
    assert programs is not None
    names, look = (DRAWN_OF_CLUSTER, record_cluster) if args.cluster else (DRAWN, record)
    boards = [board for board in read_boards(BOARDS) if board.name in names]
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        recording = look(programs, Path(folder), args.minutes * 60, boards)
    log.info("requests by outcome: %s", dict(recording.outcomes))
    try:
        draw(recording, boards, args.folder)
    except EmptyPanelsError as error:
        log.error("error: %s", error)
        return 1
    log.info("drawn into %s", args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
