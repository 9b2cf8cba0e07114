"""Converts plans to the types of the API: for status, and for `cleave plan -o json|yaml`. Pure."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from cleave.api.plan import LatencyPercentiles, ManualPool, PlanOption, Predicted
from cleave.planner.plan import (
    EMULATED_GPU,
    Answer,
    NearestSlo,
    Percentiles,
    Plan,
    PlannedPool,
    Prediction,
)
from cleave.planner.result.text import trust_sentence

Document = dict[str, Any]


def option(plan: Plan) -> PlanOption:
    """A plan with its prediction."""
    return PlanOption(
        pools=instances(plan.pools),
        gpus=plan.gpus,
        algorithm=plan.algorithm,
        predicted=predicted(plan),
    )


def instances(pools: Iterable[PlannedPool]) -> list[ManualPool]:
    """Pools in the form of spec.placement.manual."""
    return [
        ManualPool(
            role=pool.role,
            replicas=pool.replicas,
            parallelism=pool.parallelism,
            gpu=pool.gpu,
            max_num_seqs=pool.max_num_seqs,
            max_num_batched_tokens=pool.max_num_batched_tokens,
            per_cell=pool.per_cell,
        )
        for pool in pools
    ]


def predicted(plan: Plan) -> Predicted:
    """The prediction of a plan."""
    prediction: Prediction = plan.prediction
    return Predicted(
        goodput=_rounded(prediction.goodput),
        goodput_low=_rounded(prediction.goodput_interval[0]),
        goodput_high=_rounded(prediction.goodput_interval[1]),
        goodput_per_gpu=_rounded(plan.goodput_per_gpu),
        attainment=prediction.attainment,
        ttft_ms=_percentiles(prediction.ttft_ms),
        tpot_ms=_percentiles(prediction.tpot_ms),
        cost_per_hour=prediction.cost_per_hour,
        power_watts=prediction.power_watts,
        trust=trust_sentence(prediction.trust),
    )


def document(result: Answer, max_alternatives: int) -> Document:
    """The complete result, ready for JSON."""
    return {
        "verdict": str(result.verdict),
        "reason": result.reason,
        "whatWouldChange": result.what_would_change,
        "nearestSlo": result.nearest_slo and _nearest(result.nearest_slo),
        "selected": result.selected and _written(option(result.selected)),
        "alternatives": [_written(option(plan)) for plan in result.alternatives[:max_alternatives]],
        "warnings": list(result.warnings),
        "search": {
            "candidates": result.num_candidates,
            "simulatedRequests": result.num_simulated_requests,
            "elapsedSeconds": round(result.elapsed_s, 3),
        },
    }


def placement(plan: Plan) -> Document:
    """The block under `spec.placement` that sets a plan's pools manually."""
    # Emulated instances run on any node; no node offers their GPU type.
    pools = (replace(pool, gpu=_real(pool.gpu)) for pool in plan.pools)
    manual_pools = (each.model_dump(mode="json", exclude_none=True) for each in instances(pools))
    return {"manual": list(manual_pools)}


def _real(gpu: str | None) -> str | None:
    return None if gpu == EMULATED_GPU else gpu


def _written(each: PlanOption) -> Document:
    return each.model_dump(mode="json", exclude_none=True)


def _nearest(slo: NearestSlo) -> Document:
    return {
        "scale": slo.scale,
        "ttftMs": slo.ttft_ms,
        "tpotMs": slo.tpot_ms,
        "plan": slo.plan,
    }


def _percentiles(latency: Percentiles) -> LatencyPercentiles:
    return LatencyPercentiles(
        p50=_finite(latency.p50), p90=_finite(latency.p90), p99=_finite(latency.p99)
    )


def _finite(value: float) -> float | None:
    return _rounded(value) if math.isfinite(value) else None


def _rounded(value: float) -> float:
    """Four significant digits: more would suggest a precision that predictions do not have."""
    return float(f"{value:.4g}")
