"""Roles and parallelism, which placement, pools and pods share."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from cleave.api.base import ApiModel, ValidationRule

MAX_PARALLEL_SIZE = 64
"""Largest tensor or pipeline parallel size."""
MAX_POD_ENGINES = 16
"""Most engines in one pod; each has two ports."""
MAX_RANKS = 64
"""Most data-parallel ranks of one instance."""


class Role(StrEnum):
    """The role of an instance: which phases of a request it serves."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Parallelism(ApiModel):
    """How one instance is distributed over GPUs."""

    tensor: Annotated[int, Field(ge=1, le=MAX_PARALLEL_SIZE)] = 1
    """Tensor parallel size."""
    pipeline: Annotated[int, Field(ge=1, le=MAX_PARALLEL_SIZE)] = 1
    """Pipeline parallel size."""
    # Without defaults in the CRD, and written only where they are set: after a roll-back an
    # operator of an earlier version would refuse them.
    data: Annotated[
        int,
        Field(
            ge=1,
            le=MAX_RANKS,
            exclude_if=lambda size: size == 1,
            json_schema_extra={"default": None},
        ),
    ] = 1
    """Data parallel size, for models with experts: an instance consists of so many engines, its
    ranks. Each has the attention layers, a KV cache and requests of its own; they compute in step,
    and start, drain and end together. An instance takes tensor * pipeline * data GPUs, of one node
    or, where none has so many, of several with equally many ranks each."""
    expert: Annotated[
        bool,
        Field(exclude_if=lambda is_set: not is_set, json_schema_extra={"default": None}),
    ] = False
    """Expert parallelism: the experts of each layer are distributed over the tensor * data GPUs of
    an instance as wholes, instead of a part of each expert on every GPU."""

    rules = (
        ValidationRule(
            cel="!has(self.expert) || !self.expert || "
            "self.tensor * (has(self.data) ? self.data : 1) > 1",
            is_valid=lambda p: not p.expert or p.tensor * p.data > 1,
            message="needs a tensor or data size above 1: a single GPU has all experts",
            field="expert",
        ),
    )

    @property
    def gpus(self) -> int:
        """GPUs of one instance (on CPU nodes: cores)."""
        return self.gpus_per_engine * self.data

    @property
    def gpus_per_engine(self) -> int:
        """GPUs of one engine: of the instance, or of one of its data-parallel ranks."""
        return self.tensor * self.pipeline

    @property
    def num_parts(self) -> int:
        """Parts of an instance that may be on different nodes: its data-parallel ranks, or the GPUs
        of its only engine."""
        return self.data if self.data > 1 else self.gpus_per_engine
