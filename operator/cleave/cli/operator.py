"""`cleave operator`: the operator, as its pods run it."""

import typer


def operator(context: typer.Context) -> None:
    """Run the operator of a cluster; `cleave operator --help` lists its options.

    Example: KUBECONFIG=~/.kube/config cleave operator --own-namespace cleave
    """
    from cleave.controller.main import main

    raise typer.Exit(main(context.args, program="cleave operator"))
