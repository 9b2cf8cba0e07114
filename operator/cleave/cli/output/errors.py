"""Errors of all commands for users: one line each on standard error, and an exit code.

Exit code 1: the command failed; 2: its input is wrong.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from cleave.local.errors import ChatError, DeploymentStartError, StateError

if TYPE_CHECKING:
    from cleave.api.deployment import LLMDeployment

FAILED = 1
BAD_INPUT = 2
STDIN = Path("-")


def fail(faults: Sequence[str], code: int, log: Sequence[str] = ()) -> NoReturn:
    """Print the lines of `log`, then one line per fault, and exit with `code`."""
    for line in log:
        sys.stderr.write(f"  | {line}\n")
    for fault in faults:
        sys.stderr.write(f"error: {fault}\n")
    raise typer.Exit(code)


@contextmanager
def report_local_errors() -> Iterator[None]:
    """Print errors of `cleave.local` that are raised inside, and exit with code 1."""
    try:
        yield
    except DeploymentStartError as error:
        fail(error.faults, FAILED, error.log_tail)
    except (ChatError, StateError) as error:
        fail([str(error)], FAILED)


@contextmanager
def report_input_errors(prefix: str = "") -> Iterator[None]:
    """Print the faults of manifests and plans that are raised inside, and exit with code 2.
    `prefix`: which of several files or deployments they are of."""
    from cleave.api.manifest import ManifestError
    from cleave.planner.placement import PlanError

    try:
        yield
    except (ManifestError, PlanError) as error:
        fail([prefix + fault for fault in error.faults], BAD_INPUT)


def load_manifest(file: Path) -> "LLMDeployment":
    """Read the LLMDeployment in `file`; `-` is standard input. Exits when it is invalid."""
    from cleave.api.manifest import load

    with report_input_errors():
        return load(sys.stdin.read() if file == STDIN else file)


def load_deployment(file: Path) -> "LLMDeployment":
    """Read the LLMDeployment in `file`, print warnings about it; exits when it is invalid."""
    with report_input_errors():
        return check_deployment(load_manifest(file), file.parent)


def check_deployment(manifest: "LLMDeployment", folder: Path, prefix: str = "") -> "LLMDeployment":
    """The deployment with its paths from `folder`; prints warnings about it after `prefix`.
    Raises PlanError where its placement cannot be."""
    from cleave.planner.placement import choose_placement, resolve_paths
    from cleave.planner.resolved_deployment import resolve

    deployment = resolve_paths(manifest, folder)
    resolved = resolve(deployment)
    choose_placement(resolved)
    for warning in resolved.warnings:
        sys.stderr.write(f"warning: {prefix}{warning}\n")
    return deployment
