"""`cleave rollout`: previews the steps of a rollout before a change is applied."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cleave.cli.local.up import File, place
from cleave.cli.output.errors import BAD_INPUT, fail
from cleave.cli.planning.inputs import ClusterFile

if TYPE_CHECKING:
    from cleave.api.deployment import LLMDeployment
    from cleave.controller.rollout.planner import RolloutLimits
    from cleave.controller.rollout.preview import Running
    from cleave.planner.placement import Placement

_STDIN = Path("-")


class Output(StrEnum):
    """Output format."""

    TABLE = "table"
    JSON = "json"


def rollout(
    file: File,
    before: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Current manifest (its status, else its placement); - reads standard input. "
            "Default: the status in FILE.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the steps. Required.")
    ] = False,
    output: Annotated[Output, typer.Option("--output", "-o", help="Output format.")] = Output.TABLE,
    cluster: ClusterFile = None,
    max_surge: Annotated[
        int | None, typer.Option(min=0, help="Overrides spec.rollout.maxSurge.")
    ] = None,
    max_unavailable: Annotated[
        int | None, typer.Option(min=0, help="Overrides spec.rollout.maxUnavailable.")
    ] = None,
) -> None:
    """Preview the steps in which the operator rolls out a change to a cluster.

    The operator starts a step when the instances of the previous one are ready. 1+2 means one new
    and two old instances. CAPACITY is the share of the planned capacity that serves during the
    step: instances of different revisions never work together, so only complete pairs count.

    Exit codes: 0 steps were printed, 1 there is no plan to roll out, 2 the input is invalid.

    \b
    Examples:
      # Compare two manifests
      cleave rollout -f new.yaml --from old.yaml --dry-run
      # Compare with what runs in the cluster
      kubectl get llmd chat -o yaml | cleave rollout -f new.yaml --from - --dry-run
    """
    if not dry_run:
        why = "the operator performs the rollout itself after kubectl apply"
        fail([f"--dry-run: is required; {why}"], BAD_INPUT)
    from cleave.cli.manifests.rollout_table import print_json, show
    from cleave.controller.rollout.preview import stages, states
    from cleave.manifests.pool import revision

    after = _load(file)
    limits = _limits(after, max_surge, max_unavailable)
    running = _running(after, file, before, cluster)
    target = revision(after)
    steps = stages(states(running, _placement(after, file, cluster), target), limits)
    if output is Output.JSON:
        print_json(after.name, running.revision, target, limits, steps)
    else:
        show(after.name, running.revision, target, limits, steps)


def _running(
    after: "LLMDeployment", file: Path, before: Path | None, cluster: Path | None
) -> "Running":
    """The running instances, from the manifest `before`, else from the status in the new one."""
    from cleave.controller.rollout import preview
    from cleave.manifests.pool import revision

    current = after if before is None else _load(before)
    if current.name != after.name:
        fail([f"--from: is for {current.name}, but {file} is for {after.name}"], BAD_INPUT)
    if current.status is not None:
        return preview.observed(current.status)
    if before is None:
        how = f"give the current manifest, or run kubectl get llmd {after.name} -o yaml > now.yaml"
        fail([f"--from: is required, because {file} has no status; {how}"], BAD_INPUT)
    return preview.placed(_placement(current, before, cluster), revision(current))


def _load(file: Path) -> "LLMDeployment":
    from cleave.api.manifest import ManifestError, load

    try:
        return load(sys.stdin.read() if file == _STDIN else file)
    except ManifestError as error:
        fail(error.faults, BAD_INPUT)


def _placement(deployment: "LLMDeployment", file: Path, cluster: Path | None) -> "Placement":
    """Instances of each role: from spec.placement, else planned."""
    from cleave.api.engine import EngineType
    from cleave.planner.placement import located

    spec = deployment.spec
    is_planned = spec.placement is None and spec.workload is not None
    if is_planned and spec.engine.type is not EngineType.EMULATED and cluster is None:
        why = "--cluster: is required to plan it: a YAML file of the machines"
        fail([f"{file} has no placement; {why}, or add one with cleave plan -o yaml"], BAD_INPUT)
    return place(located(deployment, file.parent), file, cluster)


def _limits(
    deployment: "LLMDeployment", max_surge: int | None, max_unavailable: int | None
) -> "RolloutLimits":
    from cleave.controller.rollout.planner import RolloutError, RolloutLimits

    stated = deployment.spec.rollout
    try:
        return RolloutLimits(
            stated.max_surge if max_surge is None else max_surge,
            stated.max_unavailable if max_unavailable is None else max_unavailable,
        )
    except RolloutError as error:
        fail([str(error)], BAD_INPUT)
