"""`cleave logs`: what pods have printed, also after they ended."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cleave.cli.faults import FAILED, fail
from cleave.cli.names import complete_logged

_LOOK_PERIOD_S = 0.2


def logs(
    name: Annotated[str, typer.Argument(help="Deployment.", autocompletion=complete_logged)],
    pod: Annotated[str | None, typer.Argument(help="Pod; all when absent.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is printed until Ctrl-C.")
    ] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines per pod.")] = 100,
) -> None:
    """Print the logs of a deployment's pods.

    Example: cleave logs chat chat-prefill-0 -f
    """
    from cleave.local import logs as local
    from cleave.local import state

    files = _files(state.folder(name).path / "logs", name, pod)
    # Sizes before reading: what is printed meanwhile is shown twice rather than never.
    sizes = [file.stat().st_size for file in files]
    for file in files:
        _print(file, local.tail(file, lines), several=len(files) > 1)
    if follow:
        _follow(files, sizes)


def _files(folder: Path, name: str, pod: str | None) -> list[Path]:
    found = sorted(folder.glob("*.log"))
    if not found:
        fail([f"{name} has no logs on this machine"], FAILED)
    chosen = [file for file in found if pod in (None, file.stem)]
    if not chosen:
        pods = ", ".join(file.stem for file in found)
        fail([f"{name} has no pod {pod}; it has {pods}"], FAILED)
    return chosen


def _follow(files: Sequence[Path], sizes: Sequence[int]) -> None:
    places = dict(zip(files, sizes, strict=True))
    while True:
        for file in files:
            text, places[file] = _news(file, places[file])
            _print(file, text.splitlines(), several=len(files) > 1)
        time.sleep(_LOOK_PERIOD_S)


def _news(file: Path, place: int) -> tuple[str, int]:
    """Whole lines written after `place`, and the place after them."""
    try:
        with file.open("rb") as opened:
            if os.fstat(opened.fileno()).st_size < place:
                place = 0  # the kubelet has cut a log that grew too long
            opened.seek(place)
            text = opened.read()
    except FileNotFoundError:
        return "", 0  # the deployment comes up again: it will be written anew
    whole = text[: text.rfind(b"\n") + 1]
    return whole.decode(errors="replace"), place + len(whole)


def _print(file: Path, lines: Sequence[str], *, several: bool) -> None:
    for line in lines:
        typer.echo(f"{file.stem} | {line}" if several else line)
