"""CPU, memory and devices of a worker container. Pure; called by the worker's pod builder.

Kubernetes gives a container exclusive cores (static CPU manager policy) only when its CPU request
is a whole number and equal to its limit, so defaults and overrides are merged per resource. On GPUs
there is no CPU limit: vLLM's processes and NIXL's progress thread poll, and with a limit below the
number of polling threads the kernel stops all of them for the rest of each 100 ms.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from cleave.api.engine import EngineType
from cleave.api.model import ModelSpec
from cleave.api.pods.quantity import format_quantity, parse_quantity
from cleave.api.pods.worker_template import Resources, WorkerTemplate
from cleave.api.pool import InstancePoolSpec
from cleave.manifests.labels import GPU, Manifest
from cleave.manifests.storage import is_downloaded
from cleave.perf.model import model_source
from cleave.perf.model.model_shape import UnknownModelError

Device = Literal["gpu", "cpu"]
"""What the nodes compute on."""

GPU_REQUESTS = f"requests.{GPU}"
"""Their name in a ResourceQuota."""
_SHARED_RDMA = "rdma/"
"""Prefix of k8s-rdma-shared-dev-plugin's resources: each unit opens the same cards."""
_HOST_DEVICE = "nvidia.com/hostdev"
"""Whole cards, one per unit, as NVIDIA's Network Operator names them."""
_NETWORKS = "k8s.v1.cni.cncf.io/networks"
"""Annotation of pods: Multus moves a whole card into the pods of these networks only."""

_CORES = 4
"""vCPUs for vLLM's API server, its engine core, what they start, and the agent."""
_CORES_PER_GPU = 3
"""vCPUs for each GPU: its worker process and NIXL's progress thread, which both poll, and threads
that load weights and transfer KV. vLLM asks for 2 + GPUs physical cores, of two vCPUs each."""
_BASE_GIB = 8
_GIB_PER_GPU = 8
"""Host memory for vLLM's processes, pinned buffers and shared memory."""
_SCRATCH_GIB = 10
"""Disk space for compiled kernels, logs and temporary files."""
_GIB = 2**30
_DOWNLOAD_SLACK = 1.25
"""Disk space of a download in relation to the weights that are loaded."""
_CPU_KV_GIB = 1
"""VLLM_CPU_KVCACHE_SPACE as the agent sets it, in GiB for each rank."""
_MESSAGES_GIB = 1
"""Shared memory for messages between an engine's processes, for each rank."""
_EMULATED_SCRATCH_MIB = 128
_DISK = "ephemeral-storage"


def build_resources(spec: InstancePoolSpec, device: Device) -> Manifest:
    """The container's `resources`: defaults for engine and device, with the pool's overrides."""
    merged = _merge(_build_defaults(spec, device), spec.template.resources)
    claims = [{"name": claim.name} for claim in spec.template.resource_claims]
    return {**merged, **({"claims": claims} if claims else {})}


def build_scratch_sizes(specs: Sequence[InstancePoolSpec], device: Device) -> dict[str, str]:
    """Limits of the empty directories of a pod with these engines, by volume; without them one pod
    could fill its node's disk. `home` has none where the size of a downloaded model is unknown,
    and at least the disk that a template asks for: draft models and adapters may be downloaded."""
    if all(spec.engine.type is EngineType.EMULATED for spec in specs):
        return dict.fromkeys(("tmp", "home", "shm"), f"{_EMULATED_SCRATCH_MIB}Mi")
    shm_gib = sum(_compute_shm_gib(spec, device) for spec in specs)
    sizes = {"tmp": f"{_SCRATCH_GIB * len(specs)}Gi", "shm": f"{shm_gib}Gi"}
    # The engines of one pod serve the same model.
    model = specs[0].model
    weights = find_weight_bytes(model) if is_downloaded(model) else 0
    if weights is not None:
        home_gib = _SCRATCH_GIB + math.ceil(_DOWNLOAD_SLACK * weights / _GIB)
        template_gib = sum(map(_find_template_disk_gib, specs))
        sizes["home"] = f"{max(home_gib, template_gib)}Gi"
    return sizes


def _find_template_disk_gib(spec: InstancePoolSpec) -> int:
    """The larger of the template's request and limit of disk; 0: it has neither."""
    resources = spec.template.resources
    amounts = [each.get(_DISK, 0) for each in (resources.requests, resources.limits)]
    return math.ceil(max(map(parse_quantity, amounts)) / _GIB)


def _count_offloading_gib(spec: InstancePoolSpec) -> int:
    """Copies of KV in the memory of one node: each data-parallel rank has an engine of its own."""
    return (spec.engine.kv_offloading_gib or 0) * max(1, spec.parallelism.data // spec.nodes)


def _compute_shm_gib(spec: InstancePoolSpec, device: Device) -> int:
    """Shared memory of an engine's processes on one node; on CPU it holds the KV cache."""
    ranks = spec.parallelism.gpus // spec.nodes
    if device == "gpu":
        return _GIB_PER_GPU * ranks + _count_offloading_gib(spec)
    spaces = [each.value for each in spec.engine.env if each.name == "VLLM_CPU_KVCACHE_SPACE"]
    kv_gib = int(spaces[-1]) if spaces and spaces[-1].isdigit() else _CPU_KV_GIB
    return (kv_gib + _MESSAGES_GIB) * ranks


def find_rdma_device(allocatable: Mapping[str, str], num_gpus: int) -> str:
    """The first RDMA device of a node by name; empty: none that suffices for all its GPUs.

    Pods that require one could otherwise not use all GPUs. AWS's `vpc.amazonaws.com/efa` is not
    among them: the UCX of NIXL's wheel does not drive those cards.
    """
    devices = sorted(filter(is_rdma_device, allocatable))
    least = max(1, num_gpus)
    return next((name for name in devices if parse_quantity(allocatable[name]) >= least), "")


def has_rdma_devices(status: Manifest, num_gpus: int) -> bool:
    """Whether a node with this status has RDMA devices for all its GPUs, also while their plug-in
    is away: the kubelet then reports 0, first as allocatable and later as capacity."""
    amounts = [status.get(field, {}) for field in ("capacity", "allocatable")]
    counts = {
        name: max(parse_quantity(each.get(name, 0)) for each in amounts)
        for name in filter(is_rdma_device, {*amounts[0], *amounts[1]})
    }
    return any(not count or count >= num_gpus for count in counts.values())


def has_whole_cards_only(status: Manifest) -> bool:
    """Whether the RDMA devices of a node with this status are all whole cards."""
    amounts = {**status.get("capacity", {}), **status.get("allocatable", {})}
    devices = set(filter(is_rdma_device, amounts))
    return devices == {_HOST_DEVICE}


def needs_whole_cards(template: WorkerTemplate) -> bool:
    """Whether pods of this template request whole cards: it names their network, or them."""
    named = template.resources
    amount = named.limits.get(_HOST_DEVICE, named.requests.get(_HOST_DEVICE))
    return _NETWORKS in template.annotations if amount is None else parse_quantity(amount) > 0


def add_rdma_device(spec: InstancePoolSpec, name: str) -> InstancePoolSpec:
    """The spec of a pool on GPUs whose pods also request this RDMA device of their nodes.

    A device that the template names takes precedence; with the quantity 0 there is none. A whole
    card is requested only where the template names a network.
    """
    named = spec.template.resources
    if (
        not name
        or (name == _HOST_DEVICE and _NETWORKS not in spec.template.annotations)
        or spec.engine.type is EngineType.EMULATED
        or any(map(is_rdma_device, (*named.limits, *named.requests)))
    ):
        return spec
    units = 1 if name.startswith(_SHARED_RDMA) else spec.gpus // spec.nodes
    more = named.model_copy(update={"limits": {**named.limits, name: str(units)}})
    return spec.model_copy(
        update={"template": spec.template.model_copy(update={"resources": more})}
    )


def is_rdma_device(name: str) -> bool:
    """Whether a resource is a network card for RDMA."""
    return name.startswith(_SHARED_RDMA) or name == _HOST_DEVICE


def count_pod_gpus(spec: InstancePoolSpec, device: Device) -> int:
    """GPUs (nvidia.com/gpu) that one pod of the pool requests; 0: none, or devices of another
    name."""
    named = spec.template.resources
    amount = named.limits.get(GPU, named.requests.get(GPU))
    if amount is not None:
        # Each engine of a cell, and each data-parallel rank, has the template's resources.
        engines = sum(member.replicas for member in spec.members) or spec.ranks_per_pod
        return engines * int(parse_quantity(amount))
    has_own = spec.engine.type is EngineType.EMULATED or spec.template.gpu_resource != GPU
    return 0 if has_own or device != "gpu" else spec.gpus // spec.nodes


def sum_resources(parts: Sequence[Manifest]) -> Manifest:
    """The resources of a container that does the work of several; disk and RDMA are shared."""
    kinds = [kind for kind in ("requests", "limits") if any(kind in part for part in parts)]
    return {kind: _sum_amounts([part.get(kind, {}) for part in parts]) for kind in kinds}


def _sum_amounts(parts: Sequence[Manifest]) -> Manifest:
    names = dict.fromkeys(name for part in parts for name in part)
    amounts = {name: [parse_quantity(part.get(name, 0)) for part in parts] for name in names}
    return {
        name: format_quantity(max(each) if _is_shared(name) else sum(each))
        for name, each in amounts.items()
    }


def _is_shared(name: str) -> bool:
    """Whether the engines of one container use the same: the model's files, RDMA devices."""
    return name == _DISK or is_rdma_device(name)


def find_weight_bytes(model: ModelSpec) -> int | None:
    """Bytes of a known model's weights; None: not known, as the operator reads no folder."""
    try:
        return model_source.load_known_shape(model).weight_bytes
    except UnknownModelError:
        return None


def _build_defaults(spec: InstancePoolSpec, device: Device) -> Resources:
    size = spec.parallelism.gpus
    if spec.engine.type is EngineType.EMULATED:
        least = {"cpu": "20m", "memory": "128Mi", _DISK: f"{_EMULATED_SCRATCH_MIB}Mi"}
        return Resources(requests=least, limits={"memory": "512Mi"})
    weights_gib = -(-(find_weight_bytes(spec.model) or 0) // _GIB)
    disk_gib = _SCRATCH_GIB + (weights_gib if is_downloaded(spec.model) else 0)
    if device == "cpu":
        limits = {"cpu": str(size), "memory": f"{6 * size}Gi"}
        return Resources(requests={_DISK: f"{disk_gib}Gi"}, limits=limits)
    gpus_per_node = size // spec.nodes
    memory_gib = _BASE_GIB + _GIB_PER_GPU * gpus_per_node + _count_offloading_gib(spec)
    requests = {
        "cpu": str(_CORES + _CORES_PER_GPU * gpus_per_node),
        "memory": f"{memory_gib}Gi",
        _DISK: f"{disk_gib}Gi",
    }
    # While it loads, an engine may hold its node's share of the weights in memory as well.
    limits = {"memory": f"{memory_gib + -(-weights_gib // spec.nodes)}Gi"}
    if spec.template.gpu_resource:
        limits[spec.template.gpu_resource] = str(gpus_per_node)
    return Resources(requests=requests, limits=limits)


def _merge(defaults: Resources, overrides: Resources) -> Manifest:
    named = overrides.requests.keys() | overrides.limits.keys()
    limits = {k: v for k, v in defaults.limits.items() if k not in named} | overrides.limits
    requests = {k: v for k, v in defaults.requests.items() if k not in named} | overrides.requests
    # As in the API server, a limit without a request is also the request.
    return {"requests": limits | requests, "limits": limits}
