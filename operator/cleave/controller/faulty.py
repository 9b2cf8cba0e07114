"""What is done about a resource that cannot be read: its author is told, what runs stays. Pure.

The API server lets none in; a version of Cleave with other rules may have.
"""

from collections.abc import Sequence

from cleave.controller import conditions
from cleave.controller.actions import Action, PatchStatus, Reference, SetFinalizers
from cleave.controller.conditions import Condition
from cleave.controller.wanted import FINALIZER
from cleave.pods.labels import Manifest


def report(
    kind: str, meta: Manifest, status: Manifest, faults: Sequence[str], now_s: float
) -> list[Action]:
    """Ready is False, and says why; the rest of the status stays. One that is deleted may go."""
    target = Reference(kind, meta["namespace"], meta["name"], meta["uid"])
    finalizers = meta.get("finalizers", [])
    if "deletionTimestamp" in meta:
        kept = tuple(name for name in finalizers if name != FINALIZER)
        version = meta.get("resourceVersion", "")
        return [SetFinalizers(target, kept, version)] if FINALIZER in finalizers else []
    before = status.get("conditions", [])
    ready = Condition("Ready", False, "Invalid", "; ".join(faults))
    settled = conditions.settled(before, [ready], meta.get("generation"), now_s)
    others = [each for each in before if each["type"] != "Ready"]
    if [each for each in before if each["type"] == "Ready"] == settled:
        return []
    told = {**status, "conditions": [*settled, *others]}
    return [PatchStatus(target, told), *conditions.told(target, before, [ready])]
