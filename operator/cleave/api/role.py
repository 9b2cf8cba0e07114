"""Roles and parallelism: the words that placement, pools and pods share."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from cleave.api.shape import Shape


class Role(StrEnum):
    """What an instance serves."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Parallelism(Shape):
    """How one instance is spread over GPUs."""

    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    """Tensor parallel size."""
    pipeline: Annotated[int, Field(ge=1, le=64)] = 1
    """Pipeline parallel size."""

    @property
    def gpus(self) -> int:
        """GPUs (on CPU nodes: cores) of one instance."""
        return self.tensor * self.pipeline
