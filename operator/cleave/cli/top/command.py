"""`cleave top`: live view of a deployment, redrawn at each interval.

All figures come from `/metrics` and `/fleet` of one gateway. Gateways disappear and return while
the command runs, and the terminal must be restored at its end.
"""

import asyncio
import json
import os
import signal
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from cleave.cli.options import RunningName, TableFormat
from cleave.cli.output.errors import BAD_INPUT, FAILED, fail, report_local_errors

if TYPE_CHECKING:
    from cleave.cli.top.view import TopView

_REQUEST_TIMEOUT_S = 2.0
_MAX_PAGE_BYTES = 16 << 20
_KEYBOARD = 0
"""Standard input."""
_MAX_KEYS = 64
"""Keys that are read at a time."""

Draw = Callable[["TopView"], None]
Interval = Annotated[float, Option(min=0.2, max=60, help="Seconds between two refreshes.")]
Once = Annotated[
    bool, Option("--once", help="Poll twice, one interval apart, print the result and exit.")
]
LineOutput = Annotated[
    TableFormat, Option("--output", "-o", help="Output format; json prints one object per line.")
]


def top(
    name: RunningName = None,
    gateway: Annotated[
        str | None,
        Option(
            help="URL of the internal port of a gateway elsewhere, such as http://127.0.0.1:8081.",
            show_default=False,
        ),
    ] = None,
    interval: Interval = 1.0,
    once: Once = False,
    output: LineOutput = TableFormat.TABLE,
) -> None:
    """Show live traffic against its SLO and the load of each instance, until q or Ctrl-C.

    The figures are those of one gateway. RUN and WAIT count requests at the engine, PENDING tokens
    that it still has to compute or keeps KV for, and HERE requests from this gateway. AGE is the
    age of the last load report. P50 and P90 are interpolated from histogram buckets, as Prometheus
    does.

    A table per interval is printed where standard output is not a terminal.

    \b
    Examples:
      # Watch the deployment chat on this machine
      cleave top chat
      # Watch a gateway in a Kubernetes cluster
      kubectl port-forward deploy/chat-gateway 8081 &
      cleave top --gateway http://127.0.0.1:8081
    """
    with report_local_errors():
        url = _find_url(name, gateway)
    from cleave.rpc.http_client import HttpError

    try:
        asyncio.run(_watch(_Poller(url, name or ""), interval, output, once=once))
    except HttpError as error:
        hint = "; --gateway needs its internal port, 8081 in a cluster" if gateway else ""
        fail([f"gateway at {url}: {error}{hint}"], FAILED)


def _find_url(name: str | None, gateway: str | None) -> str:
    """URL of the gateway's internal port. Raises StateError."""
    if gateway is not None:
        return _validate_url(gateway)
    from cleave.local import state
    from cleave.local.errors import StateError

    folder = state.find_running(name)
    snapshot = asyncio.run(folder.read_restored())
    if snapshot is None or not snapshot.internal_url:
        raise StateError(f"{folder.name} is starting; try again in a second")
    return snapshot.internal_url


def _validate_url(url: str) -> str:
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        is_valid = parts.scheme == "http" and parts.hostname and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        fail([f"--gateway {url}: must be a URL such as http://127.0.0.1:8081"], BAD_INPUT)
    return url.rstrip("/")


async def _watch(gateway: "_Poller", interval_s: float, output: TableFormat, *, once: bool) -> None:
    """Poll and draw until q or a signal. Raises HttpError if the first poll fails."""
    from cleave.rpc.http_client import HttpError

    _interrupt_on_signals()
    clock = asyncio.get_running_loop().time
    due = clock() + interval_s
    view = await gateway.poll()
    end = asyncio.Event()
    with _open_display(output, end, live=not once) as draw:
        if not once:
            draw(view)
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), max(due - clock(), 0.0))
                return
            due = max(due, clock()) + interval_s
            try:
                view = await gateway.poll()
            except HttpError as error:
                if once:
                    raise
                view = replace(view, fault=str(error))
            draw(view)
            if once:
                return


def _interrupt_on_signals() -> None:
    """Handle SIGTERM and SIGHUP like Ctrl-C, which restores the terminal."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, signal.raise_signal, signal.SIGINT)


class _Poller:
    """Polls `/fleet` and `/metrics` of one gateway."""

    def __init__(self, url: str, deployment: str) -> None:
        from cleave.cli.top.view import ViewBuilder

        self._url = url
        self._deployment = deployment
        """Deployment that the gateway must serve; empty: any."""
        self._view_builder = ViewBuilder()

    async def poll(self) -> "TopView":
        """Poll once. Raises HttpError; exits with code 1 if it serves another deployment."""
        import msgspec

        from cleave.rpc.fleet_status import FleetStatus
        from cleave.rpc.http_client import HttpError
        from cleave.traffic.counters import CountsError, parse_metrics_page

        fleet, metrics = await asyncio.gather(self._get("/fleet"), self._get("/metrics"))
        try:
            page = msgspec.json.decode(fleet, type=FleetStatus)
            counts = parse_metrics_page(metrics.decode(errors="replace"), time.monotonic())
        except (msgspec.MsgspecError, CountsError) as error:
            raise HttpError(f"the response is not that of a gateway: {error}") from error
        view = self._view_builder.update(page, counts, time.time())
        if self._deployment and page.instances and self._deployment not in view.deployments:
            served = ", ".join(view.deployments)
            fail([f"gateway at {self._url}: serves {served}, not {self._deployment}"], FAILED)
        return view

    async def _get(self, path: str) -> bytes:
        from cleave.rpc import http_client

        url = self._url + path
        return await http_client.get(url, seconds=_REQUEST_TIMEOUT_S, limit=_MAX_PAGE_BYTES)


@contextmanager
def _open_display(output: TableFormat, end: asyncio.Event, *, live: bool) -> Iterator[Draw]:
    """Yield a function that draws a view: in place on a terminal, where the key q sets `end`, else
    below the last one."""
    from rich.console import Console

    from cleave.cli.output.tables import convert_keys
    from cleave.cli.top.screen import print_plain, render_screen
    from cleave.cli.top.view import build_document

    console = Console(highlight=False)
    if output is TableFormat.JSON:
        yield lambda view: typer.echo(json.dumps(convert_keys(build_document(view))))
    elif live and console.is_terminal and not console.is_dumb_terminal:
        from rich.live import Live

        with _watch_keys(end), Live(console=console, screen=True, auto_refresh=False) as screen:
            yield lambda view: screen.update(render_screen(view, *console.size), refresh=True)
    else:
        yield lambda view: print_plain(console, view)


@contextmanager
def _watch_keys(end: asyncio.Event) -> Iterator[None]:
    """Set `end` when q is typed or the terminal closes; keys are not shown meanwhile."""
    if not _is_foreground():
        yield
        return

    def read() -> None:
        keys = os.read(_KEYBOARD, _MAX_KEYS)
        if not keys or b"q" in keys.lower():
            end.set()

    before, loop = termios.tcgetattr(_KEYBOARD), asyncio.get_running_loop()
    tty.setcbreak(_KEYBOARD, termios.TCSANOW)
    loop.add_reader(_KEYBOARD, read)
    try:
        yield
    finally:
        loop.remove_reader(_KEYBOARD)
        termios.tcsetattr(_KEYBOARD, termios.TCSADRAIN, before)


def _is_foreground() -> bool:
    """Whether standard input is this process's terminal, and the process in its foreground: in the
    background, changing the terminal would stop the process."""
    try:
        return os.tcgetpgrp(_KEYBOARD) == os.getpgrp()
    except OSError:
        return False
