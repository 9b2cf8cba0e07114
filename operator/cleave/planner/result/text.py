"""Formats plans and figures as text, the same in the report, the terminal and in status. Pure."""

import math
from collections.abc import Sequence

from cleave.api.deployment import Slo
from cleave.api.planning import Objective
from cleave.api.role import Role
from cleave.perf.estimate import Confidence
from cleave.perf.known_errors import Spread
from cleave.planner.plan import (
    WIDE_ERROR,
    NearestSlo,
    Plan,
    PlannedPool,
    PlanningResult,
    PlanVerdict,
    Prediction,
)

VERDICT_TEXTS = {
    PlanVerdict.DISAGGREGATE: "disaggregate",
    PlanVerdict.COLOCATE: "do not disaggregate",
    PlanVerdict.INFEASIBLE: "infeasible",
}
_UNITS = {Objective.COST: "US dollars per hour", Objective.POWER: "W"}
_LETTERS = {Role.PREFILL: "P", Role.DECODE: "D", Role.MIXED: "M"}


def format_pool(pool: PlannedPool) -> str:
    """`2P tp4 pp2`: two prefill instances of tensor size 4 and pipeline size 2."""
    parts = [f"{pool.replicas}{_LETTERS[pool.role]}", f"tp{pool.parallelism.tensor}"]
    if pool.parallelism.pipeline > 1:
        parts.append(f"pp{pool.parallelism.pipeline}")
    if pool.parallelism.data > 1:
        parts.append(f"dp{pool.parallelism.data}")
    if pool.parallelism.expert:
        parts.append("ep")
    return " ".join(parts)


def format_plan(plan: Plan) -> str:
    """`2P tp4 + 1D tp2`; GPU types are named where there were several to choose from."""
    return format_pools(plan.pools, is_gpu_chosen=plan.is_gpu_chosen)


def format_pools(pools: Sequence[PlannedPool], *, is_gpu_chosen: bool) -> str:
    """The same for the pools of a plan; `is_gpu_chosen`: there were several GPU types."""
    kind = pools[0].gpu
    if all(pool.gpu == kind for pool in pools):
        labels = " + ".join(map(format_pool, pools))
        return f"{labels} on {kind}" if is_gpu_chosen and kind else labels
    return " + ".join(format_pool(pool) + (f" on {pool.gpu}" if pool.gpu else "") for pool in pools)


def describe_pool(pool: PlannedPool) -> str:
    """`2 prefill instances, each on 8 A100-SXM-80GB (tensor 4, pipeline 2)`."""
    size = pool.parallelism
    instances = "instance" if pool.replicas == 1 else "instances, each"
    device = pool.gpu or ("GPU" if size.gpus == 1 else "GPUs")
    sizes = {"tensor": size.tensor, "pipeline": size.pipeline, "data": size.data}
    spread = [f"{name} {value}" for name, value in sizes.items() if value > 1]
    spread += ["experts distributed"] if size.expert else []
    detail = f" ({', '.join(spread)})" if spread else ""
    return f"{pool.replicas} {pool.role} {instances} on {size.gpus} x {device}{detail}"


def strip_verdict(result: PlanningResult) -> str:
    """The reason without the verdict, for places that show the verdict separately."""
    return result.reason.removeprefix(f"{VERDICT_TEXTS[result.verdict]}: ")


def format_number(value: float) -> str:
    """Three significant digits without an exponent: `0.0123`, `1.23`, `123`, `12,300`."""
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def format_ms(value: float) -> str:
    """`400 ms`, `1.25 s`; `never` for an infinite time."""
    if not math.isfinite(value):
        return "never"
    return f"{value / 1000:.2f} s" if value >= 1000 else f"{format_number(value)} ms"


def format_targets(slo: Slo | NearestSlo) -> str:
    """`TTFT 400 ms and TPOT 40 ms`, `TTFT 400 ms, TPOT P99 40 ms and ITL P99 60 ms`."""
    ttft, tpot = (slo.ttft_attainment, slo.tpot_attainment) if isinstance(slo, Slo) else (None,) * 2
    targets = [f"TTFT{_format_percentile(ttft)} {format_ms(slo.ttft_ms)}"]
    targets += [f"TPOT{_format_percentile(tpot)} {format_ms(slo.tpot_ms)}"]
    if slo.itl_p99_ms is not None:
        targets.append(f"ITL P99 {format_ms(slo.itl_p99_ms)}")
    return f"{', '.join(targets[:-1])} and {targets[-1]}"


def _format_percentile(share: float | None) -> str:
    return "" if share is None else f" P{100 * share:g}"


def format_percent(share: float) -> str:
    """`97.3 %`; never rounded up to 100."""
    return f"{math.floor(share * 1000 + 1e-9) / 10:g} %"


def format_attainment(prediction: Prediction) -> str:
    """`97.3 %`, `90 % +- 3` where other requests may be served much better or worse."""
    spread = round(100 * prediction.attainment_error)
    share = format_percent(prediction.attainment)
    return f"{share} +- {spread}" if prediction.attainment_error > WIDE_ERROR else share


def format_power(watts: float) -> str:
    """`2.4 kW`, `400 W`."""
    return f"{watts / 1000:.1f} kW" if watts >= 1000 else f"{watts:.0f} W"


def describe_trust(trust: Confidence, *, is_short: bool = False) -> str:
    """`kernels, TPOT 12 % off (P90 25 %), TTFT 15 % (P90 43 %); H100-SXM-80GB, vLLM 0.24.0`.
    `is_short`: without what is behind the semicolon."""
    stages = " in stages" if trust.has_stages else ""
    text = f"{trust.kind}{stages}, {_format_error(trust)}"
    return text if is_short else f"{text}; {trust.source}"


def _format_error(trust: Confidence) -> str:
    if trust.serving is not None:
        tpot, ttft = trust.serving
        first = f"TTFT {_format_spread(ttft, '')}" if ttft else "TTFT never compared"
        return f"TPOT {_format_spread(tpot, ' off')}, {first}"
    if trust.error is not None:
        return f"iterations {format_percent(trust.error)} off on average"
    return "never compared with measurements"


def _format_spread(spread: Spread, off: str) -> str:
    return f"{spread.median:.0%}{off} (P90 {spread.p90:.0%})".replace("%", " %")


def format_interval(prediction: Prediction) -> str:
    """The confidence interval of a goodput."""
    low, high = prediction.goodput_interval
    return f"{format_number(low)}-{format_number(high)} req/s"


def format_resources(resources: float, objective: Objective) -> str:
    """Resources in the unit of the objective."""
    if objective is Objective.GOODPUT_PER_GPU:
        return format_gpus(round(resources))
    return f"{format_number(resources)} {_UNITS[objective]}"


def format_gpus(count: int) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{count} GPU" if count == 1 else f"{count} GPUs"
