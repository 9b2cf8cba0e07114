"""`cleave down`: stops a deployment on this machine."""

import asyncio
from typing import Annotated

import typer
from typer import Option

from cleave.cli.options import RunningName
from cleave.cli.output.errors import report_local_errors


def down(
    name: RunningName = None,
    timeout: Annotated[
        float,
        Option(
            min=0, help="Seconds to let running requests finish before all processes are killed."
        ),
    ] = 45,
) -> None:
    """Stop a deployment: drain the gateway first, then the decode and the prefill workers.

    \b
    Examples:
      # Stop the only running deployment
      cleave down
      # Stop the deployment chat and give its requests two minutes
      cleave down chat --timeout 120
    """
    from cleave.local import state
    from cleave.local import up as local

    with report_local_errors():
        orphaned = {folder.name: folder for folder in state.list_orphaned()}
        folder = orphaned.get(name or "") or state.find_running(name)
        asyncio.run(local.stop_deployment(folder, timeout))
    typer.echo(f"{folder.name} stopped")
