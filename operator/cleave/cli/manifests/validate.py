"""`cleave validate`: checks manifests without starting anything."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cleave import distribution
from cleave.cli.options import Files
from cleave.cli.output.errors import BAD_INPUT, STDIN, check_deployment, fail, report_input_errors
from cleave.cli.planning.inputs import (
    ClusterFile,
    Overrides,
    build_planning_input,
    check_manual_placement,
)

if TYPE_CHECKING:
    from cleave.api.deployment import LLMDeployment

_SUFFIXES = (".yaml", ".yml", ".json")
"""Files of a folder that are read, as kubectl does."""


def validate(file: Files, cluster: ClusterFile = None) -> None:
    """Check the fields and values of manifests, and that they can be planned.

    With --cluster, its GPUs and trace files are checked as well, and that the nodes have room
    for spec.placement.manual, or for one instance of the model; emulated engines need no
    cluster file to be planned. Whether targets are met only a plan says. Valid values that are
    probably mistakes, such as targets in seconds or a model that cannot be planned, are
    warnings. Objects of other APIs are skipped; of a folder, YAML and JSON files are read.

    Exit codes: 0 all are valid, 2 one is invalid, with one line per error.

    \b
    Examples:
      # Check a manifest
      cleave validate -f examples/smallest.yaml
      # Check it against the machines of a cluster
      cleave validate -f examples/planned.yaml --cluster examples/cluster.yaml
      # Check all manifests of a folder, and those of a chart
      helm template my-chart | cleave validate -f deploy/ -f -
    """
    sources = [(source, named.is_dir()) for named in file for source in _list_sources(named)]
    results = [
        _validate_source(source, cluster, f"{source}: " if len(sources) > 1 else "", may_skip)
        for source, may_skip in sources
    ]
    if not all(results):
        raise typer.Exit(BAD_INPUT)


def _list_sources(named: Path) -> Sequence[Path]:
    """The file itself, or the manifests of a folder; exits where it has none."""
    if not named.is_dir():
        return [named]
    found = sorted(each for each in named.iterdir() if each.suffix in _SUFFIXES)
    if not found:
        fail([f"{named}: has no file {', '.join(f'*{each}' for each in _SUFFIXES)}"], BAD_INPUT)
    return found


def _validate_source(source: Path, cluster: Path | None, prefix: str, may_skip: bool) -> bool:
    """Whether all deployments of a source are valid; prints what is found after `prefix`.
    `may_skip`: it may hold none."""
    from cleave.api.manifest import load_all

    text: str | Path = sys.stdin.read() if source == STDIN else source
    try:
        with report_input_errors(prefix):
            # Where there is none, the error is why the objects are no LLMDeployments.
            found = load_all(text, skip_others=True) or ([] if may_skip else load_all(text))
            for manifest in found:
                label = prefix if len(found) == 1 else f"{prefix}{manifest.name}: "
                with report_input_errors(label):
                    _validate(manifest, source.parent, cluster, label)
                typer.echo(f"{source}: LLMDeployment {manifest.name} is valid")
    except typer.Exit:
        return False
    if not found:
        typer.echo(f"note: {source}: holds no LLMDeployment", err=True)
    return True


def _validate(manifest: "LLMDeployment", folder: Path, cluster: Path | None, label: str) -> None:
    """Raises ManifestError and PlanError."""
    from cleave.api.manifest import load_cluster
    from cleave.perf.hardware import inventory
    from cleave.planner.resolved_deployment import resolve

    deployment = check_deployment(manifest, folder, label)
    spec = deployment.spec
    if cluster and (spec.placement or resolve(deployment).unknown_model):
        # Nothing is planned, but the deployment can be started.
        machines = load_cluster(cluster)
        inventory.list_gpus(machines, spec.planning.gpus)
        check_manual_placement(deployment, machines, folder)
        if spec.workload and spec.workload.trace:
            distribution.require("planner")
            from cleave.planner import problem_from_cluster

            problem_from_cluster.build_demand(deployment, folder)
    elif cluster or (spec.workload and not spec.placement and spec.engine.type == "Emulated"):
        problem = build_planning_input(deployment, folder, cluster, Overrides(), seed=0).problem
        from cleave.planner import plan_search

        plan_search.list_feasible(problem)
