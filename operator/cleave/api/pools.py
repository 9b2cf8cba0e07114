"""How pools lend each other instances: part of the LLMDeployment."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from cleave.api.shape import Shape


class Flipping(StrEnum):
    """Whether instances change roles as traffic does."""

    OFF = "Off"
    ADVISORY = "Advisory"
    AUTO = "Auto"


class Pools(Shape):
    """Prefill and decode pools, while traffic moves. Mixed pools are left as they are."""

    flipping: Annotated[Flipping, Field(strict=False)] = Flipping.AUTO
    """Auto: while prompts wait until little is left of slo.ttftMs, or decode instances are full, an
    instance of the other pool serves both; it goes home when it is calm. No instance restarts
    and no request is moved. Advisory: the gateway logs and counts what Auto would do. Off: nobody
    is lent, and who is comes home within minutes."""
    min_prefill: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Prefill instances that never do anything else."""
    min_decode: Annotated[int, Field(ge=0, le=10_000)] = 1
    """Decode instances that never do anything else."""
