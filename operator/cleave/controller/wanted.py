"""Manifests as they are applied: with their owner, and with a digest that says what was applied.

Pure. The digest is how a reconcile knows that nothing has to be done, without comparing objects
into which the API server has written its defaults.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

from pydantic import BaseModel, ValidationError

from cleave.api.pool import InstancePool
from cleave.api.resource import Resource
from cleave.controller.actions import Apply, Reference
from cleave.controller.observed import APPLIED, TEMPLATE, ObservedChild
from cleave.pods.container import image
from cleave.pods.labels import Manifest

FINALIZER = "cleave.dev/drain"
_DIGITS = 12
_CONTROLLED = ("Pod", "InstancePool", "Deployment")
_NOT_IN_PODS = {"replicas", "owner", "rollout", "pending_timeout_s", "deletion_policy"}
"""Fields of a pool that change nothing of its pods."""

Children = Mapping[tuple[str, str], ObservedChild]
"""What was made for a resource, by kind and name."""


def reference(resource: Resource) -> Reference:
    """The resource, by its very uid."""
    return Reference(resource.kind, resource.namespace, resource.name, resource.metadata.uid or "")


def owned(manifest: Manifest, owner: Resource) -> Manifest:
    """The manifest as `owner`'s: it goes when the owner goes."""
    link = {
        "apiVersion": owner.api_version,
        "kind": owner.kind,
        "name": owner.name,
        "uid": owner.metadata.uid or "",
        "blockOwnerDeletion": True,
        # There is one controller at most; pools by hand may share a Service.
        **({"controller": True} if manifest["kind"] in _CONTROLLED else {}),
    }
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [link]}}


def stamped(manifest: Manifest) -> Manifest:
    """The manifest with the digest of itself."""
    return annotated(manifest, APPLIED, digest(manifest))


def annotated(manifest: Manifest, name: str, value: str) -> Manifest:
    """The manifest with one more annotation."""
    meta = manifest["metadata"]
    annotations = {**meta.get("annotations", {}), name: value}
    return {**manifest, "metadata": {**meta, "annotations": annotations}}


def changed(manifests: Sequence[Manifest], owner: Resource, there: Children) -> Iterator[Apply]:
    """Apply what is not there, or was applied otherwise."""
    for manifest in manifests:
        wanted = stamped(owned(manifest, owner))
        child = there.get((wanted["kind"], wanted["metadata"]["name"]))
        if child is None:
            yield Apply(wanted, is_new=True)
        elif child.applied != wanted["metadata"]["annotations"][APPLIED] and not child.deleting:
            yield Apply(wanted)


def template(pool: InstancePool) -> str:
    """Digest of all that a pod of the pool is made from; how many there are is no part of it."""
    spec = pool.spec.model_dump(mode="json", exclude_defaults=True, exclude=_NOT_IN_PODS)
    return digest({"spec": spec, "image": pool.spec.engine.image or image("worker")})


def with_template(manifest: Manifest, template_digest: str) -> Manifest:
    """A worker pod with the digest of what it was made from."""
    return annotated(manifest, TEMPLATE, template_digest)


def digest(value: object) -> str:
    """Short digest of anything that JSON can hold."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def same(model: type[BaseModel], one: Manifest, other: Manifest) -> bool:
    """Whether two statuses say the same, whatever defaults the API server has written into one."""
    try:
        first, second = (model.model_validate_json(json.dumps(each)) for each in (one, other))
    except ValidationError:
        return False
    return first == second
