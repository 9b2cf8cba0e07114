"""Faults as people read them: one line each on standard error, and an exit code.

Used by every command. 1: it did not work; 2: what was given is wrong.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from cleave.local.errors import ChatError, StateError, UpError

if TYPE_CHECKING:
    from cleave.api.deployment import LLMDeployment

FAILED = 1
BAD_INPUT = 2


def fail(faults: Sequence[str], code: int, log: Sequence[str] = ()) -> NoReturn:
    """Print `faults` (after the `log` lines that explain them) and end with `code`."""
    for line in log:
        sys.stderr.write(f"  | {line}\n")
    for fault in faults:
        sys.stderr.write(f"error: {fault}\n")
    raise typer.Exit(code)


@contextmanager
def told() -> Iterator[None]:
    """Report the errors of the local package raised inside."""
    try:
        yield
    except UpError as error:
        fail(error.faults, FAILED, error.log)
    except (ChatError, StateError) as error:
        fail([str(error)], FAILED)


def load_deployment(file: Path) -> "LLMDeployment":
    """The LLMDeployment in `file`, with the instances that it states; doubts go to standard error.

    Ends with exit code 2 and one line per fault in it.
    """
    from cleave.api.manifest import ManifestError, load
    from cleave.planner.checks import doubts
    from cleave.planner.placement import PlanError, located, plan

    try:
        deployment = located(load(file), file.parent)
        plan(deployment)
    except (ManifestError, PlanError) as error:
        fail(error.faults, BAD_INPUT)
    for doubt in doubts(deployment):
        sys.stderr.write(f"warning: {doubt}\n")
    return deployment
