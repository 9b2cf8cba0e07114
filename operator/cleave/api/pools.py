"""How the prefill and decode pools exchange instances: part of the LLMDeployment."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from cleave.api.base import ApiModel


class FlippingMode(StrEnum):
    """Whether instances change roles when traffic changes."""

    OFF = "Off"
    ADVISORY = "Advisory"
    AUTO = "Auto"


class PoolsSpec(ApiModel):
    """How the prefill and decode pools exchange instances; mixed pools stay as they are."""

    flipping: Annotated[FlippingMode, Field(strict=False)] = FlippingMode.AUTO
    """Auto: when queued prompts are about to miss slo.ttftMs, or decode instances are full, an
    instance of the other pool serves both roles; it returns to its own role when the load has
    fallen. No instance restarts and no request is moved. Advisory: the gateway logs and counts the
    changes that Auto would make. Off: no instance changes its role, and those that have return
    within minutes."""
    min_prefill: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Minimum number of prefill instances that always keep their role."""
    min_decode: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Minimum number of decode instances that always keep their role."""
