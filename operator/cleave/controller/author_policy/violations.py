"""Judges the pods that the operator would create for a deployment or pool. Pure.

Called by the webhook and, as that may be away, before each reconcile. Who may write a deployment
may otherwise have anything in a pod, without the right to create pods: so the built pods count, not
the fields of the resource. What a plan chooses adds nothing that an author could choose.
"""

import re
from collections.abc import Iterator

from cleave.api.deployment import LLMDeployment
from cleave.api.engine import DeploymentEngine, RoleEngine
from cleave.api.model import ModelSpec
from cleave.api.pool import InstancePool
from cleave.api.role import Role
from cleave.controller.author_policy.allow_lists import add_own_images
from cleave.controller.author_policy.pod_rules import AllowLists, PodFault
from cleave.controller.author_policy.pod_table import ANNOTATIONS, LABELS, POD_SPEC
from cleave.controller.author_policy.volume_table import CONFIG_MAP
from cleave.controller.deployment.reconcile import build_gateway
from cleave.controller.object_preview import list_pods
from cleave.controller.settings import OperatorSettings
from cleave.manifests.labels import Manifest
from cleave.manifests.pool import build_pools
from cleave.planner.placement import Placement, to_planned_pool
from cleave.planner.plan import PlannedPool
from cleave.planner.resolved_deployment import resolve_in_cluster

_FIELDS = (
    (r"spec\.containers\[gateway\]\.image", "spec.gateway.image"),
    (r"spec\.containers\[gateway\]\.command\[.*\]", "spec.gateway.tracing.endpoint"),
    (r"spec\.containers\[worker\]\.image", "spec.engine.image"),
    (r"spec\.containers\[worker\]\.env", "spec.engine.env"),
    (r"spec\.containers\[worker\]\.command\[--media-domains\]", "spec.engine.mediaDomains"),
    (r"spec\.containers\[worker\]\.command\[(.*)\]", r"spec.engine.args: \1"),
    (r"spec\.containers\[worker\]\.command", "spec.engine.args"),
    (r"spec\.containers\[worker\]\.volumeMounts\[model\].*", "spec.model.source"),
    (r"spec\.containers\[worker\]\.(resources|volumeMounts)", r"spec.template.\1"),
    (r"spec\.volumes\[model\]", "spec.model.cache"),
    (r"spec\.volumes\[cleave-hub-token\]", "spec.engine.env[HF_TOKEN]"),
    (r"spec\.volumes\[keys\].*", "spec.gateway.keysSecret"),
    (r"spec\.volumes\[tls\].*", "spec.gateway.tlsSecret"),
    (r"spec\.volumes\[picker-tls\].*", "spec.gateway.endpointPickerTlsSecret"),
    (r"spec\.volumes\[router-tls\].*", "spec.gateway.routerTlsSecret"),
    (r"spec\.model\.", "spec.model."),
    (r"(metadata|spec)\.", "spec.template."),
)
"""Beginnings of paths in pods, and the fields of the resource that decide what is there."""


def list_violations(
    resource: LLMDeployment | InstancePool, settings: OperatorSettings
) -> Iterator[str]:
    """Yield a line `path: what is wrong` for everything in the resource's pods that the operator's
    policy does not allow; nothing with the profile Open."""
    if settings.allow_lists is None:
        return
    lists = add_own_images(settings.allow_lists, settings.images)
    faults = [*_list_config_faults(resource.spec.model, lists)]
    for pod in build_pods(resource, settings):
        faults += list_pod_faults(pod, lists)
    # Pods of one resource have the same faults.
    yield from dict.fromkeys(map(_describe, faults))


def _list_config_faults(model: ModelSpec, lists: AllowLists) -> Iterator[PodFault]:
    """The ConfigMap with the model's config.json, which the operator reads for the author."""
    if model.config and (reference := model.config.config_map_key_ref):
        path = "spec.model.config.configMapKeyRef.name"
        yield from CONFIG_MAP.list_faults(reference.name, path, lists)


def list_pod_faults(pod: Manifest, lists: AllowLists) -> Iterator[PodFault]:
    """Yield what in a pod, or in the template of one, is neither Cleave's own nor in the lists."""
    meta = pod["metadata"]
    yield from LABELS.list_faults(meta.get("labels", {}), "metadata.labels", lists)
    yield from ANNOTATIONS.list_faults(meta.get("annotations", {}), "metadata.annotations", lists)
    yield from POD_SPEC.list_faults(pod["spec"], "spec", lists)


def build_pods(
    resource: LLMDeployment | InstancePool, settings: OperatorSettings
) -> Iterator[Manifest]:
    """Yield one of each kind of pod, or its template, that the resource leads to."""
    if isinstance(resource, InstancePool):
        yield from list_pods(resource, settings)
        return
    yield build_gateway(resource, settings)["spec"]["template"]
    manual = map(to_planned_pool, resource.spec.manual_pools)
    pools = tuple(manual) or tuple(_list_kinds(resource.spec.engine))
    for pool in build_pools(resolve_in_cluster(resource), Placement(pools, reason="")):
        yield from list_pods(pool, settings)


def _list_kinds(engine: DeploymentEngine) -> Iterator[PlannedPool]:
    """A pool of each kind that a plan may have: a role may have arguments of its own."""
    yield PlannedPool(Role.MIXED, 1)
    for role in (Role.PREFILL, Role.DECODE):
        if engine.get_role(role) != RoleEngine():
            yield PlannedPool(role, 1)


def _describe(fault: PodFault) -> str:
    path = fault.path
    for pattern, field in _FIELDS:
        if re.match(pattern, path):
            path = re.sub(f"^{pattern}", field, path)
            break
    found = f" ({fault.found})" if fault.found else ""
    if not fault.allow_list:
        return f"{path}{found}: the operator's policy does not allow it"
    return (
        f"{path}{found}: the operator's policy does not allow it; the chart's value "
        f"policy.allow.{fault.allow_list} would have to list {fault.entry}"
    )
