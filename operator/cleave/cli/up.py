"""`cleave up`: a deployment on this machine, in the foreground or detached."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cleave.cli.faults import load_deployment, told

if TYPE_CHECKING:
    from rich.console import Console

    from cleave.local.job import Job

File = Annotated[
    Path, typer.Option("--file", "-f", help="Manifest with an LLMDeployment.", show_default=False)
]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port of the gateway on 127.0.0.1.")]
SharedCores = Annotated[
    bool, typer.Option("--allow-shared-cores", help="Let engines share cores when they run out.")
]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds to wait until everything is ready.")]


def up(
    file: File,
    port: Port = 8080,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run in the background; return when ready.")
    ] = False,
    timeout: Timeout = 900,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the pods as YAML and start nothing.")
    ] = False,
    allow_shared_cores: SharedCores = False,
) -> None:
    """Bring a deployment up on this machine, without a cluster.

    Example: cleave up -f examples/emulated.yaml -d
    """
    deployment = load_deployment(file)
    from rich.console import Console

    from cleave.local import node
    from cleave.local.planning import must_be_installed, plan_job

    with told():
        if not dry_run:
            must_be_installed(deployment.spec.engine.type)
        job = plan_job(deployment, node.inspect(), port, allow_shared_cores=allow_shared_cores)
        if dry_run:
            _print_pods(job)
        else:
            asyncio.run(_up(job, Console(), timeout, detach))


async def _up(job: "Job", console: "Console", timeout_s: float, detach: bool) -> None:
    from cleave.cli.screen import progress
    from cleave.local import state
    from cleave.local import up as local
    from cleave.local.errors import UpError
    from cleave.local.following import watch

    local.check(job)
    if detach:
        await local.detach(job, progress(console), timeout_s)
        _say_ready(job, console, f"end it with: cleave down {job.deployment}")
        return
    async with local.running(job, progress(console), timeout_s) as supervisor:
        if supervisor.is_stopping:
            raise UpError(["stopped before it was ready"])
        _say_ready(job, console, "end it with Ctrl-C")
        await watch(state.folder(job.deployment), lambda line: console.print(line, markup=False))
        console.print("stopping: the gateway first, then the workers; Ctrl-C again ends at once")


def _say_ready(job: "Job", console: "Console", how_to_end: str) -> None:
    line = f"[green]ready[/]  {job.model} at {job.url}/v1  ({how_to_end})"
    console.print(line, highlight=False, soft_wrap=True)


def _print_pods(job: "Job") -> None:
    import yaml

    typer.echo(yaml.safe_dump_all(job.pods, sort_keys=False), nl=False)
