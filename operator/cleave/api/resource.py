"""What both resources have in common: API version, metadata and conditions."""

import re
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from cleave.api.base import ApiModel, ValidationRule, declare_list_map_key

GROUP = "cleave.dev"
VERSION = "v1alpha1"
API_VERSION = "cleave.dev/v1alpha1"

ApiVersion = Literal["cleave.dev/v1alpha1"]


class Metadata(ApiModel):
    """Metadata of the object; only a few of the fields that the API server writes are read."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    namespace: str = "default"
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    uid: str | None = None
    generation: int | None = None
    resource_version: str | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    finalizers: list[str] = Field(default_factory=list)
    owner_references: list[dict[str, Any]] = Field(default_factory=list)
    managed_fields: list[dict[str, Any]] = Field(default_factory=list)


MetadataField = Annotated[Metadata, WithJsonSchema({"type": "object"})]
"""Metadata, with the API server's own schema."""


class Resource(ApiModel):
    """An object of the API server; each kind adds spec and status."""

    api_version: ApiVersion = "cleave.dev/v1alpha1"
    kind: str
    metadata: MetadataField

    @property
    def name(self) -> str:
        """Name of the object."""
        return self.metadata.name

    @property
    def namespace(self) -> str:
        """Namespace of the object."""
        return self.metadata.namespace


def build_name_rule(longest: int) -> ValidationRule:
    """Restrict names to DNS labels of `longest` characters; pod names (63) are made from them."""
    pattern = rf"^[a-z]([-a-z0-9]{{0,{longest - 2}}}[a-z0-9])?$"
    return ValidationRule(
        cel=f"self.metadata.name.matches('{pattern}')",
        is_valid=lambda r: re.fullmatch(pattern, r.metadata.name) is not None,
        message=f"metadata.name must be at most {longest} lower-case letters, digits and hyphens, "
        "and begin with a letter",
        field="",
    )


class Condition(ApiModel):
    """One aspect of the object's state, in Kubernetes' form."""

    type: Annotated[str, Field(max_length=316)]
    """The aspect, such as Ready or PlanReady."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition is met."""
    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    """The reason in one CamelCase word."""
    message: Annotated[str, Field(max_length=32768)] = ""
    """The reason in a sentence."""
    last_transition_time: Annotated[datetime, Field(strict=False)]
    """Time at which `status` last changed."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """Generation of the spec that the condition describes."""


Conditions = Annotated[list[Condition], declare_list_map_key("type")]
