"""Writes the rules about pods as CEL, which the chart's ValidatingAdmissionPolicy contains.

Called by scripts/generate: `python -m cleave.controller.author_policy.admission_rules FILE`.
The template of the chart adds two variables for each list, NAME and NAMEPrefixes.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from cleave.controller.author_policy import allow_lists
from cleave.controller.author_policy.pod_rules import AnyValue, Fields
from cleave.controller.author_policy.pod_table import ANNOTATIONS, LABELS, POD_SPEC

_HEADER = "# Generated from operator/cleave/controller/author_policy by scripts/generate.\n"


def build_rules() -> dict[str, Any]:
    """Return the names of the lists, and one validation for each field of pods with a rule."""
    validations = [
        {"expression": f"variables.templates.all(t, {expression})", "message": message}
        for expression, message in _list_expressions()
    ]
    used = [name for name in allow_lists.NAMES if f"variables.{name}" in str(validations)]
    return {"lists": used, "validations": validations}


def _list_expressions() -> Iterator[tuple[str, str]]:
    """Yield what must be true of each template `t`, and the message if it is not."""
    policy = "policy.profile Restricted:"
    for name, keys in (("labels", LABELS), ("annotations", ANNOTATIONS)):
        value = f"t.metadata.{name}"
        expression = f"!has(t.metadata) || !has({value}) || {keys.to_cel(value)}"
        yield expression, f"{policy} {name} of pods; see policy.allow.labels"
    # The table's fields, without the rules below.
    known = Fields(dict.fromkeys(POD_SPEC.rules, AnyValue()), POD_SPEC.required)
    yield known.to_cel("t.spec"), f"{policy} fields of pods that Cleave does not use"
    for name, rule in POD_SPEC.rules.items():
        if not isinstance(rule, AnyValue):
            value = f"t.spec.{name}"
            expression = f"!has({value}) || {rule.to_cel(value)}"
            yield expression, f"{policy} {name} of pods; see policy.allow"


def main() -> None:
    """Write the file."""
    text = yaml.safe_dump(build_rules(), width=2**16, sort_keys=False)
    Path(sys.argv[1]).write_text(_HEADER + text)


if __name__ == "__main__":
    main()
