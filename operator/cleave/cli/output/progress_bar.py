"""A progress bar on standard error where that is a terminal; elsewhere a line now and then."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import typer

ProgressCallback = Callable[[int, int, str], None]
"""Called with steps done, total steps, and a description of the current step."""

REPEAT_S = 15.0
"""Between two lines, and before the first: most commands are done before."""


@contextmanager
def show_progress(description: str) -> Iterator[ProgressCallback]:
    """Yield a function that updates the bar, which disappears at the end. In a pipe or a log it
    prints a line every REPEAT_S."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _make_line_printer(description)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=None)

        def tick(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text or description)

        yield tick


def _make_line_printer(description: str) -> ProgressCallback:
    printed_at = time.monotonic()

    def tick(done: int, total: int, text: str) -> None:
        nonlocal printed_at
        if time.monotonic() - printed_at >= REPEAT_S:
            printed_at = time.monotonic()
            detail = f": {text}" if text else ""
            typer.echo(f"{description}, {done} of {total}{detail}", err=True)

    return tick


@contextmanager
def show_simulation_progress(
    description: str, has_blocks: bool = False
) -> Iterator[ProgressCallback]:
    """`show_progress` for simulations; announces when the simulator has to be compiled first.
    `has_blocks`: of a trace with the blocks of prompts."""
    with _report_compilation(has_blocks), show_progress(description) as tick:
        yield tick


@contextmanager
def _report_compilation(has_blocks: bool) -> Iterator[None]:
    """Print that the simulator is compiled in this block, if it is, and every REPEAT_S that it
    still is."""
    if not find_spec("numba"):
        yield
        return
    from cleave.simulator.run import is_compiled

    if is_compiled(has_blocks):
        yield
        return
    typer.echo(
        "compiling the simulator once for this version: 10 to 60 s, longer on a busy machine",
        err=True,
    )
    is_over = threading.Event()

    def repeat() -> None:
        waited_s = REPEAT_S
        while not is_over.wait(REPEAT_S) and not is_compiled(has_blocks):
            typer.echo(f"still compiling the simulator after {waited_s:.0f} s", err=True)
            waited_s += REPEAT_S

    reporter = threading.Thread(target=repeat, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        is_over.set()
        reporter.join()
