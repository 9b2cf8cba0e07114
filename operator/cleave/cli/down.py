"""`cleave down`: end a deployment on this machine."""

import asyncio
from typing import Annotated

import typer

from cleave.cli.faults import told
from cleave.cli.names import complete_running


def down(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Deployment; may be left out when one is up.", autocompletion=complete_running
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds for running requests; then all ends at once.")
    ] = 45,
) -> None:
    """End a deployment: the gateway drains first, then decode, then prefill workers.

    Example: cleave down chat
    """
    from cleave.local import state
    from cleave.local import up as local

    with told():
        killed = {folder.name: folder for folder in state.lost()}
        folder = killed.get(name or "") or state.find(name)
        asyncio.run(local.down(folder, timeout))
    typer.echo(f"{folder.name} is down")
