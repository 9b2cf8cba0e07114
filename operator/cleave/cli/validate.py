"""`cleave validate`: check a manifest without running anything."""

import typer

from cleave.cli.faults import load_deployment
from cleave.cli.up import File


def validate(file: File) -> None:
    """Check a manifest: fields, values, the rules between them, and that it can be planned.

    Ends with exit code 2 and one line per fault. Example: cleave validate -f examples/smallest.yaml
    """
    deployment = load_deployment(file)
    typer.echo(f"{file}: LLMDeployment {deployment.metadata.name} is valid")
