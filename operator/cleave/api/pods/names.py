"""Names, labels and annotations as Kubernetes checks them: patterns, types and rules.

The API server refuses a pod that breaks them, long after it took the resource. Sources:
k8s.io/apimachinery `pkg/util/validation` and k8s.io/kubernetes `pkg/apis/core/validation`.
"""

import re
from typing import Annotated, Any

from pydantic import Field

from cleave.api.base import ValidationRule

_DNS_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DNS_SUBDOMAIN = rf"{_DNS_LABEL}([.]{_DNS_LABEL})*"
_NAME = "[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"

DNS_NAME = f"^{_DNS_SUBDOMAIN}$"
"""Pattern of most object names."""
DNS_LABEL = f"^{_DNS_LABEL}$"
"""Pattern of names without dots, such as those of volumes, which have at most 63 characters."""
CONFIG_KEY = "^[.]?[-_a-zA-Z0-9][-._a-zA-Z0-9]*$"
"""Pattern of the names of entries of Secrets and ConfigMaps."""
_MAX_PREFIX, MAX_NAME = 253, 63
MAX_KEY = _MAX_PREFIX + len("/") + MAX_NAME
QUALIFIED_NAME = f"^({_DNS_SUBDOMAIN}/)?{_NAME}$"
"""Pattern of keys of labels, annotations and taints, and of names of devices."""
_PARTS = f"^([^/]{{1,{_MAX_PREFIX}}}/)?[^/]{{1,{MAX_NAME}}}$"
"""Pattern of texts whose parts are not too long for a qualified name."""

LABEL_VALUE = f"^({_NAME})?$"
LabelValue = Annotated[str, Field(max_length=MAX_NAME, pattern=LABEL_VALUE)]
"""The value of a label."""

KEY_SHAPE = (
    f"at most {MAX_NAME} letters, digits, '-', '_' and '.' that begin and end with a letter or "
    "digit; a lower-case DNS name and a slash may come before them"
)
"""What a qualified name is, for messages."""


def is_qualified_name(text: str) -> bool:
    """Whether Kubernetes takes the text for a qualified name."""
    return all(re.fullmatch(pattern, text) for pattern in (QUALIFIED_NAME, _PARTS))


def build_cel_check(text: str) -> str:
    """Return CEL that is true where the text of the expression `text` is a qualified name."""
    return f"{text}.matches('{_PARTS}') && {text}.matches('{QUALIFIED_NAME}')"


def build_key_rule(name: str, field: str) -> ValidationRule:
    """Restrict the keys of the map `field`, in Python `name`, to qualified names."""

    def list_offenders(part: Any) -> list[str]:  # noqa: ANN401 - any part of a resource
        return [key[: 2 * MAX_NAME] for key in getattr(part, name) if not is_qualified_name(key)]

    return ValidationRule(
        cel=f"!has(self.{field}) || self.{field}.all(k, {build_cel_check('k')})",
        is_valid=lambda part: not list_offenders(part),
        message=f"must have keys that Kubernetes takes: {KEY_SHAPE}",
        field=field,
        list_offenders=list_offenders,
    )
