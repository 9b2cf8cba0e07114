"""A progress bar on standard error; nothing is printed where that is not a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import typer

ProgressCallback = Callable[[int, int, str], None]
"""Called with steps done, total steps, and a description of the current step."""


@contextmanager
def show_progress(description: str) -> Iterator[ProgressCallback]:
    """Yield a function that updates the bar; the bar disappears at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(description, total=None)

        def tick(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text or description)

        yield tick


@contextmanager
def show_simulation_progress(
    description: str, has_blocks: bool = False
) -> Iterator[ProgressCallback]:
    """`show_progress` for simulations; announces when the simulator has to be compiled first.
    `has_blocks`: of a trace with the blocks of prompts."""
    if find_spec("numba"):
        from cleave.simulator.run import is_compiled

        if not is_compiled(has_blocks):
            typer.echo("compiling the simulator once for this version: 10 to 60 s", err=True)
    with show_progress(description) as tick:
        yield tick
