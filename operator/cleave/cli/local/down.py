"""`cleave down`: stops a deployment on this machine."""

import asyncio
from typing import Annotated

import typer
from typer import Option

from cleave.cli.options import RunningNames
from cleave.cli.output.errors import report_local_errors


def down(
    names: RunningNames = None,
    timeout: Annotated[
        float,
        Option(
            min=0, help="Seconds to let running requests finish before all processes are killed."
        ),
    ] = 45,
) -> None:
    """Stop deployments: drain the gateway first, then the decode and the prefill workers.

    \b
    Examples:
      # Stop the only running deployment
      cleave down
      # Stop two deployments and give their requests two minutes
      cleave down chat code --timeout 120
    """
    from cleave.local import state
    from cleave.local import up as local

    with report_local_errors():
        # All names are looked up first: a wrong one stops nothing.
        found = [state.find_stoppable(name) for name in names or ()]
        folders = {folder.name: folder for folder in found or [state.find_running(None)]}
        for folder in folders.values():
            asyncio.run(local.stop_deployment(folder, timeout))
            typer.echo(f"{folder.name} stopped")
