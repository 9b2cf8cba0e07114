"""Converts plans to the types of the API: for status, and for `cleave plan -o json|yaml`. Pure."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from cleave.api.plan import (
    KvLink,
    LatencyPercentiles,
    PlannedReuse,
    PlanOption,
    PredictedPerformance,
    RolePool,
)
from cleave.planner.plan import (
    EMULATED_GPU,
    NearestSlo,
    Percentiles,
    Plan,
    PlannedKvLink,
    PlannedPool,
    PlanningResult,
    ReuseWorth,
)
from cleave.planner.result.text import describe_trust

Document = dict[str, Any]


def build_plan_option(plan: Plan) -> PlanOption:
    """A plan with its prediction."""
    return PlanOption(
        pools=to_role_pools(plan.pools),
        gpus=plan.gpus,
        algorithm=plan.algorithm,
        predicted=build_predicted(plan),
    )


def to_role_pools(pools: Iterable[PlannedPool]) -> list[RolePool]:
    """Pools in the form of spec.placement.manual."""
    return [
        RolePool(
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


def build_predicted(plan: Plan) -> PredictedPerformance:
    """The prediction of a plan."""
    prediction = plan.prediction
    return PredictedPerformance(
        goodput=_round(prediction.goodput),
        goodput_low=_round(prediction.goodput_interval[0]),
        goodput_high=_round(prediction.goodput_interval[1]),
        goodput_per_gpu=_round(plan.goodput_per_gpu),
        attainment=_round(prediction.attainment),
        ttft_attainment=_round(prediction.ttft_attainment),
        tpot_attainment=_round(prediction.tpot_attainment),
        ttft_ms=_build_percentiles(prediction.ttft_ms),
        tpot_ms=_build_percentiles(prediction.tpot_ms),
        itl_ms=_build_percentiles(prediction.itl_ms),
        cost_per_hour=prediction.cost_per_hour,
        power_watts=prediction.power_watts,
        trust=describe_trust(prediction.trust),
        kv_link=build_kv_link(prediction.kv_link),
        cached_share=_round(prediction.cached_share) or None,
    )


def build_reuse(worth: ReuseWorth | None) -> PlannedReuse | None:
    """What prompts that repeat save."""
    if worth is None:
        return None
    return PlannedReuse(
        cached_share=_round(worth.cached_share), gpus_without=worth.gpus_without, reason=worth.text
    )


def build_kv_link(link: PlannedKvLink | None) -> KvLink | None:
    """The link over which KV goes."""
    return KvLink(kind=link.kind, gb_per_s=_round(link.gb_per_s)) if link else None


def build_document(result: PlanningResult, max_alternatives: int) -> Document:
    """The complete result, ready for JSON."""
    slo, reuse = result.nearest_slo, build_reuse(result.reuse)
    return {
        "verdict": str(result.verdict),
        "reason": result.reason,
        "whatWouldChange": result.what_would_change,
        "currency": "USD",
        "nearestSlo": slo and _dump_nearest_slo(slo),
        "reuse": reuse and reuse.model_dump(mode="json", exclude_none=True),
        "selected": result.selected and _dump_option(result.selected),
        "alternatives": [_dump_option(plan) for plan in result.alternatives[:max_alternatives]],
        "warnings": list(result.warnings),
        "search": {
            "candidates": result.num_candidates,
            "simulatedRequests": result.num_simulated_requests,
            "elapsedSeconds": round(result.elapsed_s, 3),
        },
    }


def build_manual_placement(plan: Plan) -> Document:
    """The block under `spec.placement` that sets a plan's pools manually."""
    # Emulated instances run on any node; no node offers their GPU type.
    pools = (replace(pool, gpu=None) if pool.gpu == EMULATED_GPU else pool for pool in plan.pools)
    manual = [each.model_dump(mode="json", exclude_none=True) for each in to_role_pools(pools)]
    return {"manual": manual}


def _dump_nearest_slo(slo: NearestSlo) -> Document:
    itl = {} if slo.itl_p99_ms is None else {"itlP99Ms": slo.itl_p99_ms}
    targets = {"ttftMs": slo.ttft_ms, "tpotMs": slo.tpot_ms, **itl}
    return {"scale": slo.scale, **targets, "plan": slo.plan}


def _dump_option(plan: Plan) -> Document:
    return build_plan_option(plan).model_dump(mode="json", exclude_none=True)


def _build_percentiles(latency: Percentiles) -> LatencyPercentiles:
    p50, p90, p99 = map(_to_finite, (latency.p50, latency.p90, latency.p99))
    return LatencyPercentiles(p50=p50, p90=p90, p99=p99)


def _to_finite(value: float) -> float | None:
    return _round(value) if math.isfinite(value) else None


def _round(value: float) -> float:
    """Four significant digits: more would suggest a precision that predictions do not have."""
    return float(f"{value:.4g}")
