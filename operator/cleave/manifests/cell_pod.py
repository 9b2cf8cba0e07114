"""A cell in one pod: several agents and their engines in one container. Pure.

Called by the controller for pools with `members`. Kubernetes gives GPUs to containers, and CUDA IPC
needs a shared PID namespace and all device files: so the engines of a cell share one container,
which `cleave_worker.agent.cell` starts, each with GPUs of its own.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator

from cleave.api.pool import InstancePool
from cleave.manifests.container import build_flags
from cleave.manifests.labels import (
    AGENT_PORT,
    CELL_HEALTH_PORT,
    Manifest,
    get_agent_port_name,
)
from cleave.manifests.resources import Device, build_resources, build_scratch_sizes, sum_resources
from cleave.manifests.storage import limit_scratch
from cleave.manifests.worker import build_agent_command, build_worker_pod

_AGENT_PREFIX = ["python", "-m", "cleave_worker.agent.main"]


def build_cell_pod(
    pool: InstancePool, name: str, *, device: Device = "gpu", image_prefix: str = ""
) -> Manifest:
    """Pod of one cell of a pool with `members`, for nodes that compute on `device`."""
    pod = build_worker_pod(pool, name, device=device, image_prefix=image_prefix)
    (container,) = pod["spec"]["containers"]
    engines = list(_list_engines(pool))
    agents = [
        build_agent_command(
            engine, instance, name, device, role=engine.spec.role, port=_get_agent_port(number)
        )[len(_AGENT_PREFIX) :]
        for number, (instance, engine) in enumerate(_name_engines(engines, name))
    ]
    flags = build_flags({"--host": "$(POD_IP)", "--port": CELL_HEALTH_PORT})
    command = ["python", "-m", "cleave_worker.agent.cell", *flags]
    container["command"] = [*command, *map(json.dumps, agents)]
    container["ports"] = [port for number in range(len(agents)) for port in _build_ports(number)]
    container["resources"] = sum_resources([build_resources(e.spec, device) for e in engines])
    sizes = build_scratch_sizes([engine.spec for engine in engines], device)
    pod["spec"]["volumes"] = limit_scratch(pod["spec"]["volumes"], sizes)
    for probe in ("readinessProbe", "livenessProbe"):
        container[probe]["grpc"]["port"] = CELL_HEALTH_PORT
    return pod


def _list_engines(pool: InstancePool) -> Iterator[InstancePool]:
    """For each engine of a cell the pool that it would be an instance of, if it had a pod."""
    spec = pool.spec
    for member in spec.members:
        engine = spec.engine.model_copy(update={"args": [*member.args, *spec.engine.args]})
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


def _get_agent_port(number: int) -> int:
    return AGENT_PORT + 2 * number


def _build_ports(number: int) -> list[Manifest]:
    agent, port = get_agent_port_name(number), _get_agent_port(number)
    engine = agent.replace("agent", "engine")
    return [{"name": agent, "containerPort": port}, {"name": engine, "containerPort": port + 1}]
