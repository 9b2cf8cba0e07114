"""Instances that are spread over nodes: a leader, which has the agent, and its followers. Pure.

Called by the controller for pools with `nodes` above one. vLLM runs them without Ray: every pod
starts its share of the ranks, and they meet at the leader's address. What is hard: an instance is
all or nothing. Where LeaderWorkerSet is installed, it makes and replaces the group as a whole;
otherwise the followers are the leader's own objects, so that they go when it goes.
"""

from cleave.api.pool import InstancePool
from cleave.pods.labels import (
    AGENT_PORT,
    CELL,
    FOLLOWER,
    SEGMENT,
    WORKER,
    Manifest,
    worker_labels,
    workers_name,
)
from cleave.pods.resources import Device
from cleave.pods.scheduling import segment
from cleave.pods.worker import (
    container,
    engine_args,
    engine_flags,
    environment,
    multi_node_args,
    worker_pod,
    worker_spec,
)

LEADER_ENV = "CLEAVE_LEADER"
"""Environment variable of followers: host name of the pod that they belong to."""

_LWS_LEADER = "$(LWS_LEADER_ADDRESS)"
_LWS_RANK = "$(LWS_WORKER_INDEX)"


def follower_pods(
    pool: InstancePool,
    leader: Manifest,
    *,
    device: Device = "gpu",
    image_prefix: str = "",
) -> list[Manifest]:
    """The other pods of the instance that `leader` is (a worker's pod), by rank from 1.

    They belong to it once it has a uid: Kubernetes deletes them after it.
    """
    meta = leader["metadata"]
    host = f"{meta['name']}.{workers_name(pool.spec.deployment)}.{pool.namespace}.svc"
    pods = []
    for rank in range(1, pool.spec.nodes):
        labels = _labels(pool, meta["name"], meta["labels"].get(CELL), rank)
        pods.append(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": f"{meta['name']}-{rank}",
                    "namespace": pool.namespace,
                    "labels": labels,
                    **_owner(meta),
                },
                "spec": {
                    **_follower_spec(pool, labels, device, image_prefix, str(rank), host),
                    # It cannot join an engine that runs: the instance is replaced as a whole.
                    "restartPolicy": "Never",
                },
            }
        )
    return pods


def leader_worker_set(
    pool: InstancePool,
    name: str,
    *,
    device: Device = "gpu",
    cell: int | None = None,
    image_prefix: str = "",
) -> Manifest:
    """One instance as a LeaderWorkerSet of one group; its leader's pod is `name`-0."""
    leader = worker_pod(pool, f"{name}-0", device=device, cell=cell, image_prefix=image_prefix)
    labels = leader["metadata"]["labels"]
    # The set gives its pods host names of its own.
    spec = {k: v for k, v in leader["spec"].items() if k not in ("hostname", "subdomain")}
    of_cell = None if cell is None else str(cell)
    following = _labels(pool, f"{name}-0", of_cell, rank=1)
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {
            "name": name,
            "namespace": pool.namespace,
            "labels": worker_labels(pool, f"{name}-0", WORKER),
        },
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": pool.spec.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": {"metadata": {"labels": labels}, "spec": spec},
                "workerTemplate": {
                    "metadata": {"labels": following},
                    "spec": _follower_spec(
                        pool, following, device, image_prefix, _LWS_RANK, _LWS_LEADER
                    ),
                },
            },
        },
    }


def is_set_possible(pool: InstancePool) -> bool:
    """Whether a LeaderWorkerSet can say where the pods of the pool's instances have to be.

    Its followers are alike, so those of different stages cannot be sent to different cells.
    """
    spec = pool.spec
    return spec.colocation is None or segment(pool, 0, rank=0) == segment(pool, 0, rank=1)


def command(pool: InstancePool, rank: str) -> list[str]:
    """Command line of a follower; what stands behind `--` goes to its share of the engine."""
    spec = pool.spec
    line = ["python", "-m", "cleave_worker.agent.follower"]
    line += ["--leader", f"$({LEADER_ENV}):{AGENT_PORT}", *engine_flags(spec)]
    shared = multi_node_args(spec, rank, f"$({LEADER_ENV})")
    line += ["--host", "$(POD_IP)", "--drain-timeout", str(spec.template.drain_timeout_s)]
    return [*line, "--", *shared, *engine_args(spec)]


def _follower_spec(
    pool: InstancePool,
    labels: dict[str, str],
    device: Device,
    image_prefix: str,
    rank: str,
    leader: str,
) -> Manifest:
    return {
        **worker_spec(pool, labels, device),
        "containers": [
            {
                **container(pool.spec, device, image_prefix),
                "command": command(pool, rank),
                "env": [{"name": LEADER_ENV, "value": leader}, *environment(pool)],
            }
        ],
    }


def _labels(pool: InstancePool, instance: str, cell: str | None, rank: int) -> dict[str, str]:
    labels = worker_labels(pool, instance, FOLLOWER)
    if cell is not None:
        labels |= {CELL: cell, SEGMENT: segment(pool, int(cell), rank)}
    return labels


def _owner(leader: Manifest) -> Manifest:
    if "uid" not in leader:
        return {}
    link = {"apiVersion": "v1", "kind": "Pod", "name": leader["name"], "uid": leader["uid"]}
    return {"ownerReferences": [link]}
