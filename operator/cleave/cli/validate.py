"""`cleave validate`: check a manifest without running anything."""

import typer

from cleave.cli.faults import load_deployment
from cleave.cli.question import ClusterFile, Overrides, ask
from cleave.cli.up import File


def validate(file: File, cluster: ClusterFile = None) -> None:
    """Check a manifest: fields, values, the rules between them, and that it can be planned.

    With --cluster also that its model and GPUs are known there and its trace can be read; emulated
    engines need none for that. Ends with exit code 2 and one line per fault.

    Example: cleave validate -f examples/smallest.yaml
    """
    deployment = load_deployment(file)
    spec = deployment.spec
    if cluster or (spec.workload and not spec.placement and spec.engine.type == "Emulated"):
        ask(file, cluster, Overrides(), seed=0)
    typer.echo(f"{file}: LLMDeployment {deployment.metadata.name} is valid")
