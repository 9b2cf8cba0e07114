"""Estimates instances of one model on the GPUs of a cluster, from the best available source.

Called by the planner. Sources: measured profiles of exactly this parallelism, measured profiles of
operators, published tables of kernels, the roofline; the one whose known error is lowest answers
(`Confidence.rank`). Pipeline stages are derived from the same tensor parallel size without them.
What is hard: sources name models and GPUs differently. Where data-parallel ranks or expert
parallelism share the experts, times come from kernels or the roofline.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cleave.api.cluster import Cluster
from cleave.api.manifest import ManifestError
from cleave.api.planning import GpuChoice
from cleave.perf import host_launch, known_errors, mixed_attention
from cleave.perf.estimate import Confidence, Estimate, LatencySource
from cleave.perf.hardware import inventory, memory
from cleave.perf.hardware.all_to_all import GpuGroup
from cleave.perf.hardware.expert_group import VLLM_EXPERTS, ExpertGroup, ExpertSettings
from cleave.perf.hardware.gpu import Gpu, UnknownGpuError, find_gpu
from cleave.perf.hardware.link import Link, build_host_link, build_node_link
from cleave.perf.kernels import composition, tables
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.pipeline import (
    compute_stages_price,
    find_prefill_saturation_tokens,
    scale_timing,
    split_into_stages,
)
from cleave.perf.profile import iteration_fit, operator_fit, profile
from cleave.perf.profile.codec import InvalidProfileError
from cleave.perf.profile.profile import MeasuredProfile
from cleave.perf.roofline.efficiency import select_efficiency
from cleave.perf.roofline.roofline import VLLM, Roofline
from cleave.perf.timing import EngineTiming

_FRONT_END = f"{VLLM.front_end_ms:g} ms of front end per request"


@dataclass(frozen=True, slots=True)
class NodeType:
    """One kind of GPU and how its nodes are built."""

    gpu: Gpu
    gpus_per_node: int
    network: Link
    """From one of its GPUs to another node."""
    nvlink_gpus: int = 0
    """GPUs that NVLink joins, if those are more than a node's."""

    def select_link(self, gpus: int) -> Link:
        """The slowest link within an instance of that many GPUs."""
        return build_node_link(self.gpu) if gpus <= self.gpus_per_node else self.network

    def build_group(self, gpus: int) -> GpuGroup:
        """So many GPUs, on as few nodes as possible."""
        joined = max(self.gpus_per_node, self.nvlink_gpus)
        return GpuGroup(gpus, joined, build_node_link(self.gpu), self.network)


@dataclass(frozen=True, slots=True)
class _TimingSource:
    """Iteration times from one source."""

    timing: EngineTiming
    confidence: Confidence
    front_end_ms: float = 0.0


class ModelEstimator:
    """Implements `cleave.perf.estimate.Estimator` for one model; estimates are cached."""

    def __init__(
        self,
        shape: ModelShape,
        machines: Mapping[str, NodeType],
        profiles: Sequence[MeasuredProfile] = (),
        reserve: memory.MemoryReserve = memory.VLLM_RESERVE,
        max_model_len: int | None = None,
        context_tokens: int | None = None,
        experts: ExpertSettings = VLLM_EXPERTS,
        least_context: int = 0,
    ) -> None:
        """`machines`: by GPU name; `max_model_len`: limit, at most the model's own is used;
        `least_context`: tokens of the longest request, for which an instance must have room;
        `context_tokens`: of a mean request, for caches that do not grow with it; None: the limit;
        `experts`: how engines exchange tokens for experts on several GPUs."""
        self.shape = shape
        self.machines = machines
        self._profiles = [each for each in profiles if _is_profile_of(each, shape)]
        self._reserve = reserve
        self._max_model_len = min(max_model_len or shape.max_model_len, shape.max_model_len)
        self._context_tokens = context_tokens or self._max_model_len
        self._experts = experts
        self._least_context = min(least_context, self._max_model_len)
        self._cache: dict[tuple[str, int, int, int, bool], Estimate | None] = {}
        self._unpipelined: dict[tuple[str, int], _TimingSource] = {}

    def estimate(
        self, gpu: str, tensor: int, pipeline: int, data: int = 1, *, expert: bool = False
    ) -> Estimate | None:
        """None: not supported, for the reason that `explain_unsupported` gives."""
        key = (gpu, tensor, pipeline, data, expert)
        if key not in self._cache:
            reason = self.explain_unsupported(gpu, tensor, pipeline, data, expert=expert)
            self._cache[key] = self._build_estimate(*key) if reason is None else None
        return self._cache[key]

    def explain_unsupported(
        self, gpu: str, tensor: int, pipeline: int, data: int = 1, *, expert: bool = False
    ) -> str | None:
        """Why `estimate` returns None, in one sentence; None: it returns an estimate."""
        machine = self.machines.get(gpu)
        if machine is None:
            return f"there is no {gpu}; there is {', '.join(self.machines) or 'no GPU at all'}"
        if tensor > machine.gpus_per_node:
            most = machine.gpus_per_node
            return f"{tensor} tensor parallel GPUs exceed the {most} of a node with {gpu}"
        if pipeline > 1 and (data > 1 or expert):
            return "pipeline stages are not predicted with data or expert parallelism"
        sizes = (tensor, pipeline)
        if (reason := self.shape.explain_unsupported(*sizes, data, expert=expert)) is not None:
            return f"{self.shape.name}: {reason}"
        if data == 1 and (room := self._find_measured_capacity(machine.gpu, *sizes)) is not None:
            return self._explain_short_room(room, gpu)
        return memory.explain_unsupported(
            *(self.shape, machine.gpu, *sizes, self._reserve, data),
            expert=expert,
            context_tokens=self._least_context,
        )

    def _explain_short_room(self, room: int, gpu: str) -> str | None:
        if room >= self._least_context:
            return None
        return (
            f"{self.shape.name} does not fit: {memory.NO_ROOM} {self._least_context:,} tokens, "
            f"and there was room for the KV of {room:,} as measured on {gpu}"
        )

    def _build_estimate(
        self, gpu: str, tensor: int, stages: int, data: int, expert: bool
    ) -> Estimate:
        machine = self.machines[gpu]
        if data > 1 or expert:
            source = self._build_group_source(machine, tensor, data, expert)
        else:
            source = self._select_source(machine, tensor, stages)
        timing = source.timing
        slowdown = machine.gpu.prompt_slowdown
        if slowdown != 1.0 and source.confidence.kind is not LatencySource.ROOFLINE:
            # The roofline's FLOPs include the power cap; measurements were made without one.
            timing = scale_timing(timing, prompt=slowdown)
        sizes = (machine.gpu, tensor, stages)
        capacity = room = self._find_measured_capacity(*sizes) if data == 1 else None
        if capacity is None or room is None:
            capacity = memory.compute_kv_capacity_tokens(
                self.shape, *sizes, self._reserve, self._context_tokens, data
            )
            room = memory.compute_max_context_tokens(self.shape, *sizes, self._reserve, data)
        gpus, longest = tensor * stages * data, self._max_model_len
        return Estimate(
            timing=timing,
            kv_capacity_tokens=capacity,
            prefill_saturation_tokens=find_prefill_saturation_tokens(timing, longest),
            max_model_len=min(longest, room),
            kv_bytes_per_token=self.shape.copied_bytes_per_token,
            flops_per_token=self.shape.flops_per_token,
            power_watts=machine.gpu.power_watts * gpus,
            cost_per_hour=machine.gpu.price_per_hour * gpus,
            confidence=source.confidence,
            front_end_ms=source.front_end_ms,
            peak_flops=self._compute_peak_flops(machine.gpu, gpus),
            host_token_ms=(
                self.shape.compute_copied_bytes_on_gpu(tensor)
                / stages
                / (build_host_link(machine.gpu).effective_gb_per_s * 1e6)
            ),
        )

    def _build_group_source(
        self, machine: NodeType, tensor: int, data: int, expert: bool
    ) -> _TimingSource:
        """One engine of `tensor` GPUs whose experts all GPUs of the instance share."""
        gpus = machine.build_group(tensor * data)
        group = ExpertGroup(data, expert, gpus, self._experts)
        found = _select_best(list(_iter_computed(self.shape, machine, tensor, group)))
        trust = found.confidence
        exchange = f"all-to-all by {self._experts.backend}, " if data > 1 and expert else ""
        uneven = f"busiest experts {group.imbalance:g} x the mean" if expert else "sliced experts"
        text = f"{trust.source}, {exchange}{uneven}"
        return replace(found, confidence=replace(trust, source=text, serving=None))

    def _compute_peak_flops(self, gpu: Gpu, gpus: int) -> float | None:
        """FLOP/s of that many GPUs without their power cap: MFU refers to the rated performance.
        None: the catalogue has no rate of 4 bits."""
        quantization = self.shape.quantization
        if quantization is not None and quantization.is_4_bit_compute:
            return None
        is_8_bit = quantization is not None and quantization.is_8_bit_compute
        return gpu.get_tflops(is_8_bit) * gpu.prompt_slowdown * 1e12 * gpus

    def _select_source(self, machine: NodeType, tensor: int, stages: int) -> _TimingSource:
        key = (machine.gpu.name, tensor)
        if key not in self._unpipelined:
            sources = list(self._iter_unpipelined_sources(machine, tensor))
            self._unpipelined[key] = _select_best(sources)
        whole = self._unpipelined[key]
        if stages == 1:
            return whole
        hop, price = machine.select_link(tensor * stages), compute_stages_price(stages)
        timing = split_into_stages(whole.timing, self.shape, stages, hop)
        timing = scale_timing(timing, prompt=price, decode=price)
        trust = replace(whole.confidence, error=None, serving=None, has_stages=True)
        derived = replace(whole, timing=timing, confidence=trust)
        return _select_best([*self._iter_measured(machine.gpu, tensor, stages), derived])

    def _iter_unpipelined_sources(self, machine: NodeType, tensor: int) -> Iterator[_TimingSource]:
        """Sources without pipeline stages."""
        yield from self._iter_measured(machine.gpu, tensor, 1)
        for each in self._list_profiles(machine.gpu):
            operators = each.operators
            if operators and tensor in operator_fit.list_tensor_parallel_sizes(operators):
                text = f"operators by {each.engine} on {each.device}, measured {each.measured_at}"
                has_mixed = any(p.tensor_parallel_size == tensor for p in operators.mixed_attention)
                errors = known_errors.MIXED_OPERATORS if has_mixed else known_errors.OPERATORS
                trust = Confidence(LatencySource.MEASURED, text, None, errors)
                yield _TimingSource(operator_fit.to_timing(operators, tensor), trust)
        yield from _iter_computed(self.shape, machine, tensor)

    def _iter_measured(self, gpu: Gpu, tensor: int, stages: int) -> Iterator[_TimingSource]:
        for each in self._list_profiles(gpu):
            if each.prefill and each.sizes == (tensor, stages):
                confidence = iteration_fit.assess_confidence(each)
                yield _TimingSource(iteration_fit.to_timing(each), confidence)

    def _list_profiles(self, gpu: Gpu) -> list[MeasuredProfile]:
        return [each for each in self._profiles if _is_same_gpu(each.device, gpu)]

    def _find_measured_capacity(self, gpu: Gpu, tensor: int, stages: int) -> int | None:
        for each in self._list_profiles(gpu):
            if each.kv_capacity_tokens and each.sizes == (tensor, stages):
                return each.kv_capacity_tokens
        return None


def build_estimator(
    shape: ModelShape,
    cluster: Cluster,
    choices: Sequence[GpuChoice] = (),
    folder: Path = Path(),
    max_model_len: int | None = None,
    reserve: memory.MemoryReserve = memory.VLLM_RESERVE,
    context_tokens: int | None = None,
    experts: ExpertSettings = VLLM_EXPERTS,
    least_context: int = 0,
) -> ModelEstimator:
    """An estimator for the nodes of `cluster`, whose profile paths are relative to `folder`;
    `context_tokens`: of a mean request; `least_context`: of the longest. Raises ManifestError with
    a line for each unknown GPU or unusable profile."""
    gpus = inventory.list_gpus(cluster, choices)
    per_node: dict[str, int] = {}
    joined: dict[str, int] = {}
    for group, gpu in inventory.list_groups(cluster):
        per_node[gpu.name] = max(per_node.get(gpu.name, 0), group.gpus_per_node)
        joined[gpu.name] = max(joined.get(gpu.name, 0), group.nvlink_gpus or 0)
    machines = {
        name: NodeType(gpu, per_node[name], inventory.find_network_link(cluster, gpu), joined[name])
        for name, gpu in gpus.items()
    }
    profiles = _read_profiles(cluster.profiles, folder)
    return ModelEstimator(
        *(shape, machines, profiles, reserve, max_model_len, context_tokens, experts),
        least_context=least_context,
    )


def _read_profiles(paths: Sequence[str], folder: Path) -> list[MeasuredProfile]:
    profiles: list[MeasuredProfile] = []
    faults: list[str] = []
    for index, path in enumerate(paths):
        try:
            profiles.append(profile.read_profile(folder / path))
        except InvalidProfileError as error:
            faults.append(f"profiles[{index}]: {error}")
    if faults:
        raise ManifestError(faults)
    return profiles


def _select_best(sources: Sequence[_TimingSource]) -> _TimingSource:
    """The one that errs least; it names the first profile that it is preferred to."""
    best = min(sources, key=lambda each: each.confidence.rank)
    profiles = [e.confidence for e in sources if e.confidence.kind is LatencySource.MEASURED]
    if not profiles or best.confidence.kind is LatencySource.MEASURED:
        return best
    error = profiles[0].rank[0]
    known = "is unknown" if math.isinf(error) else f"is {100 * error:.0f} %"
    text = f"{best.confidence.source}; not {profiles[0].source}, whose error {known}"
    return replace(best, confidence=replace(best.confidence, source=text))


def _iter_computed(
    shape: ModelShape, machine: NodeType, tensor: int, group: ExpertGroup | None = None
) -> Iterator[_TimingSource]:
    """Kernel tables, where they have all kernels, and the roofline, which always works."""
    if (source := _find_kernels(shape, machine.gpu, tensor, group)) is not None:
        yield source
    yield _build_roofline_source(shape, machine, tensor, group)


def _find_kernels(
    shape: ModelShape, gpu: Gpu, tensor: int, group: ExpertGroup | None = None
) -> _TimingSource | None:
    found = tables.find_tables(gpu)
    operators = composition.build_operators(shape, found, tensor, group) if found else None
    if found is None or operators is None:
        return None
    text = f"{gpu.name}, {found.source}, {_FRONT_END}"
    trust = Confidence(LatencySource.KERNELS, text, None, known_errors.KERNELS.get(gpu.name))
    timing = replace(
        operator_fit.to_timing(operators, tensor), schedules_ahead=VLLM.schedules_ahead
    )
    return _TimingSource(_run_by_vllm(timing, shape, gpu, tensor), trust, VLLM.front_end_ms)


def _build_roofline_source(
    shape: ModelShape, machine: NodeType, tensor: int, group: ExpertGroup | None = None
) -> _TimingSource:
    kernels, link = select_efficiency(machine.gpu), machine.select_link(tensor)
    roofline = Roofline(shape, machine.gpu, tensor, link, kernels, group=group)
    text = f"FLOPs and bytes, calibrated on {kernels.source}, {_FRONT_END}"
    errors = known_errors.ROOFLINE.get(machine.gpu.name)
    trust = Confidence(LatencySource.ROOFLINE, text, None, errors)
    timing = _run_by_vllm(roofline.to_timing(), shape, machine.gpu, tensor)
    return _TimingSource(timing, trust, VLLM.front_end_ms)


def _run_by_vllm(timing: EngineTiming, shape: ModelShape, gpu: Gpu, tensor: int) -> EngineTiming:
    launch = host_launch.select_host_launch(shape, gpu)
    bounded = host_launch.bound_prompts(timing, shape, tensor, launch)
    return mixed_attention.scale_mixed(bounded, shape, gpu, tensor)


def _is_profile_of(measurement: MeasuredProfile, shape: ModelShape) -> bool:
    return _normalize_name(measurement.model) == _normalize_name(shape.name)


def _is_same_gpu(device: str, gpu: Gpu) -> bool:
    if device.lower() == gpu.name.lower():
        return True
    try:
        return find_gpu(device).name == gpu.name
    except UnknownGpuError:
        return False


def _normalize_name(model_name: str) -> str:
    """The last part of a path or repository name, in lower case."""
    return model_name.rstrip("/").rpartition("/")[2].lower()
