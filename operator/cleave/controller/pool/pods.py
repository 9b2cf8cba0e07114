"""Builds the pods that a pool's reconcile creates, and chooses those that it deletes. Pure."""

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence

from cleave.api.pool import InstancePool
from cleave.controller.author_policy.container_table import COMPILED_CODE_ENV
from cleave.controller.author_policy.pod_rules import matches
from cleave.controller.cluster import apply
from cleave.controller.cluster.actions import Apply, Create
from cleave.controller.cluster.objects import ObservedPod
from cleave.controller.views import PoolInstances, PoolView
from cleave.manifests import container, credentials, multi_node
from cleave.manifests.cell_pod import build_cell_pod, has_several_engines
from cleave.manifests.gang import add_gang, build_pod_group
from cleave.manifests.labels import WORKER, Manifest
from cleave.manifests.resources import add_rdma_device
from cleave.manifests.topology import assign_cells
from cleave.manifests.worker import build_worker_pod

_SUFFIX_DIGITS = 6


def generate_names(pool: InstancePool, taken: Collection[str], count: int) -> list[str]:
    """Generate `count` names for new instances, none of them in `taken`; deterministic."""
    used, new_names, number = set(taken), list[str](), 0
    while len(new_names) < count:
        text = f"{pool.metadata.uid}/{pool.spec.revision}/{number}"
        name = f"{pool.name}-{hashlib.sha256(text.encode()).hexdigest()[:_SUFFIX_DIGITS]}"
        number += 1
        if name not in used:
            used.add(name)
            new_names.append(name)
    return new_names


def create_instances(view: PoolView, fleet: PoolInstances, count: int) -> Iterator[Create]:
    """Yield the creation of `count` instances: their pods, or leader pods, or sets."""
    pool = view.pool
    taken = view.used_names.union(pod.set_name or pod.instance or pod.name for pod in view.pods)
    cells: list[int | None] = [None] * count
    if pool.spec.colocation is not None:
        # Old instances of the same revision occupy their cells, and thus their nodes, too.
        same = (pod for pod in fleet.all if pod.spec_revision == pool.spec.revision)
        used_cells = [pod.cell for pod in same if pod.cell is not None]
        cells = list(assign_cells(used_cells, pool.spec.colocation.per_cell, count))
    has_sets = pool.spec.nodes > 1 and view.settings.has_leader_worker_sets
    as_sets = has_sets and multi_node.supports_leader_worker_set(pool)
    make = _build_set if as_sets else build_leader
    for name, cell in zip(generate_names(pool, taken, count), cells, strict=True):
        yield Create(apply.with_owner(make(view, name, cell), pool))


def complete_instances(
    view: PoolView, instances: Iterable[ObservedPod]
) -> Iterator[Apply | Create]:
    """Yield the further pods of instances whose leader pods have a uid now, after the PodGroup that
    all of them name."""
    if view.pool.spec.nodes == 1:
        return
    existing = {pod.name for pod in view.pods}
    for instance in instances:
        if instance.set_name or instance.template != view.template_hash:
            continue
        leader = build_leader(view, instance.name, instance.cell)
        leader["metadata"]["uid"] = instance.uid
        missing = [
            pod for pod in build_node_pods(view, leader) if pod["metadata"]["name"] not in existing
        ]
        group = build_pod_group(
            view.pool, instance.name, instance.uid, has_pod_groups=view.settings.has_pod_groups
        )
        if missing and group is not None:
            yield Apply(group)
        yield from map(Create, missing)


def build_node_pods(view: PoolView, leader: Manifest) -> Iterator[Manifest]:
    """Yield the further pods of the instance of this leader's pod."""
    settings = view.settings
    for pod in multi_node.build_node_pods(
        _add_devices(view), leader, device=settings.device, images=settings.images
    ):
        yield _finish_pod(view, pod, leader["metadata"]["name"])


def build_leader(view: PoolView, name: str, cell: int | None) -> Manifest:
    """The pod of an instance, or of all engines of a cell, or the first one of several nodes."""
    settings, pool = view.settings, _add_devices(view)
    device, images = settings.device, settings.images
    if has_several_engines(pool.spec):
        manifest = build_cell_pod(pool, name, device=device, images=images)
    else:
        manifest = build_worker_pod(pool, name, device=device, cell=cell, images=images)
    return _finish_pod(view, manifest, name)


def _finish_pod(view: PoolView, pod: Manifest, instance: str) -> Manifest:
    grouped = add_gang(pod, view.pool, instance, has_pod_groups=view.settings.has_pod_groups)
    return apply.with_template(_apply_settings(view, grouped), view.template_hash)


def choose_victims(
    pods: Sequence[ObservedPod], count: int, reclaimed: Collection[str] = ()
) -> tuple[ObservedPod, ...]:
    """Choose `count` pods to delete, of those that are not being deleted; fewer if too few.

    A deleted pod drains: it takes no new requests and ends once its running requests have. So first
    come those whose GPUs others reclaim (`reclaimed`: names of instances), then pods without a
    node, then those that fail, then pods that are not ready, then the least loaded; among equals
    the youngest. A pod of unknown load counts as the most loaded.
    """
    candidates = sorted(
        (pod for pod in pods if not pod.deleting),
        key=lambda pod: (pod.instance_name not in reclaimed, _rank(pod)),
    )
    return tuple(candidates[: max(0, count)])


def _rank(pod: ObservedPod) -> tuple[bool, bool, bool, float, float, str]:
    load = math.inf if pod.load is None else pod.load
    return (
        pod.scheduled,
        not pod.is_failing,
        pod.ready,
        load if pod.ready else 0.0,
        -pod.created_s,
        pod.name,
    )


def _build_set(view: PoolView, name: str, cell: int | None) -> Manifest:
    """Build a LeaderWorkerSet for one instance; its pods carry the hash of the template."""
    settings = view.settings
    manifest = multi_node.build_leader_worker_set(
        _add_devices(view),
        name,
        device=settings.device,
        cell=cell,
        images=settings.images,
    )
    group = manifest["spec"]["leaderWorkerTemplate"]
    for part in ("leaderTemplate", "workerTemplate"):
        group[part] = apply.with_template(_apply_settings(view, group[part]), view.template_hash)
    return manifest


def _apply_settings(view: PoolView, pod: Manifest) -> Manifest:
    """The pod, or template of one, as settings of the operator demand: with the account of workers,
    without a user that the cluster assigns."""
    operator = view.settings.account
    spec = credentials.add_credentials(pod["spec"], WORKER, view.accounts, operator)
    if view.settings.has_assigned_user:
        spec = container.remove_user(spec)
    if view.settings.allow_lists is not None:
        spec = _remove_kernel_folders(view, spec, view.settings.allow_lists.get("env", ()))
    return {**pod, "spec": spec}


def _remove_kernel_folders(view: PoolView, spec: Manifest, allowed: tuple[str, ...]) -> Manifest:
    """The spec without Cleave's folders of compiled kernels in volumes that others may write to,
    unless the chart allows these variables."""
    own = {*COMPILED_CODE_ENV} - {each.name for each in view.pool.spec.engine.env}
    removed = {name for name in own if not matches(name, allowed)}
    containers = [
        {**each, "env": [e for e in each.get("env", ()) if e["name"] not in removed]}
        for each in spec["containers"]
    ]
    return {**spec, "containers": containers}


def _add_devices(view: PoolView) -> InstancePool:
    """The pool whose new pods request what the nodes offer now.

    Not part of the template's hash: nodes come and go, and must not replace running instances.
    """
    if view.settings.device != "gpu":
        return view.pool
    spec = add_rdma_device(view.pool.spec, view.rdma_device)
    return view.pool.model_copy(update={"spec": spec})
