"""`cleave up`: starts a deployment on this machine, in the foreground or detached."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from cleave.cli.options import File
from cleave.cli.output.errors import load_deployment, report_input_errors, report_local_errors
from cleave.cli.output.progress_bar import show_progress, show_simulation_progress

if TYPE_CHECKING:
    from rich.console import Console

    from cleave.api.deployment import LLMDeployment
    from cleave.local.launch_plan import LaunchPlan
    from cleave.planner.placement import Placement

Port = Annotated[int, Option(min=1, max=65535, help="Port of the gateway on 127.0.0.1.")]
SharedCores = Annotated[
    bool, Option("--allow-shared-cores", help="Let engines share CPU cores when there are too few.")
]
Timeout = Annotated[float, Option(min=1, help="Seconds to wait until all pods are ready.")]


def up(
    file: File,
    port: Port = 8080,
    detach: Annotated[
        bool, Option("--detach", "-d", help="Run in the background and return when ready.")
    ] = False,
    timeout: Timeout = 900,
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run",
            help="Only print the pods of this machine, as YAML; for a cluster: cleave render.",
        ),
    ] = False,
    allow_shared_cores: SharedCores = False,
    cluster: Annotated[
        Path | None,
        Option(help="YAML file that describes the machines to plan for.", show_default=False),
    ] = None,
) -> None:
    """Start a deployment on this machine, without a Kubernetes cluster.

    A manifest with a workload and no placement is planned first: vLLM for the machines of
    --cluster; emulated engines from their latency profile, with at most spec.planning.maxGPUs (16)
    of them, or one per GPU of --cluster.

    \b
    Examples:
      # Start in the background and return when all pods are ready
      cleave up -f examples/emulated.yaml -d
      # Print the pods without starting them
      cleave up -f examples/emulated.yaml --dry-run
    """
    deployment = load_deployment(file)
    placement = decide_placement(deployment, file, cluster)
    from rich.console import Console

    from cleave.cli.local.built_in_model import prepare_built_in_model
    from cleave.local.kubelet import node
    from cleave.local.planning import build_launch_plan, require_engine

    console = Console()
    with report_local_errors():
        if not dry_run:
            require_engine(deployment.spec.engine.type)
            deployment = prepare_built_in_model(deployment, console)
        job = build_launch_plan(
            deployment, placement, node.inspect_node(), port, allow_shared_cores=allow_shared_cores
        )
        if dry_run:
            _print_pods(job)
        else:
            asyncio.run(_start(job, console, timeout, detach))


def decide_placement(deployment: "LLMDeployment", file: Path, cluster: Path | None) -> "Placement":
    """Return the instances of each role: from spec.placement, else planned.
    Exits with code 2 when the manifest is wrong, with 1 when no plan meets the SLO."""
    from cleave.api.manifest import load_cluster
    from cleave.local import planning

    is_planned = deployment.spec.placement is None and deployment.spec.workload is not None
    bar = show_simulation_progress if is_planned else show_progress
    with report_input_errors(), report_local_errors():
        machines = load_cluster(cluster) if cluster else None
        with bar("planning") as tick:
            return planning.decide_placement(deployment, file.parent, machines, tick)


async def _start(job: "LaunchPlan", console: "Console", timeout_s: float, detach: bool) -> None:
    from cleave.cli.local.progress import show_startup
    from cleave.cli.output.tables import print_line
    from cleave.local import state
    from cleave.local import up as local
    from cleave.local.errors import DeploymentStartError
    from cleave.local.progress import watch_pods

    local.check_can_start(job)
    if detach:
        await local.start_detached(job, show_startup(console), timeout_s)
        _print_ready(job, console, f"stop it with: cleave down {job.deployment}")
        return
    async with local.run_in_foreground(job, show_startup(console), timeout_s) as run:
        if run.supervisor.is_stopping:
            raise DeploymentStartError(["stopped before it was ready"])
        _print_ready(job, console, "press Ctrl-C to stop")
        folder = state.get_folder(job.deployment)
        await watch_pods(folder, run.shown, lambda line: print_line(console, line))
        console.print("stopping the gateway, then the workers; Ctrl-C again kills them at once")


def _print_ready(job: "LaunchPlan", console: "Console", how_to_stop: str) -> None:
    line = f"[green]ready[/]  {job.model} at {job.url}/v1  ({how_to_stop})"
    console.print(line, highlight=False, soft_wrap=True)


def _print_pods(job: "LaunchPlan") -> None:
    import yaml

    typer.echo(yaml.safe_dump_all(job.pods, sort_keys=False), nl=False)
