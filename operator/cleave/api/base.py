"""Base of every part of a resource: the base model and the cross-field rule.

Used by the resource types only. What is hard: a rule must hold in two places, in the API server
(CEL inside the CRD) and in Python (`cleave validate`, without a cluster). A Rule has both forms
side by side, so that nobody changes one without seeing the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError

RULES_BROKEN = "rules_broken"
"""Type of the pydantic error about broken rules; its context has them as `rules`, and what
breaks each as `offenders`."""


def declare_list_map_key(field: str, **options: Any) -> Any:  # noqa: ANN401 - pydantic's own types
    """Mark a list as a map keyed by one field of its entries; `options`: pydantic.Field's."""
    schema: Any = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [field]}
    return Field(json_schema_extra=schema, **options)


@dataclass(frozen=True, slots=True)
class ValidationRule:
    """A rule over several fields of one object."""

    cel: str
    """CEL expression that is true when the rule holds; `self` is the object."""
    is_valid: Callable[[Any], bool]
    """The same rule in Python; its argument is the validated model."""
    message: str
    """One sentence that says what to do."""
    field: str
    """The field, as written in YAML, that a fault is reported at; empty: the object."""
    list_offenders: Callable[[Any], Sequence[str]] = lambda _: ()
    """What breaks the rule, for Python's message; no part of it may be a secret."""

    def to_schema(self) -> dict[str, str]:
        """Return the rule as an entry of x-kubernetes-validations."""
        location = {"fieldPath": f".{self.field}"} if self.field else {}
        return {"rule": self.cel, "message": self.message, **location}


def build_unique_rule(field: str, key: str, noun: str) -> ValidationRule:
    """Restrict the entries of the list `field` (one word) to different values of `key`."""
    return ValidationRule(
        cel=f"!has(self.{field}) || "
        f"self.{field}.all(a, self.{field}.exists_one(b, b.{key} == a.{key}))",
        is_valid=lambda s: (
            len({getattr(e, key) for e in getattr(s, field)}) == len(getattr(s, field))
        ),
        message=f"must not name a {noun} twice",
        field=field,
    )


def format_cel_list(names: tuple[str, ...]) -> str:
    """Write texts as a list of CEL."""
    return "[" + ", ".join(f"'{name}'" for name in names) + "]"


class ApiModel(BaseModel):
    """A part of a resource: camelCase in YAML, no unknown fields, no implicit conversions."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    rules: ClassVar[tuple[ValidationRule, ...]] = ()

    @classmethod
    def read_status(cls, written: object) -> Self:
        """Read a part of a status. Unknown fields are skipped: before a roll-back a later version
        of Cleave wrote it. Raises ValidationError, which is a ValueError."""
        return cls.model_validate(written, by_alias=True, extra="ignore")

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = [rule for rule in self.rules if not rule.is_valid(self)]
        if broken:
            text = "; ".join(rule.message for rule in broken)
            # Escape braces, which pydantic would read as placeholders.
            template = text.replace("{", "{{").replace("}", "}}")
            offenders = [rule.list_offenders(self) for rule in broken]
            context = {"rules": broken, "offenders": offenders}
            raise PydanticCustomError(RULES_BROKEN, template, context)
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Add this model's rules to the schema, as CEL."""
        schema = handler(core_schema)
        if cls.rules:
            target = handler.resolve_ref_schema(schema)
            target["x-kubernetes-validations"] = [rule.to_schema() for rule in cls.rules]
        return schema
