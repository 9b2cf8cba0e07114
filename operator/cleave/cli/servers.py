"""`cleave operator`: the Kubernetes operator as a process, as its pods run it."""

import typer


def operator(context: typer.Context) -> None:
    """Run the operator of a Kubernetes cluster. `cleave operator --help` lists its options.

    \b
    Examples:
      # Run it outside the cluster, for development
      KUBECONFIG=~/.kube/config cleave operator --own-namespace cleave
    """
    from cleave.controller.main import main

    raise typer.Exit(main(context.args, program="cleave operator"))
