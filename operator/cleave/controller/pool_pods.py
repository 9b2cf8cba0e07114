"""Pods that a pool's reconcile wants made. Pure."""

import hashlib
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from cleave.api.pool import InstancePool
from cleave.controller import wanted
from cleave.controller.actions import Create
from cleave.controller.observed import ObservedPod
from cleave.pods.gang import follower_pods, is_set_possible, leader_worker_set
from cleave.pods.labels import Manifest
from cleave.pods.spread import free_cells
from cleave.pods.worker import worker_pod

if TYPE_CHECKING:
    from cleave.controller.pool import Fleet, PoolView

_SUFFIX_DIGITS = 6


def names(pool: InstancePool, taken: Collection[str], count: int) -> list[str]:
    """`count` names for new instances that none of `taken` is; the same for the same arguments."""
    used, found, number = set(taken), list[str](), 0
    while len(found) < count:
        text = f"{pool.metadata.uid}/{pool.spec.revision}/{number}"
        name = f"{pool.name}-{hashlib.sha256(text.encode()).hexdigest()[:_SUFFIX_DIGITS]}"
        number += 1
        if name not in used:
            used.add(name)
            found.append(name)
    return found


def created(view: "PoolView", fleet: "Fleet", count: int) -> Iterator[Create]:
    """`count` more instances: their pods, or their leaders."""
    pool, settings = view.pool, view.settings
    taken = view.taken.union(pod.set_name or pod.instance or pod.name for pod in view.pods)
    cells: list[int | None] = [None] * count
    if pool.spec.colocation is not None:
        # Old ones of the same revision fill their cells, and so their nodes, as well.
        same = (pod for pod in fleet.all if pod.revision == pool.spec.revision)
        there = [pod.cell for pod in same if pod.cell is not None]
        cells = list(free_cells(there, pool.spec.colocation.per_cell, count))
    as_sets = pool.spec.nodes > 1 and settings.has_sets and is_set_possible(pool)
    make = _set if as_sets else _leader
    for name, cell in zip(names(pool, taken, count), cells, strict=True):
        yield Create(wanted.owned(make(view, name, cell), pool))


def completed(view: "PoolView", instances: Iterable[ObservedPod]) -> Iterator[Create]:
    """The further pods of instances whose leaders have been made and have an identity now."""
    pool = view.pool
    if pool.spec.nodes == 1:
        return
    there = {pod.name for pod in view.pods}
    for instance in instances:
        if instance.set_name or instance.template != view.template:
            continue
        leader = _leader(view, instance.name, instance.cell)
        leader["metadata"]["uid"] = instance.uid
        settings = view.settings
        for follower in follower_pods(
            pool, leader, device=settings.device, image_prefix=settings.image_prefix
        ):
            if follower["metadata"]["name"] not in there:
                yield Create(wanted.with_template(follower, view.template))


def _set(view: "PoolView", name: str, cell: int | None) -> Manifest:
    """A whole instance; its pods carry what they were made from."""
    settings = view.settings
    manifest = leader_worker_set(
        view.pool, name, device=settings.device, cell=cell, image_prefix=settings.image_prefix
    )
    group = manifest["spec"]["leaderWorkerTemplate"]
    for part in ("leaderTemplate", "workerTemplate"):
        group[part] = wanted.with_template(group[part], view.template)
    return manifest


def _leader(view: "PoolView", name: str, cell: int | None) -> Manifest:
    settings = view.settings
    manifest = worker_pod(
        view.pool, name, device=settings.device, cell=cell, image_prefix=settings.image_prefix
    )
    return wanted.with_template(manifest, view.template)
