"""A progress bar on standard error, for people only: in a pipe or a log there is nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
