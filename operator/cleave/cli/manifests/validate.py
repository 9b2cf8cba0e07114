"""`cleave validate`: checks a manifest without starting anything."""

import typer

from cleave import distribution
from cleave.cli.options import File
from cleave.cli.output.errors import load_deployment, report_input_errors
from cleave.cli.planning.inputs import (
    ClusterFile,
    Overrides,
    build_planning_input,
    check_manual_placement,
)


def validate(file: File, cluster: ClusterFile = None) -> None:
    """Check the fields and values of a manifest, and that it can be planned.

    With --cluster, its GPUs and its trace file are checked as well, and that the nodes have room
    for spec.placement.manual; emulated engines need no cluster file to be planned. Valid values
    that are probably mistakes, such as targets in seconds or a model that cannot be planned, are
    warnings.

    Exit codes: 0 valid, 2 invalid, with one line per error.

    \b
    Examples:
      # Check a manifest
      cleave validate -f examples/smallest.yaml
      # Check it against the machines of a cluster
      cleave validate -f examples/planned.yaml --cluster examples/cluster.yaml
    """
    from cleave.api.manifest import load_cluster
    from cleave.perf.hardware import inventory
    from cleave.planner.deployment_checks import explain_unknown_model

    deployment = load_deployment(file)
    spec = deployment.spec
    with report_input_errors():
        if cluster and (spec.placement or explain_unknown_model(deployment) is not None):
            # Nothing is planned, but the deployment can be started.
            machines = load_cluster(cluster)
            inventory.list_gpus(machines, spec.planning.gpus)
            check_manual_placement(deployment, machines, file.parent)
            if spec.workload and spec.workload.trace:
                distribution.require("planner")
                from cleave.planner import problem_from_cluster

                problem_from_cluster.build_demand(deployment, file.parent)
        elif cluster or (spec.workload and not spec.placement and spec.engine.type == "Emulated"):
            build_planning_input(deployment, file.parent, cluster, Overrides(), seed=0)
    typer.echo(f"{file}: LLMDeployment {deployment.metadata.name} is valid")
