"""Reports a resource that fails validation; its pods and gateways stay as they are. Pure.

Called by the controller. The webhook refuses such a resource; one that a version of Cleave with
other rules admitted may still exist.
"""

from collections.abc import Sequence

from cleave.controller.cluster import conditions
from cleave.controller.cluster.actions import Action, ObjectReference, PatchStatus, SetFinalizers
from cleave.controller.cluster.apply import FINALIZER
from cleave.controller.cluster.conditions import ConditionState
from cleave.manifests.labels import Manifest


def report_invalid(
    kind: str, meta: Manifest, status: Manifest, faults: Sequence[str], now_s: float
) -> list[Action]:
    """Set Ready to False with the faults; the rest of the status stays.

    A resource that is being deleted loses its finalizer.
    """
    target = ObjectReference(kind, meta["namespace"], meta["name"], meta["uid"])
    finalizers = meta.get("finalizers", [])
    if "deletionTimestamp" in meta:
        remaining = tuple(name for name in finalizers if name != FINALIZER)
        version = meta.get("resourceVersion", "")
        return [SetFinalizers(target, remaining, version)] if FINALIZER in finalizers else []
    before = status.get("conditions", [])
    ready = ConditionState("Ready", False, "Invalid", "; ".join(faults))
    merged = conditions.merge(before, [ready], meta.get("generation"), now_s)
    other_conditions = [each for each in before if each["type"] != "Ready"]
    if [each for each in before if each["type"] == "Ready"] == merged:
        return []
    new_status = {**status, "conditions": [*merged, *other_conditions]}
    return [PatchStatus(target, new_status), *conditions.build_events(target, before, [ready])]
