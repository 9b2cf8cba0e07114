"""LoRA adapters that engines load while they run. Part of both resources."""

from typing import Annotated

from pydantic import Field

from cleave.api.base import ApiModel, declare_list_map_key

MAX_ADAPTERS = 128
NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
SOURCE = r"^(/[^:\n]+|[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*)$"


class LoraAdapter(ApiModel):
    """A LoRA adapter of the model."""

    name: Annotated[str, Field(max_length=128, pattern=NAME)]
    """Name of the model in requests for it."""
    source: Annotated[str, Field(max_length=1024, pattern=SOURCE)]
    """Absolute path of its folder inside the workers, for example in one of template.volumes, or
    its Hugging Face id (org/name). What has changed in a folder is not noticed: use another one."""


AdapterList = Annotated[
    list[LoraAdapter],
    declare_list_map_key("name", max_length=MAX_ADAPTERS),
]
"""One entry per name."""
