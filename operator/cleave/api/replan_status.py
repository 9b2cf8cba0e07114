"""Observed traffic of a deployment, and what replanning derived from it: parts of its status.

Written by `cleave.controller.replan`, which also reads it: a restarted operator continues from
here.
"""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from cleave.api.base import ApiModel
from cleave.api.plan import LatencyPercentiles, NonNegative, RolePool
from cleave.api.workload import Workload

CorrectionFactor = Annotated[float, Field(ge=0.1, le=10)]


class ObservedLengths(ApiModel):
    """Observed prompt or output lengths in tokens."""

    mean: NonNegative
    """Mean length in tokens."""
    p90: NonNegative | None = None
    """90th percentile of the lengths; absent: not known."""


class ObservedTraffic(ApiModel):
    """Traffic of the last minutes, as counted by the gateways."""

    at: Annotated[datetime, Field(strict=False)]
    """Time at which this was written."""
    window_s: NonNegative
    """Length of the observed window in seconds."""
    rate: NonNegative
    """Requests per second."""
    prompt_tokens: ObservedLengths | None = None
    """Prompt lengths; absent: no request ended in the window."""
    output_tokens: ObservedLengths | None = None
    """Output lengths; absent: no request ended in the window."""
    repeated_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of prompt tokens with which an earlier prompt began, as far back as gateways remember;
    absent: gateways do not look at prompts."""
    attainment: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of measured responses that met both latency targets; absent: none was measured."""
    ttft_attainment: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of measured responses that met ttftMs, whatever their TPOT."""
    tpot_attainment: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of measured responses that met tpotMs, whatever their TTFT."""
    measured: NonNegative | None = None
    """Responses of the window that were measured against the targets: streams are."""
    ttft_ms: LatencyPercentiles | None = None
    """Time to first token in milliseconds; absent: no stream began in the window."""
    tpot_ms: LatencyPercentiles | None = None
    """Time per output token after the first, in milliseconds; absent: no stream ended."""
    itl_ms: LatencyPercentiles | None = None
    """Gaps between the pieces of some streams in milliseconds; absent: fewer than 1,000 gaps."""


class CurrentPrediction(ApiModel):
    """Latencies that the planner predicts for the running plan with the observed traffic."""

    at: Annotated[datetime, Field(strict=False)]
    """Time of the comparison with observed latencies."""
    attainment: Annotated[float, Field(ge=0, le=1)]
    """Predicted share of requests that meet both latency targets."""
    ttft_ms: LatencyPercentiles | None = None
    """Predicted time to first token; absent: too few requests for a comparison."""
    tpot_ms: LatencyPercentiles | None = None
    """Predicted time per output token; absent: too few requests for a comparison."""
    error: NonNegative | None = None
    """Largest relative difference between predicted and observed figures; absent: not compared."""


class LatencyCorrection(ApiModel):
    """Factors by which the planner multiplies the iteration times of its latency model."""

    prefill: CorrectionFactor = 1.0
    """Factor on iterations that compute prompts."""
    decode: CorrectionFactor = 1.0
    """Factor on iterations that generate tokens."""
    num_requests: Annotated[int, Field(ge=0)] = 0
    """Number of requests that the factors were measured with."""
    of: str
    """Hash of model, engine and kinds of GPU; the correction is valid for these only."""


class FittedPlanInputs(ApiModel):
    """Inputs of the plan that replace those of the spec."""

    workload: Workload
    """Traffic that the plan was made for, fitted to the observed traffic."""
    correction: LatencyCorrection | None = None
    """Correction of the latency model that the plan was made with; absent: none."""
    of: str
    """Hash of the spec's workload: when that changes, the plan is made from the spec again."""


class PastPlan(ApiModel):
    """Result of one review of the plan."""

    at: Annotated[datetime, Field(strict=False)]
    """Time of the review."""
    verdict: str
    """Applied: the new plan was applied. Proposed: it was not. Corrected: the latency model was."""
    reason: str
    """Why the review had this result."""
    pools: list[RolePool] = Field(default_factory=list, max_length=3)
    """Instances of the new plan, by role; absent: there was none."""
    left: list[RolePool] = Field(default_factory=list, max_length=3)
    """Instances of the plan that was replaced, by role; absent: none was."""
