"""Instances per role, by hand or planned, and what a plan is expected to do.

Parts of LLMDeployment. Written by `cleave.pods` and `cleave plan`; figures are absent where nothing
predicted them.
"""

from typing import Annotated

from pydantic import Field

from cleave.api.role import Parallelism, Role
from cleave.api.shape import Rule, Shape

NonNegative = Annotated[float, Field(ge=0)]


class ManualPool(Shape):
    """Instances of one role, by hand or planned."""

    role: Annotated[Role, Field(strict=False)]
    """prefill, decode or mixed."""
    replicas: Annotated[int, Field(ge=1, le=10000)] = 1
    """Instances of this role."""
    parallelism: Parallelism = Parallelism()
    """How one instance is spread over GPUs."""
    gpu: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Kind of GPU, by its name in the catalogue, the cluster file or the node's label
    nvidia.com/gpu.product; absent: whatever the nodes have. Emulated engines run anywhere."""
    per_cell: Annotated[int, Field(ge=1, le=128)] | None = None
    """Instances of this role in a cell, whose prefill and decode instances have the same pipeline
    stage in one node or NVLink domain (DistServe's Algorithm 2); absent: they may be anywhere."""
    max_num_seqs: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Most requests in one pass; absent, or stated in engine.args: what the engine does then."""
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Most tokens in one pass; absent, or stated in engine.args: what the engine does then."""

    rules = (
        Rule(
            cel="!has(self.perCell) || self.replicas % self.perCell == 0",
            holds=lambda p: p.per_cell is None or p.replicas % p.per_cell == 0,
            message="must divide replicas: there are whole cells only",
            field="perCell",
        ),
        Rule(
            cel="!has(self.perCell) || self.role != 'mixed'",
            holds=lambda p: p.per_cell is None or p.role is not Role.MIXED,
            message="has no effect on mixed instances, which hand nothing over; remove it",
            field="perCell",
        ),
    )


class LatencyPercentiles(Shape):
    """Of one latency over all requests, in milliseconds; absent: those requests never end."""

    p50: NonNegative | None = None
    """Median."""
    p90: NonNegative | None = None
    """90th percentile."""
    p99: NonNegative | None = None
    """99th percentile."""


class Predicted(Shape):
    """What the planner's simulation says; latencies and attainment are at the asked rate."""

    goodput: NonNegative
    """Highest rate (requests per second) at which the latency targets hold."""
    goodput_low: NonNegative
    """Lower end of the 95 % confidence interval of goodput."""
    goodput_high: NonNegative
    """Upper end of the same."""
    goodput_per_gpu: NonNegative
    """Goodput by GPU."""
    attainment: Annotated[float, Field(ge=0, le=1)]
    """Share of requests that meet both targets."""
    ttft_ms: LatencyPercentiles
    """Time to first token."""
    tpot_ms: LatencyPercentiles
    """Time per output token after the first."""
    cost_per_hour: NonNegative
    """Price of all GPUs for an hour."""
    power_watts: NonNegative
    """Provisioned power of all GPUs."""
    trust: str
    """Where the latencies come from, and how wrong they have been."""


class PlanGrowth(Shape):
    """How many workers a rate needs: a line through simulated counts (Aladdin, Eq. 7).

    A worker is the smallest part of the plan with its proportion of roles.
    """

    workers: Annotated[int, Field(ge=1)]
    """Workers of the plan as it is."""
    per_rate: NonNegative
    """Workers for each request per second."""
    base: float
    """Added to that, before it is rounded up."""
    lowest_rate: NonNegative
    """Requests per second below which the lengths of a minute's requests are too unlike."""


class PlanOption(Shape):
    """One way to serve the deployment."""

    pools: list[ManualPool] = Field(default_factory=list, max_length=3)
    """Instances, by role."""
    gpus: Annotated[int, Field(ge=0)]
    """GPUs of all instances."""
    algorithm: str = ""
    """How it was found."""
    predicted: Predicted | None = None
    """What it is expected to do; absent: nothing was predicted."""


class SelectedPlan(Shape):
    """The placement in force."""

    revision: str
    """Identifies engine and model; instances of unlike revisions never work together."""
    reason: str
    """Why this placement."""
    gpus: Annotated[int, Field(ge=0)]
    """GPUs of all instances."""
    pools: list[ManualPool] = Field(default_factory=list, max_length=3)
    """Instances, by role."""
    algorithm: str = ""
    """How it was found; empty: stated by hand, or not planned."""
    inputs: str | None = None
    """Digest of what was planned from: as long as it stays, the plan does."""
    verdict: str | None = None
    """Disaggregate or Colocate; absent: not planned."""
    whole_below_tokens: Annotated[int, Field(ge=0)] | None = None
    """Prompts up to so many tokens are computed by the instance that decodes them while all prefill
    instances are busy; absent: none."""
    ahead_from_tokens: Annotated[int, Field(ge=0)] | None = None
    """Prompts from so many tokens on gain by a transfer while they are computed; absent: none."""
    predicted: Predicted | None = None
    """What it is expected to do; absent: nothing was predicted."""
    growth: PlanGrowth | None = None
    """How it grows with its traffic; absent: spec.scaling.roles does not ask for it."""
    alternatives: list[PlanOption] = Field(default_factory=list, max_length=3)
    """The next best plans, best first."""
