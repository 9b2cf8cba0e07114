"""`cleave logs`: prints the logs of pods, also of pods that have ended."""

import os
import re
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from cleave.cli.options import complete_logged
from cleave.cli.output.errors import FAILED, fail

_POLL_INTERVAL_S = 0.2
_LAST_LINES = 100
_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_AGE = re.compile(r"(\d{1,9})([smhd])")
_MAX_AGE = timedelta(days=36_500)
"""Logs are younger; times before the year 1 cannot be computed."""


def _parse_age(text: str) -> timedelta:
    """`90s`, `10m`, `2h` or `1d`."""
    found = _AGE.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a time such as 90s, 10m, 2h or 1d")
    return min(timedelta(seconds=int(found[1]) * _UNITS_S[found[2]]), _MAX_AGE)


def logs(
    name: Annotated[str, Argument(help="Name of the deployment.", autocompletion=complete_logged)],
    pod: Annotated[str | None, Argument(help="Name of the pod. Default: all pods.")] = None,
    follow: Annotated[
        bool, Option("--follow", "-f", help="Stream new lines until Ctrl-C.")
    ] = False,
    lines: Annotated[
        int | None,
        Option(
            "--lines",
            "-n",
            min=0,
            help="Number of most recent lines per pod. Default: 100, or all with --since.",
        ),
    ] = None,
    since: Annotated[
        timedelta | None,
        Option(
            "--since",
            parser=_parse_age,
            metavar="TIME",
            help="Only lines newer than this, such as 90s, 10m, 2h or 1d.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print the logs of a deployment's pods.

    \b
    Examples:
      # Print the last 100 lines of every pod of the deployment chat
      cleave logs chat
      # Print what all pods wrote in the last ten minutes
      cleave logs chat --since 10m
      # Stream the log of one pod
      cleave logs chat chat-prefill-0 -f
    """
    from cleave.local import state
    from cleave.local.kubelet import logs as local

    files = _select_files(state.get_folder(name).path / "logs", name, pod)
    # Take sizes before reading: lines written meanwhile are printed twice rather than lost.
    sizes = [file.stat().st_size for file in files]
    now = datetime.now().astimezone()
    for file in files:
        if since is None:
            past = local.tail(file, _LAST_LINES if lines is None else lines)
        else:
            past = local.read_since(file, now - since, now)
            past = past if lines is None else past[max(0, len(past) - lines) :]
        _print_lines(file, past, several=len(files) > 1)
    if follow:
        _stream(files, sizes)


def _select_files(folder: Path, name: str, pod: str | None) -> list[Path]:
    available = sorted(each for each in folder.glob("*.log") if each.is_file())
    if not available:
        fail([f"{name} has no logs on this machine"], FAILED)
    selected = [file for file in available if pod in (None, file.stem)]
    if not selected:
        pods = ", ".join(file.stem for file in available)
        fail([f"{name} has no pod {pod}; it has {pods}"], FAILED)
    return selected


def _stream(files: Sequence[Path], sizes: Sequence[int]) -> None:
    offsets = dict(zip(files, sizes, strict=True))
    while True:
        for file in files:
            text, offsets[file] = _read_new_lines(file, offsets[file])
            _print_lines(file, text.splitlines(), several=len(files) > 1)
        time.sleep(_POLL_INTERVAL_S)


def _read_new_lines(file: Path, offset: int) -> tuple[str, int]:
    """Complete lines written after byte `offset`, and the offset after them."""
    try:
        with file.open("rb") as opened:
            if os.fstat(opened.fileno()).st_size < offset:
                offset = 0  # The kubelet has truncated a log that grew too long.
            opened.seek(offset)
            text = opened.read()
    except FileNotFoundError:
        return "", 0  # The deployment is starting again and will write a new file.
    complete = text[: text.rfind(b"\n") + 1]
    return complete.decode(errors="replace"), offset + len(complete)


def _print_lines(file: Path, lines: Sequence[str], *, several: bool) -> None:
    for line in lines:
        typer.echo(f"{file.stem} | {line}" if several else line)
