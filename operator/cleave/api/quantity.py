"""Kubernetes quantities ("500m", "6Gi", 2) as a field type. Used by the pod overrides."""

import re
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

PATTERN = r"^([0-9]+|[0-9]*\.[0-9]+|[0-9]+\.)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?$"
"""Matches quantities that are not negative."""


def _check(value: object) -> str:
    text = str(value)
    if isinstance(value, bool | float) or not re.fullmatch(PATTERN, text):
        raise PydanticCustomError(
            "quantity", 'must be a quantity: a whole number, or text such as "500m" or "6Gi"'
        )
    return text


Quantity = Annotated[
    str,
    BeforeValidator(_check),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": PATTERN,
        }
    ),
]
"""A quantity; whole numbers are converted to text."""
