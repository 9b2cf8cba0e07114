"""The model that is served, as a resource names it. Used by both resources."""

import re
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError

from cleave.api.shape import Shape

_HF = "hf://"
_SOURCE = r"^((hf://)?[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?|/[^:\n]+)$"
_WORD = r"^[A-Za-z0-9][A-Za-z0-9_./:@-]*$"


def _checked_source(source: str) -> str:
    if not re.fullmatch(_SOURCE, source):
        raise PydanticCustomError(
            "model_source",
            "must be a Hugging Face id (org/name or hf://org/name) or an absolute folder",
        )
    return source


class Dtype(StrEnum):
    """Number format of weights and KV cache; `auto` takes the checkpoint's own."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Model(Shape):
    """Which weights are served, and under which name."""

    source: Annotated[
        str,
        AfterValidator(_checked_source),
        Field(max_length=1024, json_schema_extra={"pattern": _SOURCE}),
    ]
    """Hugging Face id (`org/name` or `hf://org/name`) or an absolute folder on every node."""
    revision: Annotated[str, Field(max_length=256, pattern=_WORD)] | None = None
    """Branch, tag or commit of a Hugging Face repository. The emulated engine reads no weights."""
    dtype: Annotated[Dtype, Field(strict=False)] | None = None
    """Number format; absent: the engine decides."""
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    """Longest prompt plus output, in tokens; absent: the model's own limit."""
    served_name: Annotated[str, Field(max_length=256, pattern=_WORD)] | None = None
    """Name that clients ask for; absent: the id, or the folder's last part."""

    @property
    def locator(self) -> str:
        """What the engine loads: a repository id without scheme, or a folder."""
        return self.source.removeprefix(_HF)

    @property
    def folder(self) -> str | None:
        """The absolute folder; None for a Hugging Face id."""
        return self.source if self.source.startswith("/") else None

    @property
    def name(self) -> str:
        """The name that clients ask for."""
        if self.served_name:
            return self.served_name
        return PurePosixPath(self.source).name if self.folder else self.locator


class _StringOrObject:
    """Schema of a field that is text or an object.

    A structural schema has no such union: a node without a type must keep unknown fields. The
    known ones are still checked by the API server, and listed by `kubectl explain`.
    """

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = {**handler.resolve_ref_schema(handler(core_schema))}
        del schema["type"], schema["additionalProperties"]
        # The pattern is for text and the properties are for objects; each ignores the other.
        return {**schema, "pattern": _SOURCE, "x-kubernetes-preserve-unknown-fields": True}


def _spelled_out(value: object) -> object:
    return {"source": value} if isinstance(value, str) else value


ModelField = Annotated[Model, BeforeValidator(_spelled_out), _StringOrObject()]
"""A model; text is short for {source: ...}."""
