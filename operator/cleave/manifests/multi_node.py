"""Instances that span several nodes: a leader pod, which has the agent, and further pods. Pure.

Called by the controller for pools with `nodes` above one. vLLM runs them without Ray: every pod
starts its share of the ranks, which connect to the leader's address. An instance needs all its
pods. Where LeaderWorkerSet is installed, it creates and replaces the group; otherwise the further
pods are owned by the leader's pod, and are deleted with it.
"""

from cleave.api.pool import InstancePool
from cleave.manifests.labels import (
    AGENT_PORT,
    CELL,
    NODE_WORKER,
    SEGMENT,
    WORKER,
    Manifest,
    build_worker_labels,
    get_workers_name,
)
from cleave.manifests.resources import Device
from cleave.manifests.scheduling import build_segment
from cleave.manifests.worker import (
    build_container_base,
    build_engine_args,
    build_engine_flags,
    build_environment,
    build_multi_node_args,
    build_worker_pod,
    build_worker_spec,
)

LEADER_ENV = "CLEAVE_LEADER"
"""Environment variable of the further pods: host name of the leader's pod."""

_LWS_LEADER = "$(LWS_LEADER_ADDRESS)"
_LWS_RANK = "$(LWS_WORKER_INDEX)"


def build_node_pods(
    pool: InstancePool,
    leader: Manifest,
    *,
    device: Device = "gpu",
    image_prefix: str = "",
) -> list[Manifest]:
    """The further pods of the instance of the pod `leader`, by rank from 1.

    With the leader's uid they are owned by it: Kubernetes deletes them after it.
    """
    meta = leader["metadata"]
    host = f"{meta['name']}.{get_workers_name(pool.spec.deployment)}.{pool.namespace}.svc"
    node_pods = []
    for rank in range(1, pool.spec.nodes):
        labels = _build_labels(pool, meta["name"], meta["labels"].get(CELL), rank)
        node_pods.append(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": f"{meta['name']}-{rank}",
                    "namespace": pool.namespace,
                    "labels": labels,
                    **_build_owner(meta),
                },
                "spec": {
                    **_build_node_spec(pool, labels, device, image_prefix, str(rank), host),
                    # A restarted pod cannot join a running engine: the whole instance is replaced.
                    "restartPolicy": "Never",
                },
            }
        )
    return node_pods


def build_leader_worker_set(
    pool: InstancePool,
    name: str,
    *,
    device: Device = "gpu",
    cell: int | None = None,
    image_prefix: str = "",
) -> Manifest:
    """One instance as a LeaderWorkerSet with one group; its leader's pod is `name`-0."""
    leader = build_worker_pod(
        pool, f"{name}-0", device=device, cell=cell, image_prefix=image_prefix
    )
    labels = leader["metadata"]["labels"]
    # LeaderWorkerSet sets the host names of its pods itself.
    spec = {k: v for k, v in leader["spec"].items() if k not in ("hostname", "subdomain")}
    cell_label = None if cell is None else str(cell)
    node_labels = _build_labels(pool, f"{name}-0", cell_label, rank=1)
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {
            "name": name,
            "namespace": pool.namespace,
            "labels": build_worker_labels(pool, f"{name}-0", WORKER),
        },
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": pool.spec.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": {"metadata": {"labels": labels}, "spec": spec},
                "workerTemplate": {
                    "metadata": {"labels": node_labels},
                    "spec": _build_node_spec(
                        pool, node_labels, device, image_prefix, _LWS_RANK, _LWS_LEADER
                    ),
                },
            },
        },
    }


def supports_leader_worker_set(pool: InstancePool) -> bool:
    """Whether a LeaderWorkerSet can express where the pods of the pool's instances run.

    Its worker pods share one template, so pods of different stages cannot be placed in different
    cells.
    """
    spec = pool.spec
    return spec.colocation is None or build_segment(pool, 0, rank=0) == build_segment(
        pool, 0, rank=1
    )


def build_node_command(pool: InstancePool, rank: str) -> list[str]:
    """Command line of a further pod; arguments after `--` go to its share of the engine."""
    spec = pool.spec
    args = ["python", "-m", "cleave_worker.agent.worker_node"]
    args += ["--leader", f"$({LEADER_ENV}):{AGENT_PORT}", *build_engine_flags(spec)]
    shared = build_multi_node_args(spec, rank, f"$({LEADER_ENV})")
    args += ["--host", "$(POD_IP)", "--drain-timeout", str(spec.template.drain_timeout_s)]
    return [*args, "--", *shared, *build_engine_args(spec)]


def _build_node_spec(
    pool: InstancePool,
    labels: dict[str, str],
    device: Device,
    image_prefix: str,
    rank: str,
    leader: str,
) -> Manifest:
    return {
        **build_worker_spec(pool, labels, device),
        "containers": [
            {
                **build_container_base(pool.spec, device, image_prefix),
                "command": build_node_command(pool, rank),
                "env": [{"name": LEADER_ENV, "value": leader}, *build_environment(pool)],
            }
        ],
    }


def _build_labels(pool: InstancePool, instance: str, cell: str | None, rank: int) -> dict[str, str]:
    labels = build_worker_labels(pool, instance, NODE_WORKER)
    if cell is not None:
        labels |= {CELL: cell, SEGMENT: build_segment(pool, int(cell), rank)}
    return labels


def _build_owner(leader: Manifest) -> Manifest:
    if "uid" not in leader:
        return {}
    link = {"apiVersion": "v1", "kind": "Pod", "name": leader["name"], "uid": leader["uid"]}
    return {"ownerReferences": [link]}
