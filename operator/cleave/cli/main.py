"""The `cleave` command line.

Each command is a module of this package. `cleave --help` and shell completion must respond at
once, so every slow import happens inside the command that needs it.
"""

import inspect
import logging
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup

from cleave import distribution
from cleave.cli.batch import batch
from cleave.cli.components import PASSTHROUGH_SETTINGS, gateway, operator
from cleave.cli.local.demo import demo
from cleave.cli.local.down import down
from cleave.cli.local.logs import logs
from cleave.cli.local.status import status
from cleave.cli.local.up import up
from cleave.cli.manifests.render import render
from cleave.cli.manifests.rollout import rollout
from cleave.cli.manifests.validate import validate
from cleave.cli.options import MANIFEST, File, Files
from cleave.cli.output.errors import BAD_INPUT, FAILED, fail
from cleave.cli.planning.plan import plan
from cleave.cli.planning.provision import provision
from cleave.cli.planning.simulate import simulate
from cleave.cli.profiling.profile import profile
from cleave.cli.profiling.workload import workload
from cleave.cli.top.command import top

_EXTRAS = {
    "demo": ("gateway", "worker"),
    "up": ("gateway", "worker"),
    "gateway": ("gateway",),
    "operator": ("operator",),
}
"""Extras that a command needs; a command that is not listed needs at most the planner."""


class CommandGroup(TyperGroup):
    """Runs a command; if an extra is missing, ends with the command that installs it."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        """Invoke as the base class does, and report missing extras on one line."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            # The form of pydantic, with which typer checks values.
            error.message = error.message.replace("Value error, ", "", 1)
            raise
        except ModuleNotFoundError as error:
            providers = distribution.find_extras_with(error.name or "")
            own = _EXTRAS.get(str(ctx.invoked_subcommand), ("planner",))
            # Name all missing extras at once, so that users need only one installation.
            needed = own if {*own} & {*providers} else providers[:1]
            missing = distribution.find_missing_extras(needed)
            if not missing:
                raise
            self._fail(ctx, distribution.MissingExtraError(missing))
        except distribution.MissingExtraError as error:
            self._fail(ctx, error)

    def _fail(self, context: typer.Context, error: distribution.MissingExtraError) -> NoReturn:
        fail([f"'{context.command_path} {context.invoked_subcommand}' {error}"], FAILED)


class ManifestCommand(TyperCommand):
    """A command that reads manifests; says how where one is named without -f."""

    takes_several = False

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse as the base class does, which would report only that -f is missing."""
        if not ctx.resilient_parsing:
            _, others, options = self.make_parser(ctx).parse_args(list(args))
            num_named = sum(option.name == MANIFEST for option in options)
            if others and not num_named:
                how = f"name the manifest with -f: {ctx.command_path} -f {others[0]}"
                fail([f"{others[0]}: {how}"], BAD_INPUT)
            if num_named > 1 and not self.takes_several:
                fail(["-f: given more than once; name one file, with one LLMDeployment"], BAD_INPUT)
        return super().parse_args(ctx, args)


class ManifestsCommand(ManifestCommand):
    """A command that reads any number of manifests."""

    takes_several = True


app = typer.Typer(
    name="cleave",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_GROUPS: dict[str, tuple[Callable[..., None], ...]] = {
    "Run on this machine": (demo, up, status, top, logs, down),
    "Plan capacity": (plan, simulate, provision, workload, profile),
    "Check manifests": (validate, render, rollout),
    "Send requests": (batch,),
}
"""Commands by the heading under which `cleave --help` lists them."""
for heading, commands in _GROUPS.items():
    for command in commands:
        file = inspect.signature(command).parameters.get(MANIFEST)
        # By identity: `profile --output-file` is a file, too.
        classes = {id(File): ManifestCommand, id(Files): ManifestsCommand}
        kind = classes.get(id(file.annotation)) if file else None
        app.command(cls=kind, rich_help_panel=heading)(command)
for forwarded in (gateway, operator):
    app.command(context_settings=PASSTHROUGH_SETTINGS, rich_help_panel="Run components")(forwarded)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"cleave {distribution.get_version()}")
        raise typer.Exit


@app.callback()
def cleave(
    verbose: Annotated[
        bool,
        Option(
            "--verbose", "-v", help="Log at debug level, and show tracebacks of internal errors."
        ),
    ] = False,
    _version: Annotated[
        bool,
        Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Serve large language models from prefill, decode and mixed pools.

    \b
    Examples:
      # Start one prefill and one decode instance here, and chat with them
      cleave demo
      # Start a deployment on this machine, inspect it and stop it
      cleave up -f examples/emulated.yaml -d
      cleave status
      cleave down
      # Find the best placement for a workload on the machines of a cluster
      cleave plan -f examples/planned.yaml --cluster examples/cluster.yaml
    """
    if verbose:
        logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(name)s: %(message)s")


def main() -> None:
    """Run the command line; an internal error prints one line, and with -v its traceback."""
    try:
        app(prog_name="cleave")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if logging.getLogger().isEnabledFor(logging.DEBUG):
            raise
        sys.exit(f"internal error: {type(error).__name__}: {error} (traceback: cleave -v)")


if __name__ == "__main__":
    main()
