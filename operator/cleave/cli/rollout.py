"""`cleave rollout`: in which order a change would replace the instances, before it is applied."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cleave.cli.faults import BAD_INPUT, fail
from cleave.cli.question import ClusterFile
from cleave.cli.up import File, place

if TYPE_CHECKING:
    from cleave.api.deployment import LLMDeployment
    from cleave.controller.preview import Running
    from cleave.controller.rollout import RolloutLimits
    from cleave.planner.placement import Placement

_STDIN = Path("-")


class Output(StrEnum):
    """How to print."""

    TABLE = "table"
    JSON = "json"


def rollout(
    file: File,
    before: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Manifest of what runs: its status, else its placement; - is standard input. "
            "Absent: the status in FILE.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the steps and change nothing; has to be stated.")
    ] = False,
    output: Annotated[Output, typer.Option("--output", "-o", help="Format.")] = Output.TABLE,
    cluster: ClusterFile = None,
    max_surge: Annotated[
        int | None, typer.Option(min=0, help="Instead of spec.rollout.maxSurge.")
    ] = None,
    max_unavailable: Annotated[
        int | None, typer.Option(min=0, help="Instead of spec.rollout.maxUnavailable.")
    ] = None,
) -> None:
    """Show in which order a change replaces instances on a cluster, before it is applied.

    The operator takes these steps; the next begins when the instances of one are ready. 1+2 is one
    new instance and two older ones. CAPACITY is the share of the plan that can serve meanwhile:
    instances of unlike revisions never work together, so only whole pairs count.

    Exit codes: 0 the steps, 1 no plan to roll out, 2 bad input.

    Example: cleave rollout -f new.yaml --from old.yaml --dry-run

    Example: kubectl get llmd chat -o yaml | cleave rollout -f new.yaml --from - --dry-run
    """
    if not dry_run:
        why = "the roll-out itself is the operator's, after kubectl apply"
        fail([f"--dry-run: has to be stated; {why}"], BAD_INPUT)
    from cleave.cli.rollout_table import print_json, show
    from cleave.controller.preview import stages, states
    from cleave.pods.pool import revision

    after = _load(file)
    limits = _limits(after, max_surge, max_unavailable)
    running = _running(after, file, before, cluster)
    target = revision(after)
    found = stages(states(running, _placement(after, file, cluster), target), limits)
    if output is Output.JSON:
        print_json(after.name, running.revision, target, limits, found)
    else:
        show(after.name, running.revision, target, limits, found)


def _running(
    after: "LLMDeployment", file: Path, before: Path | None, cluster: Path | None
) -> "Running":
    """What runs, by the manifest `before`, else by the status in the new one."""
    from cleave.controller import preview
    from cleave.pods.pool import revision

    found = after if before is None else _load(before)
    if found.name != after.name:
        fail([f"--from: is of {found.name}, and {file} of {after.name}"], BAD_INPUT)
    if found.status is not None:
        return preview.observed(found.status)
    if before is None:
        how = f"state the manifest that runs, or kubectl get llmd {after.name} -o yaml > now.yaml"
        fail([f"--from: is needed, because {file} has no status; {how}"], BAD_INPUT)
    return preview.placed(_placement(found, before, cluster), revision(found))


def _load(file: Path) -> "LLMDeployment":
    from cleave.api.manifest import ManifestError, load

    try:
        return load(sys.stdin.read() if file == _STDIN else file)
    except ManifestError as error:
        fail(error.faults, BAD_INPUT)


def _placement(deployment: "LLMDeployment", file: Path, cluster: Path | None) -> "Placement":
    """Instances by role: stated by hand, else planned."""
    from cleave.api.engine import EngineType
    from cleave.planner.placement import located

    spec = deployment.spec
    is_planned = spec.placement is None and spec.workload is not None
    if is_planned and spec.engine.type is not EngineType.EMULATED and cluster is None:
        why = "--cluster: is needed to plan it: a YAML file with the machines"
        fail([f"{file} has no placement; {why}, or fill it in: cleave plan -o yaml"], BAD_INPUT)
    return place(located(deployment, file.parent), file, cluster)


def _limits(
    deployment: "LLMDeployment", max_surge: int | None, max_unavailable: int | None
) -> "RolloutLimits":
    from cleave.controller.rollout import RolloutError, RolloutLimits

    stated = deployment.spec.rollout
    try:
        return RolloutLimits(
            stated.max_surge if max_surge is None else max_surge,
            stated.max_unavailable if max_unavailable is None else max_unavailable,
        )
    except RolloutError as error:
        fail([str(error)], BAD_INPUT)
