"""Several agents and their engines in one pod and one container: a cell, or the data-parallel ranks
of one instance. Pure.

Called by the controller and `cleave.local`. Kubernetes gives GPUs to containers, and CUDA IPC needs
a shared PID namespace and all device files: so these engines share one container, which
`cleave_worker.agent.cell` starts, each with GPUs of its own.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from cleave.api.pool import InstancePool, InstancePoolSpec
from cleave.manifests.container import OWN_IMAGES, Images, build_flags
from cleave.manifests.labels import (
    CELL_HEALTH_PORT,
    Manifest,
    get_agent_port,
    get_agent_port_name,
)
from cleave.manifests.resources import Device, build_resources, build_scratch_sizes, sum_resources
from cleave.manifests.storage import limit_scratch
from cleave.manifests.worker import build_agent_command, build_worker_pod

_AGENT_PREFIX = ["python", "-m", "cleave_worker.agent.main"]


def has_several_engines(spec: InstancePoolSpec) -> bool:
    """Whether an instance of the pool has several engines."""
    return bool(spec.members) or spec.parallelism.data > 1


def build_cell_pod(
    pool: InstancePool,
    name: str | int,
    *,
    device: Device = "gpu",
    images: Images = OWN_IMAGES,
    number: int = 0,
    leader: str = "",
) -> Manifest:
    """Pod of one cell, or of data-parallel ranks of an instance, for nodes that compute on
    `device`. `name` may be the instance's number instead, from 0. Of an instance that spans nodes:
    `number` of the pod, and where further pods reach the launcher of the first, as host:port."""
    name = name if isinstance(name, str) else f"{pool.name}-{name}"
    pod = build_worker_pod(pool, name, device=device, images=images)
    (container,) = pod["spec"]["containers"]
    if pool.spec.members:
        engines = list(_list_engines(pool))
        commands = _build_cell_agents(engines, name, device)
    else:
        engines = _list_ranks(pool)
        commands = _build_rank_agents(pool, engines, name, number * len(engines), device)
    agents = [command[len(_AGENT_PREFIX) :] for command in commands]
    flags = build_flags({"--host": "$(POD_IP)", "--port": CELL_HEALTH_PORT, "--leader": leader})
    command = ["python", "-m", "cleave_worker.agent.cell", *flags]
    container["command"] = [*command, *map(json.dumps, agents)]
    container["ports"] = [port for number in range(len(agents)) for port in _build_ports(number)]
    # Claims are the pod's: they have the GPUs of all engines.
    claims = {k: v for k, v in container["resources"].items() if k == "claims"}
    parts = [build_resources(engine.spec, device) for engine in engines]
    container["resources"] = sum_resources(parts) | claims
    sizes = build_scratch_sizes([engine.spec for engine in engines], device)
    pod["spec"]["volumes"] = limit_scratch(pod["spec"]["volumes"], sizes)
    for probe in ("readinessProbe", "livenessProbe"):
        container[probe]["grpc"]["port"] = CELL_HEALTH_PORT
    return pod


def _build_cell_agents(
    engines: Iterable[InstancePool], pod: str, device: Device
) -> Iterator[list[str]]:
    for number, (name, engine) in enumerate(_name_engines(engines, pod)):
        role, port = engine.spec.role, get_agent_port(number)
        yield build_agent_command(engine, name, pod, device, role=role, port=port)


def _build_rank_agents(
    pool: InstancePool, engines: Sequence[InstancePool], instance: str, first: int, device: Device
) -> Iterator[list[str]]:
    """Commands of the agents of a pod's ranks, from rank `first` on, whose instances are named
    `INSTANCE.rank-NUMBER` in all pods of an instance."""
    for number, engine in enumerate(engines):
        rank = first + number
        yield build_agent_command(
            engine,
            f"{instance}.rank-{rank}",
            device=device,
            port=get_agent_port(number),
            data_parallel=(pool.spec.parallelism.data, rank),
        )


def _list_ranks(pool: InstancePool) -> list[InstancePool]:
    """For each data-parallel rank of a pod the pool that it would be an instance of, if it had a
    pod."""
    spec = pool.spec
    own = {"parallelism": spec.parallelism.model_copy(update={"data": 1}), "nodes": 1}
    return [pool.model_copy(update={"spec": spec.model_copy(update=own)})] * spec.ranks_per_pod


def _list_engines(pool: InstancePool) -> Iterator[InstancePool]:
    """For each engine of a cell the pool that it would be an instance of, if it had a pod."""
    spec = pool.spec
    for member in spec.members:
        engine = spec.engine.model_copy(update={"args": [*spec.engine.args, *member.args]})
        own = {"role": member.role, "parallelism": member.parallelism, "engine": engine}
        same = pool.model_copy(update={"spec": spec.model_copy(update={**own, "members": []})})
        yield from [same] * member.replicas


def _name_engines(engines: Iterable[InstancePool], pod: str) -> Iterator[tuple[str, InstancePool]]:
    """Name the instances of a pod `POD.ROLE-NUMBER`, which the gateways' reports are grouped by."""
    counts: Counter[str] = Counter()
    for engine in engines:
        role = str(engine.spec.role)
        yield f"{pod}.{role}-{counts[role]}", engine
        counts[role] += 1


def _build_ports(number: int) -> list[Manifest]:
    agent, port = get_agent_port_name(number), get_agent_port(number)
    engine = agent.replace("agent", "engine")
    return [{"name": agent, "containerPort": port}, {"name": engine, "containerPort": port + 1}]
