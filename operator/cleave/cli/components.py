"""`cleave gateway` and `cleave operator`: components as processes, as their pods run them."""

import typer

PASSTHROUGH_SETTINGS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
"""Typer settings of a command that passes all arguments on to a program with its own parser."""


def gateway(context: typer.Context) -> None:
    """Run a gateway in front of existing workers. `cleave gateway --help` lists its options.

    \b
    Examples:
      # Serve on port 8080, with two worker agents behind
      cleave gateway --agents 10.0.0.1:9000,10.0.0.2:9000 --port 8080
    """
    from cleave.gateway.main import main

    raise typer.Exit(main(context.args, program="cleave gateway"))


def operator(context: typer.Context) -> None:
    """Run the operator of a Kubernetes cluster. `cleave operator --help` lists its options.

    \b
    Examples:
      # Run it outside the cluster, for development
      KUBECONFIG=~/.kube/config cleave operator --own-namespace cleave
    """
    from cleave.controller.main import main

    raise typer.Exit(main(context.args, program="cleave operator"))
