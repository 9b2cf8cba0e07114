"""Adds to manifests what is applied with them: an owner reference and a content hash. Pure.

By the hash a reconcile detects that an object is up to date without comparing it with the object,
into which the API server has written defaults.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

from pydantic import BaseModel, ValidationError

from cleave.api.pool import InstancePool
from cleave.api.resource import Resource
from cleave.controller.cluster import objects
from cleave.controller.cluster.actions import Apply, ObjectReference, SetFinalizers
from cleave.controller.cluster.objects import APPLIED_ANNOTATION, TEMPLATE_ANNOTATION, ObservedChild
from cleave.manifests.container import get_image
from cleave.manifests.labels import Manifest

FINALIZER = "cleave.dev/drain"
_HASH_DIGITS = 12
_CONTROLLED_KINDS = ("Pod", "InstancePool", "Deployment")
_FIELDS_NOT_IN_PODS = (
    "adapters", "replicas", "owner", "rollout", "pending_timeout_s", "deletion_policy",
)  # fmt: skip
"""Fields of a pool's spec that do not affect its pods, or of which running ones learn."""

ChildrenByName = Mapping[tuple[str, str], ObservedChild]
"""The objects that were created for a resource, by kind and name."""


def build_reference(resource: Resource) -> ObjectReference:
    """Return a reference to the resource, with its uid."""
    uid = resource.metadata.uid or ""
    return ObjectReference(resource.kind, resource.namespace, resource.name, uid)


def add_finalizer(resource: Resource) -> Iterator[SetFinalizers]:
    """Yield the action that adds the finalizer, unless the resource has it."""
    finalizers = resource.metadata.finalizers
    if FINALIZER not in finalizers:
        yield _set_finalizers(resource, (*finalizers, FINALIZER))


def remove_finalizer(resource: Resource) -> SetFinalizers:
    """Return the action that removes the finalizer and keeps others."""
    rest = tuple(name for name in resource.metadata.finalizers if name != FINALIZER)
    return _set_finalizers(resource, rest)


def _set_finalizers(resource: Resource, names: tuple[str, ...]) -> SetFinalizers:
    version = resource.metadata.resource_version or ""
    return SetFinalizers(build_reference(resource), names, version)


def with_owner(manifest: Manifest, owner: Resource) -> Manifest:
    """Return the manifest with an owner reference: the object is deleted with its owner."""
    link = {
        "apiVersion": owner.api_version,
        "kind": owner.kind,
        "name": owner.name,
        "uid": owner.metadata.uid or "",
        "blockOwnerDeletion": True,
        # An object has at most one controller; manually created pools may share a Service.
        **({"controller": True} if manifest["kind"] in _CONTROLLED_KINDS else {}),
    }
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [link]}}


def with_hash(manifest: Manifest) -> Manifest:
    """Return the manifest with a hash of its content as annotation."""
    return annotate(manifest, APPLIED_ANNOTATION, hash_content(manifest))


def annotate(manifest: Manifest, name: str, value: str) -> Manifest:
    """Return the manifest with one more annotation."""
    meta = manifest["metadata"]
    annotations = {**meta.get("annotations", {}), name: value}
    return {**manifest, "metadata": {**meta, "annotations": annotations}}


def build_changes(
    manifests: Sequence[Manifest], owner: Resource, existing: ChildrenByName
) -> Iterator[Apply]:
    """Yield an Apply for each manifest that does not exist or was applied with other content."""
    for manifest in manifests:
        desired = with_hash(with_owner(manifest, owner))
        child = existing.get((desired["kind"], desired["metadata"]["name"]))
        applied = desired["metadata"]["annotations"][APPLIED_ANNOTATION]
        is_same = child is not None and (child.applied, child.access) == (
            applied,
            objects.get_access_rules(desired),
        )
        if child is None or not (child.deleting or is_same):
            yield Apply(desired, is_new=child is None)


def hash_template(pool: InstancePool) -> str:
    """Hash everything that affects a pool's pods; the number of instances is left out."""
    engine = pool.spec.engine
    excluded: dict[str, bool | set[str]] = dict.fromkeys(_FIELDS_NOT_IN_PODS, True)
    excluded["engine"] = {"connector"}
    # Engines read their own; pods that exist keep the size that they have.
    excluded["model"] = {"config"}
    spec = pool.spec.model_dump(mode="json", exclude_defaults=True, exclude=excluded)
    # Also those that a later version of Cleave could change while the spec stays.
    in_use = {"connector": engine.kv_connector, "image": engine.image or get_image("worker")}
    return hash_content({"spec": spec, **in_use})


def with_template(manifest: Manifest, template_hash: str) -> Manifest:
    """Return a worker pod with the hash of its pool's template as annotation."""
    return annotate(manifest, TEMPLATE_ANNOTATION, template_hash)


def hash_content(value: object) -> str:
    """Return a short SHA-256 hash of a value that JSON can encode."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]


def is_same_status(model: type[BaseModel], one: Manifest, other: Manifest) -> bool:
    """Whether two statuses are equal once defaults of the API server are filled in. Unknown fields
    are skipped: a later version wrote them before a roll-back, and what is kept of them stays."""
    if one == other:
        return True
    try:
        first, second = (
            model.model_validate_json(json.dumps(each), extra="ignore") for each in (one, other)
        )
    except ValidationError:
        return False
    return first == second
