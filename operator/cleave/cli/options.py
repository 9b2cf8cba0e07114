"""Arguments and options that several commands share, with the completion of their values."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option


class TableFormat(StrEnum):
    """Output format."""

    TABLE = "table"
    JSON = "json"


class DocumentFormat(StrEnum):
    """Output format."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def complete_running(incomplete: str) -> list[str]:
    """Names of running deployments that begin with `incomplete`."""
    from cleave.local import state

    return [each.name for each in state.list_running() if each.name.startswith(incomplete)]


def complete_logged(incomplete: str) -> list[str]:
    """Names of deployments with logs that begin with `incomplete`."""
    from cleave.local import state

    names = sorted(folder.parent.name for folder in state.get_root().glob("*/logs"))
    return [name for name in names if name.startswith(incomplete)]


MANIFEST = "file"
"""The parameter of type File or Files of all commands that read manifests."""
RunningName = Annotated[
    str | None,
    Argument(
        help="Name of the deployment. May be omitted when only one is running.",
        autocompletion=complete_running,
    ),
]
RunningNames = Annotated[
    list[str] | None,
    Argument(
        help="Names of the deployments. May be omitted when only one is running.",
        show_default=False,
        autocompletion=complete_running,
    ),
]
File = Annotated[
    Path,
    Option(
        "--file",
        "-f",
        help="Manifest of an LLMDeployment; - reads standard input.",
        show_default=False,
    ),
]
Files = Annotated[
    list[Path],
    Option(
        "--file",
        "-f",
        help="Manifests of LLMDeployments: a file, a folder or - for standard input. May be "
        "repeated.",
        show_default=False,
    ),
]
TableOutput = Annotated[TableFormat, Option("--output", "-o", help="Output format.")]
DocumentOutput = Annotated[DocumentFormat, Option("--output", "-o", help="Output format.")]
