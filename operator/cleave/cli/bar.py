"""A progress bar on standard error, for people only: in a pipe or a log there is nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import typer

Tick = Callable[[int, int, str], None]
"""Done, of how many, and what is going on."""


@contextmanager
def progress_bar(what: str) -> Iterator[Tick]:
    """A function that moves the bar; nothing of it stays on the screen."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=None)

        def tick(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, description=text or what)

        yield tick


@contextmanager
def simulating_bar(what: str) -> Iterator[Tick]:
    """The same before work that simulates; says so when the simulator has to be compiled first."""
    if find_spec("numba") and not _is_compiled():
        typer.echo("compiling the simulator, once for this version: about 10 seconds", err=True)
    with progress_bar(what) as tick:
        yield tick


def _is_compiled() -> bool:
    from cleave.simulator.run import is_compiled

    return is_compiled()
