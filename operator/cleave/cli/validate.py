"""`cleave validate`: check a manifest without running anything."""

import typer

from cleave import distribution
from cleave.cli.faults import BAD_INPUT, fail, load_deployment
from cleave.cli.question import ClusterFile, Overrides, ask
from cleave.cli.up import File


def validate(file: File, cluster: ClusterFile = None) -> None:
    """Check a manifest: fields, values, the rules between them, and that it can be planned.

    With --cluster also that its GPUs are known there and its trace can be read; emulated engines
    need none for that. What is valid and probably not meant, such as targets in seconds or a model
    that cannot be planned, is a warning. Ends with exit code 2 and one line per fault.

    Example: cleave validate -f examples/smallest.yaml
    """
    from cleave.api.manifest import ManifestError, load_cluster
    from cleave.perf import inventory
    from cleave.planner.checks import unknown_model
    from cleave.planner.placement import PlanError

    deployment = load_deployment(file)
    spec = deployment.spec
    try:
        if cluster and unknown_model(deployment) is not None:
            # Nothing can be planned, and it comes up all the same.
            inventory.kinds(load_cluster(cluster), spec.planning.gpus)
            if spec.workload and spec.workload.trace:
                distribution.require("planner")
                from cleave.planner import asking

                asking.demand(deployment, file.parent)
        elif cluster or (spec.workload and not spec.placement and spec.engine.type == "Emulated"):
            ask(file, cluster, Overrides(), seed=0)
    except (ManifestError, PlanError) as error:
        fail(error.faults, BAD_INPUT)
    typer.echo(f"{file}: LLMDeployment {deployment.metadata.name} is valid")
