"""`cleave operator`: the operator, as its pods run it."""

import typer


def operator(context: typer.Context) -> None:
    """Run the operator of a cluster; `cleave operator --help` lists its options.

    Example: KUBECONFIG=~/.kube/config cleave operator --own-namespace cleave
    """
    from importlib.util import find_spec

    from cleave.cli.faults import FAILED, fail

    if find_spec("kopf") is None or find_spec("kubernetes") is None:
        fail(["the operator needs the extra operator: pip install 'cleave[operator]'"], FAILED)
    from cleave.controller.main import main

    raise typer.Exit(main(context.args, program="cleave operator"))
