"""The `cleave` command: what a person types.

Each command is a module of this package. What is hard: `cleave --help` and shell completion must
answer at once, so whatever is heavy is imported inside the command that needs it.
"""

import logging
import sys
from typing import Annotated, NoReturn

import typer
from typer.core import TyperGroup

from cleave import distribution
from cleave.cli.demo import demo
from cleave.cli.down import down
from cleave.cli.faults import FAILED, fail
from cleave.cli.gateway import FORWARDED, gateway
from cleave.cli.lengths import lengths
from cleave.cli.logs import logs
from cleave.cli.operator import operator
from cleave.cli.plan import plan
from cleave.cli.profile import profile
from cleave.cli.provision import provision
from cleave.cli.rollout import rollout
from cleave.cli.simulate import simulate
from cleave.cli.status import status
from cleave.cli.top import top
from cleave.cli.up import up
from cleave.cli.validate import validate
from cleave.cli.workload import workload

_EXTRAS = {
    "demo": ("gateway", "worker"),
    "up": ("gateway", "worker"),
    "gateway": ("gateway",),
    "operator": ("operator",),
    "lengths": ("lengths",),
}
"""What a command runs with; those that are not here need at most the planner."""


class Commands(TyperGroup):
    """Runs a command; one that an extra is missing for ends with how to install it."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        """As in the base class."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            having = distribution.extras_with(error.name or "")
            own = _EXTRAS.get(str(ctx.invoked_subcommand), ("planner",))
            # All that the command lacks is named at once, not one extra at each try.
            missing = distribution.missing(own if {*own} & {*having} else having[:1])
            if not missing:
                raise
            _fail(ctx, distribution.MissingExtraError(missing))
        except distribution.MissingExtraError as error:
            _fail(ctx, error)


def _fail(context: typer.Context, error: distribution.MissingExtraError) -> NoReturn:
    fail([f"'cleave {context.invoked_subcommand}' {error}"], FAILED)


app = typer.Typer(
    name="cleave",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    demo,
    plan,
    simulate,
    up,
    status,
    top,
    logs,
    down,
    validate,
    profile,
    workload,
    provision,
    rollout,
):
    app.command()(command)
for forwarded in (gateway, operator):
    app.command(context_settings=FORWARDED)(forwarded)
app.add_typer(lengths, name="lengths")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cleave {distribution.version()}")
        raise typer.Exit


@app.callback()
def cleave(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log what happens; tracebacks of our own bugs.")
    ] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Serve large language models from prefill, decode and mixed pools.

    First steps: `cleave demo`, then `cleave up -f FILE`, `cleave status`, `cleave down`.
    """
    if verbose:
        logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(name)s: %(message)s")


def main() -> None:
    """Run the command line; a bug of ours is one line unless -v asks for more."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if logging.getLogger().isEnabledFor(logging.DEBUG):
            raise
        sys.exit(f"internal error: {type(error).__name__}: {error} (cleave -v shows where)")


if __name__ == "__main__":
    main()
