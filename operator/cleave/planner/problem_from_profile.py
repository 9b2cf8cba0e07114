"""Builds the planner's `Problem` for emulated engines: no GPUs, one latency profile for all.

Called by `cleave up`, `cleave plan` and `cleave simulate`. An emulated engine has the latencies of
its profile at any parallelism, so only the number of instances is planned; an instance counts as
one GPU.
"""

from pathlib import Path

from cleave.api.cluster import Cluster
from cleave.api.deployment import LLMDeployment, LLMDeploymentSpec
from cleave.perf import named_profiles, pipeline
from cleave.perf.estimate import Confidence, Estimate, LatencySource
from cleave.perf.hardware.link import Link, LinkKind, build_host_link
from cleave.perf.hardware.memory import NO_ROOM
from cleave.perf.model import model_shape, model_source
from cleave.perf.model.model_shape import ModelShape, UnknownModelError
from cleave.planner import left_out, memory_flags
from cleave.planner.placement import PlanError
from cleave.planner.plan import EMULATED_GPU
from cleave.planner.problem import Problem, Supply, build_policies, limit_reuse
from cleave.traffic import characterization, workload

MAX_INSTANCES = 16
"""Limit if spec.planning.maxGPUs is not set."""
_DEFAULT_SHAPE = "opt-13b"
"""The emulated engine uses this model's KV size for a model that it does not know."""
_TRANSFER_GB_PER_S = 25.0
_TRANSFER_LATENCY_US = 1000.0
"""The emulated engine's own defaults: 200 Gbit/s and 1 ms."""


class ProfileEstimator:
    """Implements `cleave.perf.estimate.Estimator` with one profile, without parallelism."""

    def __init__(
        self,
        profile: named_profiles.NamedProfile,
        shape: ModelShape,
        time_scale: float,
        kv_capacity_tokens: int,
    ) -> None:
        timing = pipeline.scale_timing(profile.timing, prompt=time_scale, decode=time_scale)
        saturation = pipeline.find_prefill_saturation_tokens(timing, shape.max_model_len)
        source = f"the emulated engine's own profile {profile.name}"
        self._estimate = Estimate(
            timing=timing,
            kv_capacity_tokens=kv_capacity_tokens,
            prefill_saturation_tokens=saturation,
            max_model_len=kv_capacity_tokens,
            kv_bytes_per_token=shape.copied_bytes_per_token,
            flops_per_token=shape.flops_per_token,
            power_watts=0.0,
            cost_per_hour=0.0,
            confidence=Confidence(LatencySource.MEASURED, source, 0.0),
            host_token_ms=(
                time_scale
                * shape.copied_bytes_per_token
                / (build_host_link(None).effective_gb_per_s * 1e6)
            ),
        )

    def estimate(
        self, gpu: str, tensor: int, pipeline: int, data: int = 1, *, expert: bool = False
    ) -> Estimate | None:
        """The profile's estimate without parallelism; None for all other sizes."""
        is_unsplit = (gpu, tensor, pipeline, data) == (EMULATED_GPU, 1, 1, 1) and not expert
        return self._estimate if is_unsplit else None

    def explain_unsupported(
        self, gpu: str, tensor: int, pipeline: int, data: int = 1, *, expert: bool = False
    ) -> str | None:
        """The reason in one sentence why `estimate` returns None; None: it does not."""
        if self.estimate(gpu, tensor, pipeline, data, expert=expert) is not None:
            return None
        return "emulated instances are planned without parallelism; their profile has its own"


def build_problem(
    deployment: LLMDeployment, folder: Path = Path(), seed: int = 0, cluster: Cluster | None = None
) -> Problem:
    """The problem of planning emulated instances; a relative trace path starts at `folder`.

    A cluster has room for one instance per GPU; without one the limit is MAX_INSTANCES. Raises
    PlanError when the deployment has no workload or names an unknown profile.
    """
    spec = deployment.spec
    emulation = spec.engine.emulation
    if spec.workload is None:
        raise PlanError(["spec.workload: required for planning; set rate and lengths"])
    if spec.planning.acceptance_length is not None:
        raise PlanError(["spec.planning.acceptanceLength: emulated engines draft none; remove it"])
    try:
        profile = named_profiles.load_profile(emulation.latency)
        demand = workload.build_from_spec(spec.workload, folder)
    except named_profiles.UnknownProfileError as error:
        raise PlanError([f"spec.engine.emulated.latency: {error}"]) from error
    except workload.DemandError as error:
        raise PlanError([f"spec.workload: {error}"]) from error
    shape = _load_shape(deployment)
    instances = spec.planning.max_gpus or (cluster.total_gpus if cluster else MAX_INSTANCES)
    if cluster:
        instances = min(instances, cluster.total_gpus)
    link = _build_link(emulation.time_scale)
    longest = spec.model.max_model_len or shape.max_model_len
    policies = build_policies(spec)
    room = _count_room(spec, profile, policies.kv_block_size)
    demand = limit_reuse(demand, spec.engine).with_max_model_len(longest)
    needed = longest if spec.model.max_model_len else demand.longest_request
    if needed > room:
        fault = (
            f"spec.model.maxModelLen: {NO_ROOM} {needed:,} tokens, and an emulated instance with "
            f"the latency profile {profile.name} has room for the KV of {room:,}; set at most that"
        )
        raise PlanError([fault])
    return Problem(
        demand=demand,
        slo=spec.slo,
        supplies=(Supply(EMULATED_GPU, 1, instances, instances, link, link),),
        shape=shape,
        # Emulated engines need no GPU, so the allowed GPU types do not apply.
        planning=spec.planning.model_copy(update={"gpus": []}),
        estimator=ProfileEstimator(profile, shape, emulation.time_scale, room),
        policies=policies,
        seed=seed,
        notes=(
            *filter(None, [left_out.describe(spec)]),
            *characterization.list_remarks(demand, longest),
        ),
    )


def _count_room(
    spec: LLMDeploymentSpec, profile: named_profiles.NamedProfile, block_tokens: int
) -> int:
    """Tokens of KV of an instance, in whole blocks as the emulated engine counts them."""
    blocks = memory_flags.read_count(spec.engine, "--num-gpu-blocks-override")
    return block_tokens * (blocks or profile.kv_capacity_tokens // block_tokens)


def _load_shape(deployment: LLMDeployment) -> ModelShape:
    try:
        return model_source.load_shape(deployment.spec.model)
    except UnknownModelError:
        return model_shape.load_shape(_DEFAULT_SHAPE)


def _build_link(time_scale: float) -> Link:
    """A link with the effective bandwidth and latency of the emulated KV transfer."""
    nominal = Link(LinkKind.INFINIBAND, 1.0)
    return Link(
        LinkKind.INFINIBAND,
        _TRANSFER_GB_PER_S / nominal.effective_gb_per_s / time_scale,
        _TRANSFER_LATENCY_US * time_scale - nominal.start_ms * 1e3,
    )
