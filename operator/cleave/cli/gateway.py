"""`cleave gateway`: the OpenAI-compatible gateway by itself, as its pods run it."""

import typer

FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command whose program reads its own options, so that they are stated once."""


def gateway(context: typer.Context) -> None:
    """Run a gateway alone; `cleave gateway --help` lists its options.

    Example: cleave gateway --agents 10.0.0.1:9000,10.0.0.2:9000 --port 8080
    """
    from cleave.gateway.main import main

    raise typer.Exit(main(context.args, program="cleave gateway"))
