"""Roles and parallelism, which placement, pools and pods share."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from cleave.api.base import ApiModel


class Role(StrEnum):
    """The role of an instance: which phases of a request it serves."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Parallelism(ApiModel):
    """How one instance is distributed over GPUs."""

    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    """Tensor parallel size."""
    pipeline: Annotated[int, Field(ge=1, le=64)] = 1
    """Pipeline parallel size."""

    @property
    def gpus(self) -> int:
        """GPUs of one instance (on CPU nodes: cores)."""
        return self.tensor * self.pipeline
