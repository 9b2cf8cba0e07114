"""Start-up progress of a deployment as a live table on a terminal, for `up` and `demo`.

Elsewhere (a log, a pipe), each change is one line, and a line that names the pods still awaited
follows after `_MAX_SILENCE_S` without changes. Failures are separate lines in both cases.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cleave.cli.output.tables import print_line
from cleave.local import progress
from cleave.local.progress import READY, PodProgress, ShowProgress

_MAX_ROWS = 16
_MAX_SILENCE_S = 15.0
"""Maximum time without a line, in seconds."""
_TIME_WIDTH = len("900 s")
_GAP = 2
_STYLES = {
    READY: "green",
    "verifying": "cyan",
    "draining": "yellow",
    "stopping": "yellow",
    "CrashLoopBackOff": "red",
}


@contextmanager
def show_startup(console: Console) -> Iterator[ShowProgress]:
    """Yield a function that shows steps; the last table stays on the screen."""
    if not console.is_terminal:
        yield LineProgress(console).show
        return
    with Live(console=console, refresh_per_second=8) as live:
        before: Sequence[PodProgress] = ()

        def show(steps: Sequence[PodProgress]) -> None:
            nonlocal before
            for line in progress.describe_restarts(before, steps):
                print_line(live.console, line)
            before = steps
            live.update(build_table(steps, console.width))

        yield show


def build_table(steps: Sequence[PodProgress], width: int) -> Table:
    """Steps as a table of `width` cells; of many pods, those that are not ready come first."""
    shown = list(steps)
    if len(shown) > _MAX_ROWS:
        shown.sort(key=lambda step: step.state == READY)
    shown = shown[:_MAX_ROWS]
    names = max((len(step.pod) for step in shown), default=0)
    states = max((len(step.state) for step in shown), default=0)
    # Truncate here: Rich would shrink every column for a long log line.
    room = max(0, width - names - states - _TIME_WIDTH - 4 * _GAP)
    grid = Table.grid(padding=(0, _GAP))
    for _ in range(4):
        grid.add_column(no_wrap=True)
    for step in shown:
        state = Text(step.state, style=_STYLES.get(step.state, ""))
        # Text, not markup: engines print brackets.
        detail = Text(f"{step.stage}  ") if step.stage else Text()
        detail.append(step.detail, style="dim")
        detail.truncate(room, overflow="ellipsis")
        grid.add_row(step.pod, state, f"{step.elapsed_s:.0f} s".rjust(_TIME_WIDTH), detail)
    if len(steps) > _MAX_ROWS:
        ready = sum(step.state == READY for step in steps)
        grid.add_row(f"{ready} of {len(steps)} ready")
    return grid


class LineProgress:
    """Prints a line when a pod's state changes or its engine fails, and during long waits."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._previous: Sequence[PodProgress] = ()
        self._printed_at = clock()

    def show(self, steps: Sequence[PodProgress]) -> None:
        """Print the changes since the previous call."""
        states = {step.pod: (step.state, step.stage) for step in self._previous}
        lines = [
            f"{step.pod}  {step.state}  {step.elapsed_s:.0f} s  {step.stage}".rstrip()
            for step in steps
            if states.get(step.pod) != (step.state, step.stage)
        ]
        lines += progress.describe_restarts(self._previous, steps)
        if not lines and self._clock() - self._printed_at >= _MAX_SILENCE_S:
            lines = [progress.describe_waiting(steps)]
        for line in lines:
            self._printed_at = self._clock()
            print_line(self._console, line)
        self._previous = steps
