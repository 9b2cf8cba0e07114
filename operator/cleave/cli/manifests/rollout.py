"""`cleave rollout`: previews the steps of a rollout before a change is applied."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from cleave.cli.local.up import decide_placement
from cleave.cli.options import File, TableFormat, TableOutput
from cleave.cli.output.errors import BAD_INPUT, fail, load_manifest, report_input_errors
from cleave.cli.planning.inputs import ClusterFile

if TYPE_CHECKING:
    from cleave.api.deployment import LLMDeployment
    from cleave.api.pool import InstancePool
    from cleave.controller.rollout.planner import RolloutLimits
    from cleave.controller.rollout.preview import PreviewStage, RunningInstances
    from cleave.manifests.topology import NodeTopology
    from cleave.planner.placement import Placement

MaxSurge = Annotated[int | None, Option(min=0, help="Overrides spec.rollout.maxSurge.")]
MaxUnavailable = Annotated[int | None, Option(min=0, help="Overrides spec.rollout.maxUnavailable.")]


def rollout(
    file: File,
    before: Annotated[
        Path | None,
        Option(
            "--from",
            help="Current manifest (its status, else its placement); - reads standard input. "
            "Default: the status in FILE.",
            show_default=False,
        ),
    ] = None,
    output: TableOutput = TableFormat.TABLE,
    cluster: ClusterFile = None,
    max_surge: MaxSurge = None,
    max_unavailable: MaxUnavailable = None,
) -> None:
    """Preview the steps in which the operator rolls out a change to a cluster; changes nothing.

    The operator starts a step when the instances of the previous one are ready. 1+2 means one new
    and two old instances. CAPACITY is the share of the planned capacity that serves during the
    step: instances of different revisions never work together, so only complete pairs count.

    Exit codes: 0 steps were printed, 1 there is no plan to roll out, 2 the input is invalid.

    \b
    Examples:
      # Compare two manifests
      cleave rollout -f new.yaml --from old.yaml
      # Compare with what runs in the cluster
      kubectl get llmd chat -o yaml | cleave rollout -f new.yaml --from -
    """
    from cleave.cli.manifests import rollout_table
    from cleave.controller.rollout.preview import build_stages, build_states

    after = load_manifest(file)
    limits = _build_limits(after, max_surge, max_unavailable)
    running = _get_current(after, file, before, cluster)
    planned = _build_pools(after, file, cluster)
    target = planned[0].spec.revision
    steps = build_stages(build_states(running, planned, target), limits)
    show = rollout_table.show_json if output is TableFormat.JSON else rollout_table.show
    with report_input_errors():
        missing = _explain_missing_room(after, planned, steps, cluster)
    show(after.name, running.revision, target, limits, steps)
    if after.spec.paused:
        sys.stderr.write("warning: spec.paused: no step starts until it is removed\n")
    if missing is not None:
        sys.stderr.write(f"warning: {missing}\n")


def _explain_missing_room(
    after: "LLMDeployment",
    pools: "Sequence[InstancePool]",
    steps: "Sequence[PreviewStage]",
    cluster: Path | None,
) -> str | None:
    """Why the machines have too few GPUs for a step; None: they have enough, or it is not known.
    Raises ManifestError for an unknown GPU."""
    from cleave.api.engine import EngineType

    if cluster is None or after.spec.engine.type is EngineType.EMULATED:
        return None
    from cleave.api.manifest import load_cluster
    from cleave.manifests import cluster_fit

    machines = load_cluster(cluster)
    for step in steps[1:]:
        counts = {role: each.new + each.old for role, each in step.roles.items()}
        if why := cluster_fit.explain_no_surge(pools, counts, machines):
            return why
    return None


def _get_current(
    after: "LLMDeployment", file: Path, before: Path | None, cluster: Path | None
) -> "RunningInstances":
    """The running instances, from the manifest `before`, else from the status in the new one."""
    from cleave.controller.rollout import preview

    current = after if before is None else load_manifest(before)
    if current.name != after.name:
        fail([f"--from: is for {current.name}, but {file} is for {after.name}"], BAD_INPUT)
    if current.status is not None:
        return preview.from_status(current.status)
    if before is None:
        how = f"give the current manifest, or run kubectl get llmd {after.name} -o yaml > now.yaml"
        fail([f"--from: is required, because {file} has no status; {how}"], BAD_INPUT)
    pools = _build_pools(current, before, cluster)
    return preview.from_pools(pools, pools[0].spec.revision)


def _build_pools(
    deployment: "LLMDeployment", file: Path, cluster: Path | None
) -> "list[InstancePool]":
    """The pools as the operator applies them: cells that fit a node of `cluster` are pods of the
    mixed pool."""
    from cleave.manifests.pool import build_pools
    from cleave.planner.resolved_deployment import resolve_in_cluster

    placement = decide_cluster_placement(deployment, file, cluster)
    return build_pools(resolve_in_cluster(deployment), placement, build_topology(cluster))


def build_topology(cluster: Path | None) -> "NodeTopology":
    """What pools depend on of the machines in a cluster file; None: not known."""
    from cleave.api.manifest import load_cluster
    from cleave.manifests.topology import NodeTopology

    return NodeTopology.from_cluster(load_cluster(cluster)) if cluster else NodeTopology()


def decide_cluster_placement(
    deployment: "LLMDeployment", file: Path, cluster: Path | None
) -> "Placement":
    """Instances of each role: from spec.placement, else planned; exits where they cannot be."""
    from cleave.api.engine import EngineType
    from cleave.planner.placement import resolve_paths

    spec = deployment.spec
    is_planned = spec.placement is None and spec.workload is not None
    if is_planned and spec.engine.type is not EngineType.EMULATED and cluster is None:
        why = "--cluster: is required to plan it: a YAML file of the machines"
        fail([f"{file} has no placement; {why}, or add one with cleave plan -o yaml"], BAD_INPUT)
    return decide_placement(resolve_paths(deployment, file.parent), file, cluster)


def _build_limits(
    deployment: "LLMDeployment", max_surge: int | None, max_unavailable: int | None
) -> "RolloutLimits":
    from cleave.controller.rollout.planner import RolloutError, RolloutLimits

    limits = deployment.spec.rollout
    surge = limits.max_surge if max_surge is None else max_surge
    try:
        return RolloutLimits(
            surge, limits.max_unavailable if max_unavailable is None else max_unavailable
        )
    except RolloutError as error:
        fail([str(error)], BAD_INPUT)
