"""Instances that span several nodes: a leader pod and further pods. Pure.

Called by the controller for pools with `nodes` above one. vLLM runs them without Ray: every pod
starts its share of the ranks, which connect to the leader's address. The leader's pod has the agent
of an engine that spans nodes; data-parallel ranks, which are engines, have one each. An instance
needs all its pods. Where LeaderWorkerSet is installed, it creates and replaces the group; otherwise
the further pods are owned by the leader's pod, and are deleted with it.
"""

from cleave.api.pool import InstancePool
from cleave.manifests import worker
from cleave.manifests.cell_pod import build_cell_pod
from cleave.manifests.container import OWN_IMAGES, Images, build_flags
from cleave.manifests.labels import (
    AGENT_PORT,
    CELL,
    CELL_HEALTH_PORT,
    NODE_RANK,
    NODE_WORKER,
    SEGMENT,
    Manifest,
    build_object,
    build_worker_labels,
    get_workers_name,
)
from cleave.manifests.resources import Device
from cleave.manifests.scheduling import build_segment

LEADER_ENV = "CLEAVE_LEADER"
"""Environment variable of the further pods: host name of the leader's pod."""

_LWS_LEADER = "$(LWS_LEADER_ADDRESS)"
_LWS_RANK = "$(LWS_WORKER_INDEX)"


def build_node_pods(
    pool: InstancePool, leader: Manifest, *, device: Device = "gpu", images: Images = OWN_IMAGES
) -> list[Manifest]:
    """The further pods of an instance, by rank from 1; `leader` owns them if it has a uid."""
    meta = leader["metadata"]
    cell = meta["labels"].get(CELL)
    host = f"{meta['name']}.{get_workers_name(pool.spec.deployment)}.{pool.namespace}.svc"
    node_pods = []
    for rank in range(1, pool.spec.nodes):
        name = f"{meta['name']}-{rank}"
        if pool.spec.parallelism.data > 1:
            labels = build_worker_labels(pool, meta["name"]) | {NODE_RANK: str(rank)}
            spec = _build_rank_pod_spec(pool, meta["name"], device, images, rank, host)
        else:
            labels = _build_labels(pool, meta["name"], cell, rank)
            spec = _build_node_spec(pool, labels, device, images, str(rank), host)
            # A restarted pod cannot join a running engine: the whole instance is replaced.
            spec["restartPolicy"] = "Never"
        node_pod = build_object("v1", "Pod", name, pool.namespace, labels, spec=spec)
        worker.with_annotations(node_pod, pool.spec.template)
        if "uid" in meta:
            link = {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
            node_pod["metadata"]["ownerReferences"] = [link]
        node_pods.append(node_pod)
    return node_pods


def build_leader_worker_set(
    pool: InstancePool,
    name: str,
    *,
    device: Device = "gpu",
    cell: int | None = None,
    images: Images = OWN_IMAGES,
) -> Manifest:
    """One instance as a LeaderWorkerSet with one group; its leader's pod is `name`-0."""
    leader = f"{name}-0"
    pod = worker.build_worker_pod(pool, leader, device=device, cell=cell, images=images)
    # LeaderWorkerSet sets the host names of its pods itself.
    leader_spec = {k: v for k, v in pod["spec"].items() if k not in ("hostname", "subdomain")}
    node_labels = _build_labels(pool, leader, None if cell is None else str(cell), rank=1)
    node_spec = _build_node_spec(pool, node_labels, device, images, _LWS_RANK, _LWS_LEADER)
    template = pool.spec.template
    group = {
        "size": pool.spec.nodes,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": worker.with_annotations(
            {"metadata": {"labels": pod["metadata"]["labels"]}, "spec": leader_spec}, template
        ),
        "workerTemplate": worker.with_annotations(
            {"metadata": {"labels": node_labels}, "spec": node_spec}, template
        ),
    }
    spec = {"replicas": 1, "startupPolicy": "LeaderCreated", "leaderWorkerTemplate": group}
    labels, version = build_worker_labels(pool, leader), "leaderworkerset.x-k8s.io/v1"
    return build_object(version, "LeaderWorkerSet", name, pool.namespace, labels, spec=spec)


def supports_leader_worker_set(pool: InstancePool) -> bool:
    """Whether a LeaderWorkerSet can express where the pods of the pool's instances run.

    Its worker pods share one template, so pods of different stages cannot be placed in different
    cells, and data-parallel ranks cannot have names and ports of their own.
    """
    if pool.spec.parallelism.data > 1:
        return False
    first, second = (build_segment(pool, 0, rank) for rank in (0, 1))
    return pool.spec.colocation is None or first == second


def build_node_command(pool: InstancePool, rank: str) -> list[str]:
    """Command line of a further pod; arguments after `--` go to its share of the engine."""
    flags = {
        "--leader": f"$({LEADER_ENV}):{AGENT_PORT}",
        **worker.build_engine_flags(pool.spec),
        "--host": "$(POD_IP)",
        "--drain-timeout": pool.spec.template.drain_timeout_s,
    }
    extra = worker.build_engine_args(pool.spec, rank, f"$({LEADER_ENV})")
    return ["python", "-m", "cleave_worker.agent.worker_node", *build_flags(flags), "--", *extra]


def _build_node_spec(
    pool: InstancePool,
    labels: dict[str, str],
    device: Device,
    images: Images,
    rank: str,
    leader: str,
) -> Manifest:
    container = {
        **worker.build_container_base(pool.spec, device, images),
        "command": build_node_command(pool, rank),
        "env": [{"name": LEADER_ENV, "value": leader}, *worker.build_environment(pool, device)],
    }
    return {**worker.build_worker_spec(pool, labels, device), "containers": [container]}


def _build_rank_pod_spec(
    pool: InstancePool, instance: str, device: Device, images: Images, number: int, leader: str
) -> Manifest:
    """Spec of a pod with further data-parallel ranks; `leader`: host name of the first pod. Their
    containers may start again: no engine runs without them."""
    spec: Manifest = build_cell_pod(
        pool,
        instance,
        device=device,
        images=images,
        number=number,
        leader=f"$({LEADER_ENV}):{CELL_HEALTH_PORT}",
    )["spec"]
    (container,) = spec["containers"]
    container["env"] = [{"name": LEADER_ENV, "value": leader}, *container["env"]]
    # The host name is the leader's.
    return {k: v for k, v in spec.items() if k not in ("hostname", "subdomain")}


def _build_labels(pool: InstancePool, instance: str, cell: str | None, rank: int) -> dict[str, str]:
    labels = build_worker_labels(pool, instance, NODE_WORKER)
    if cell is not None:
        labels |= {CELL: cell, SEGMENT: build_segment(pool, int(cell), rank)}
    return labels
