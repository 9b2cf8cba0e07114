"""Instances per role, manual or planned, and the predicted performance of a plan.

Parts of LLMDeployment. Written by `cleave.manifests` and `cleave plan`; figures are absent where
nothing was predicted.
"""

from typing import Annotated, ClassVar

from pydantic import Field

from cleave.api.base import ApiModel, ValidationRule, declare_list_map_key
from cleave.api.engine import ARGUMENT_RULES, ArgumentText, EnvVar
from cleave.api.role import Parallelism, Role

NonNegative = Annotated[float, Field(ge=0)]


class RolePool(ApiModel):
    """The instances of one role, manual or planned."""

    role: Annotated[Role, Field(strict=False)]
    """The role: prefill, decode or mixed."""
    replicas: Annotated[int, Field(ge=1, le=10000)] = 1
    """Number of instances of this role."""
    parallelism: Parallelism = Parallelism()
    """How one instance is distributed over GPUs."""
    gpu: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Kind of GPU: its name in the catalogue or the cluster file, or the value of the node label
    nvidia.com/gpu.product. Absent: any kind. Emulated engines run on any node."""
    per_cell: Annotated[int, Field(ge=1, le=128)] | None = None
    """Instances of this role in one cell. A cell is a co-location group: its prefill and decode
    instances have equal pipeline stages in the same node or NVLink domain (DistServe's Algorithm
    2). A cell that fits a node is one pod of the mixed pool. Absent: instances may be placed
    anywhere."""
    max_num_seqs: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Maximum number of requests in one engine iteration; absent: the engine's default. The same
    flag in engine.args takes precedence."""
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Maximum number of tokens in one engine iteration; absent: the engine's default. The same flag
    in engine.args takes precedence."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel="!has(self.perCell) || self.replicas % self.perCell == 0",
            is_valid=lambda p: p.per_cell is None or p.replicas % p.per_cell == 0,
            message="must divide replicas: a cell cannot be incomplete",
            field="perCell",
        ),
        ValidationRule(
            cel="!has(self.perCell) || self.role != 'mixed'",
            is_valid=lambda p: p.per_cell is None or p.role is not Role.MIXED,
            message="has no effect on mixed instances, which transfer no KV; remove it",
            field="perCell",
        ),
        ValidationRule(
            cel="!has(self.perCell) || !has(self.parallelism.data) || self.parallelism.data == 1",
            is_valid=lambda p: p.per_cell is None or p.parallelism.data == 1,
            message="cannot go with parallelism.data above 1: the data-parallel ranks of an "
            "instance have a pod of their own; remove one of them",
            field="perCell",
        ),
    )


class ManualPool(RolePool):
    """The instances of one role, and what their engines get in addition."""

    # Parsed into engine.roles, from where it is read and written. The API server takes no rules on
    # more arguments of so many pools.
    args: list[ArgumentText] = Field(default_factory=list, max_length=60, exclude=True)
    """Arguments of this role's engines, as in engine.roles, which then must be absent."""
    env: list[EnvVar] = declare_list_map_key(
        "name", default_factory=list, max_length=128, exclude=True
    )
    """Variables of this role's engines, as in engine.roles, which then must be absent."""

    rules = (*RolePool.rules, *ARGUMENT_RULES)

    @property
    def sets_engine(self) -> bool:
        """Whether it states arguments or variables."""
        return not self.model_fields_set.isdisjoint(("args", "env"))


class LatencyPercentiles(ApiModel):
    """Percentiles of a latency in milliseconds; absent: so many requests never finish."""

    p50: NonNegative | None = None
    """50th percentile (median)."""
    p90: NonNegative | None = None
    """90th percentile."""
    p99: NonNegative | None = None
    """99th percentile."""


class KvLink(ApiModel):
    """The link over which a placement transfers KV."""

    kind: str
    """InfiniBand (also RoCE), Ethernet, NVLink or PCIe."""
    gb_per_s: NonNegative
    """Rate at which one GPU of a decode instance receives KV, in GB/s."""


class PredictedPerformance(ApiModel):
    """Simulated performance; latencies and attainment are at the planned rate."""

    goodput: NonNegative
    """Highest rate, in requests per second, at which the latency targets are met."""
    goodput_low: NonNegative
    """Lower end of the 95 % confidence interval of goodput."""
    goodput_high: NonNegative
    """Upper end of the 95 % confidence interval of goodput."""
    goodput_per_gpu: NonNegative
    """Goodput divided by the number of GPUs."""
    attainment: Annotated[float, Field(ge=0, le=1)]
    """Share of requests that meet both latency targets."""
    ttft_attainment: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of requests that meet ttftMs; absent: planned by an earlier version. So is
    tpotAttainment, of tpotMs."""
    tpot_attainment: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of requests that meet tpotMs."""
    ttft_ms: LatencyPercentiles
    """Time to first token in milliseconds."""
    tpot_ms: LatencyPercentiles
    """Time per output token after the first, in milliseconds."""
    itl_ms: LatencyPercentiles | None = None
    """Each time between two tokens (inter-token latency) in milliseconds; absent: planned by an
    earlier version."""
    cost_per_hour: NonNegative
    """Price of all GPUs for one hour in US dollars."""
    power_watts: NonNegative
    """Provisioned power of all GPUs in watts."""
    trust: str
    """Source of the latencies, and how large their errors have been."""
    kv_link: KvLink | None = None
    """The link over which KV is transferred; absent: no KV is transferred."""
    cached_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of prompt tokens found in prefix caches; absent: no prompts are known to repeat."""


class PlannedReuse(ApiModel):
    """What prompts that repeat save in the selected plan."""

    cached_share: Annotated[float, Field(ge=0, le=1)]
    """Share of prompt tokens found in prefix caches."""
    gpus_without: Annotated[int, Field(ge=0)] | None = None
    """GPUs of the best plan if no prompt repeated; absent: none would meet the SLO."""
    reason: str
    """What is saved, in one sentence."""


class PlanGrowth(ApiModel):
    """Workers that a rate needs: a line through simulated counts (Aladdin, Eq. 7).
    A worker is the smallest part of the plan with its proportion of roles."""

    workers: Annotated[int, Field(ge=1)]
    """Workers of the plan as it is."""
    per_rate: NonNegative
    """Workers per request per second: the slope of the line."""
    base: float
    """Workers at rate 0: the intercept of the line, before the sum is rounded up."""
    lowest_rate: NonNegative
    """Rate in requests per second below which a minute has too few requests for typical lengths."""


class PlanOption(ApiModel):
    """An alternative plan."""

    pools: list[RolePool] = Field(default_factory=list, max_length=3)
    """Instances of each role."""
    gpus: Annotated[int, Field(ge=0)]
    """GPUs of all instances."""
    algorithm: str = ""
    """Algorithm that found the plan."""
    predicted: PredictedPerformance | None = None
    """Predicted performance; absent: nothing was predicted."""


class SelectedPlan(ApiModel):
    """The plan or manual placement in force."""

    revision: str
    """Hash of engine and model; instances of different revisions never work together."""
    reason: str
    """Why this placement was chosen."""
    gpus: Annotated[int, Field(ge=0)]
    """GPUs of all instances."""
    pools: list[RolePool] = Field(default_factory=list, max_length=3)
    """Instances of each role."""
    algorithm: str = ""
    """Algorithm that found the plan; empty: the placement is manual, or was not planned."""
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    """Longest request in tokens, prompt plus answer, that the plan set because its GPUs have no
    room for the KV of the model's context and spec.model names no limit; absent: the deployment's
    own. It stays as long as the plan and its revisions do."""
    inputs: str | None = None
    """Hash of the inputs of the plan: the plan stays as long as the hash does."""
    verdict: str | None = None
    """Disaggregate or Colocate; absent: not planned."""
    whole_below_tokens: Annotated[int, Field(ge=0)] | None = None
    """Prompts of up to this many tokens are computed by their decode instance while all prefill
    instances are busy; absent: none are."""
    ahead_from_tokens: Annotated[int, Field(ge=0)] | None = None
    """Prompts of at least this many tokens gain from a KV transfer during prefill; absent: none."""
    predicted: PredictedPerformance | None = None
    """Predicted performance; absent: nothing was predicted."""
    kv_link: KvLink | None = None
    """The link over which KV is transferred, of a placement that was not planned: that of the
    nodes. Absent: as predicted, none, or not known."""
    reuse: PlannedReuse | None = None
    """What prompts that repeat save; absent: none are known to."""
    growth: PlanGrowth | None = None
    """How the plan scales with its traffic; absent: spec.scaling.roles is empty."""
    alternatives: list[PlanOption] = Field(default_factory=list, max_length=3)
    """The next best plans, the best first."""
