"""What the instances of a deployment have loaded. Part of the status of an LLMDeployment.

Written by `cleave.controller.deployment.weights`, which also reads it: a restarted operator
continues from here.
"""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from cleave.api.base import ApiModel

WEIGHTS = r"^[0-9a-f]{1,16}$"
MAX_CHANGES = 8
"""Changes in an hour that instances follow."""


class LoadedWeights(ApiModel):
    """The weights that were read last. Instances that have loaded others are replaced."""

    revision: Annotated[str, Field(max_length=63)]
    """Revision of the spec of these instances."""
    newest: Annotated[str, Field(pattern=WEIGHTS)]
    """Digest of what was read last: of the content of files, or of the commit of a repository."""
    read_at: Annotated[datetime, Field(strict=False)]
    """When an instance read it, by the clock of its node."""
    changed_at: list[Annotated[datetime, Field(strict=False)]] = Field(
        default_factory=list, max_length=MAX_CHANGES
    )
    """When others than before were found while the spec stayed the same, up to an hour before the
    last time."""
