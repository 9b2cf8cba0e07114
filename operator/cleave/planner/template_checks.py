"""Checks of spec.template that Kubernetes makes of a pod and no rule of the CRD can: amounts of
resources, and objects of pod specs, of which the CRD knows the name alone. Pure.

Called for deployments and pools, before a pod is refused. Source: k8s.io/kubernetes
`pkg/apis/core/validation`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from cleave.api.pods.quantity import parse_quantity
from cleave.api.pods.worker_template import NamedObject, Resources, WorkerTemplate

_FIELD = "spec.template"
_OWN_FOLDERS = ("/tmp", "/home/cleave", "/dev/shm", "/etc/cleave/hub-token")  # noqa: S108 - in pods
_CLAIM_SOURCES = ("resourceClaimName", "resourceClaimTemplateName")


def list_template_faults(template: WorkerTemplate) -> Iterator[str]:
    """Yield what no pod of the template could have, one line each: `path: what is wrong`."""
    yield from _list_amount_faults(template.resources)
    for index, volume in enumerate(template.volumes):
        kinds = [*_get_fields(volume)]
        if len(kinds) > 1:
            yield f"{_FIELD}.volumes[{index}]: must have one kind (got {', '.join(kinds)})"
    for index, claim in enumerate(template.resource_claims):
        if sum(name in _CLAIM_SOURCES for name in _get_fields(claim)) != 1:
            yield f"{_FIELD}.resourceClaims[{index}]: needs one of {', '.join(_CLAIM_SOURCES)}"
    yield from _list_mount_faults(template.volume_mounts)


def _get_fields(part: NamedObject) -> dict[str, object]:
    return {name: value for name, value in (part.model_extra or {}).items() if value is not None}


def _list_mount_faults(mounts: Sequence[NamedObject]) -> Iterator[str]:
    paths = [_get_fields(mount).get("mountPath") for mount in mounts]
    counts = Counter(path for path in paths if isinstance(path, str))
    for index, path in enumerate(paths):
        field = f"{_FIELD}.volumeMounts[{index}].mountPath"
        if not isinstance(path, str) or not path:
            yield f"{field}: required, the folder in the container"
        elif ":" in path:
            yield f"{field}: must not have a colon (got {path!r})"
        elif path.rstrip("/") in _OWN_FOLDERS:
            yield f"{field}: {path} is a volume of every worker; choose another folder"
        elif counts[path] > 1:
            yield f"{field}: {path} is mounted twice; choose another folder"


def _list_amount_faults(resources: Resources) -> Iterator[str]:
    """Requests above limits, and parts of devices, which are whole and not overcommitted."""
    field = f"{_FIELD}.resources"
    for kind, amounts in (("requests", resources.requests), ("limits", resources.limits)):
        for name, amount in amounts.items():
            if _is_device(name) and parse_quantity(amount) % 1:
                yield f"{field}.{kind}: {name} must be a whole number (got {amount})"
    for name, amount in resources.requests.items():
        limit = resources.limits.get(name)
        if _is_device(name) and (limit is None or parse_quantity(limit) != parse_quantity(amount)):
            yield f"{field}.requests: {name} {amount} must be among limits, with the same amount"
        elif limit is not None and parse_quantity(amount) > parse_quantity(limit):
            yield f"{field}.requests: {name} {amount} is above its limit of {limit}"


def _is_device(name: str) -> bool:
    return "/" in name or name.startswith("hugepages-")
