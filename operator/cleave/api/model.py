"""The model to serve. Part of both resources."""

import json
import re
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from cleave.api.base import ApiModel
from cleave.api.pods.names import CONFIG_KEY, DNS_NAME

_HF = "hf://"
_SOURCE = r"^((hf://)?[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)?|/[^:\n]+)$"
_CACHES = ("host_path", "persistent_volume_claim", "image")
_WORD = r"^[A-Za-z0-9][A-Za-z0-9_./:@-]*$"
ModelName = Annotated[str, Field(max_length=256, pattern=_WORD)]
"""The name of a model in requests."""
MAX_CONFIG_LENGTH = 1 << 16
"""Characters of a config.json; the longest ones list each layer that is not quantised."""
_MAX_CONFIG_DEPTH = 32
"""Levels of a config.json: real ones have four or five."""


def _check_source(source: str) -> str:
    if not re.fullmatch(_SOURCE, source):
        fault = "must be a Hugging Face id (org/name or hf://org/name) or an absolute folder"
        raise PydanticCustomError("model_source", fault)
    return source


class Dtype(StrEnum):
    """Number format of weights and KV cache; `auto` is the checkpoint's own."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class HostPathCache(ApiModel):
    """A folder on each node."""

    path: Annotated[str, Field(max_length=1024, pattern=r"^/[^:\n]+$")]
    """Absolute path. For downloads it is created if it does not exist, and must be writable for
    user 1000, as whom workers run."""


class ClaimCache(ApiModel):
    """A PersistentVolumeClaim in the deployment's namespace."""

    claim_name: Annotated[str, Field(max_length=253, pattern=DNS_NAME)]
    """Name of the claim. Workers on different nodes need the access mode ReadWriteMany, or
    ReadOnlyMany with readOnly."""
    read_only: bool = False
    """Whether the volume is mounted read-only: the model must be in it already."""


class ImageCache(ApiModel):
    """An OCI image with the model's files in its root folder."""

    reference: Annotated[str, Field(min_length=1, max_length=1024, pattern="^[!-~]+$")]
    """Name of the image, as in a container. The nodes must support Kubernetes' image volumes."""


class _OneOfSeveral(ApiModel):
    """An object of which exactly one field is set."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Bound the number of fields: the API server has no CEL below `model`, an untyped node."""
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        handler.resolve_ref_schema(schema).update(minProperties=1, maxProperties=1)
        return schema


class ModelCache(_OneOfSeveral):
    """Where workers store or find the model's files: exactly one of three."""

    host_path: HostPathCache | None = None
    """A folder on each node: it stores downloads (HF_HOME), or holds the folder of model.source."""
    persistent_volume_claim: ClaimCache | None = None
    """A volume: it stores downloads (HF_HOME), or holds the folder of model.source."""
    image: ImageCache | None = None
    """An image volume with the model's files, which are loaded from it read-only."""

    @model_validator(mode="after")
    def _check_exactly_one(self) -> Self:
        given = [name for name in _CACHES if getattr(self, name) is not None]
        if len(given) != 1:
            fault = "state exactly one of hostPath, persistentVolumeClaim and image"
            raise PydanticCustomError("one_cache", fault)
        return self


def check_config(config: dict[str, Any]) -> dict[str, Any]:
    """Bound depth and length. Fields with null have false, which says the same about a model and is
    kept where patches take null for a removal."""
    if not _is_shallow(config):
        fault = f"is nested deeper than {_MAX_CONFIG_DEPTH} levels; a config has a few"
        raise PydanticCustomError("config_depth", fault)
    try:
        text = json.dumps(config, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        fault = "has NaN or an infinite number, which JSON has not"
        raise PydanticCustomError("config_number", fault) from error
    if not text.isascii() and text != text.encode(errors="replace").decode():
        raise PydanticCustomError("config_text", "has characters that are no valid Unicode")
    length = len(text)
    if length > MAX_CONFIG_LENGTH:
        fault = (
            f"has {length:,} characters as JSON, above {MAX_CONFIG_LENGTH:,}: give it in a "
            "ConfigMap (spec.model.config.configMapKeyRef), whose lists of layers are shortened"
        )
        raise PydanticCustomError("config_length", "{fault}", {"fault": fault})
    return {name: _keep_nulls(value) for name, value in config.items()}


def _is_shallow(config: object) -> bool:
    """Whether nothing lies deeper than the limit; without recursion, which deep values exhaust."""
    level = [config]
    for _ in range(_MAX_CONFIG_DEPTH):
        level = [
            each
            for value in level
            if isinstance(value, dict | list)
            for each in (value.values() if isinstance(value, dict) else value)
        ]
    return not level


def _keep_nulls(value: object) -> object:
    if isinstance(value, list):
        return [each if each is None else _keep_nulls(each) for each in value]
    if isinstance(value, dict):
        return {name: _keep_nulls(each) for name, each in value.items()}
    return False if value is None else value


class AnyObject:
    """Schema of an object with any fields, which the API server keeps as they are."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        del core_schema, handler
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


class ConfigMapKeyRef(ApiModel):
    """One entry of a ConfigMap in the deployment's namespace."""

    name: Annotated[str, Field(max_length=253, pattern=DNS_NAME)]
    """Name of the ConfigMap."""
    key: Annotated[str, Field(max_length=253, pattern=CONFIG_KEY)] = "config.json"
    """Key of the entry."""
    optional: bool | None = None
    """Whether plans do without it where the ConfigMap or entry is missing, as if config were
    absent."""


class ModelConfig(_OneOfSeveral):
    """The model's config.json, from which plans take its dimensions: exactly one of two."""

    inline: Annotated[dict[str, Any], AfterValidator(check_config), AnyObject()] | None = None
    """The content of the config.json, as an object."""
    config_map_key_ref: ConfigMapKeyRef | None = None
    """A ConfigMap with the config.json, as `kubectl create configmap NAME
    --from-file=config.json` makes it; an entry hf_quant_config.json beside it counts, too. Only the
    operator reads it, once a minute."""

    @model_validator(mode="after")
    def _check_exactly_one(self) -> Self:
        if (self.inline is None) == (self.config_map_key_ref is None):
            fault = "state exactly one of inline and configMapKeyRef"
            raise PydanticCustomError("one_config", fault)
        return self


class ModelSpec(ApiModel):
    """The weights to serve, and the name under which clients request them."""

    source: Annotated[
        str,
        AfterValidator(_check_source),
        Field(max_length=1024, json_schema_extra={"pattern": _SOURCE}),
    ]
    """Hugging Face id (`org/name` or `hf://org/name`), or path of a folder on every node."""
    revision: Annotated[str, Field(max_length=256, pattern=_WORD)] | None = None
    """Branch, tag or commit of the Hugging Face repository. The emulated engine ignores it."""
    dtype: Annotated[Dtype, Field(strict=False)] | None = None
    """Number format of weights and KV cache; absent: the engine decides."""
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    """Maximum length of prompt plus output in tokens; absent: the model's own limit."""
    served_name: ModelName | None = None
    """Model name that clients request; absent: the Hugging Face id, or the folder's name. Further
    names are those of spec.gateway.modelAliases."""
    cache: ModelCache | None = None
    """Where workers store or find the model's files; absent: each pod downloads them, or reads the
    folder on its node."""
    config: ModelConfig | None = None
    """The model's config.json, for plans and checks; engines read their own. Absent: Cleave's model
    table has the dimensions of well-known models, and others are not planned."""

    @property
    def locator(self) -> str:
        """What the engine loads: a repository id without scheme, or a folder."""
        return self.source.removeprefix(_HF)

    @property
    def folder(self) -> str | None:
        """The absolute folder; None for a Hugging Face id."""
        return self.source if self.source.startswith("/") else None

    @property
    def shape_field(self) -> str:
        """The field, as in YAML, from which plans take the model's dimensions."""
        if self.config is None:
            return "spec.model.source"
        return f"spec.model.config.{'configMapKeyRef' if self.config.inline is None else 'inline'}"

    @property
    def name(self) -> str:
        """The model name that clients request."""
        if self.served_name:
            return self.served_name
        return PurePosixPath(self.source).name if self.folder else self.locator


class _StringOrObject:
    """Schema of a field that is text or an object.

    A structural schema has no such union: a node without a type must keep unknown fields. The API
    server still checks the known ones, and `kubectl explain` lists them.
    """

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = {**handler.resolve_ref_schema(handler(core_schema))}
        del schema["type"], schema["additionalProperties"]
        # The pattern applies to text only, and the properties to objects only.
        return {**schema, "pattern": _SOURCE, "x-kubernetes-preserve-unknown-fields": True}


def _expand_text(value: object) -> object:
    return {"source": value} if isinstance(value, str) else value


ModelField = Annotated[ModelSpec, BeforeValidator(_expand_text), _StringOrObject()]
"""A model; text is short for {source: ...}."""
