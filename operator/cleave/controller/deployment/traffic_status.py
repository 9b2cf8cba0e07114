"""Reports recent traffic in the status, and whether it met the SLO. Pure; called by the
deployment's status report.

Traffic always varies, and every write of the status wakes all watchers. So it is written at most
once a minute, and only when a figure has changed by more than 5 %, the SLO is met no longer, or
again, or the last write is five minutes old. Less than a minute of traffic replaces no figures that
still count. The condition follows from what is written, and is Unknown once that is too old: then
no gateway responds.
"""

from cleave.api.deployment import LLMDeployment, Slo
from cleave.api.plan import LatencyPercentiles
from cleave.api.replan_status import ObservedLengths, ObservedTraffic
from cleave.controller.cluster.conditions import PROMETHEUS_READ, SLO_ATTAINED, ConditionState
from cleave.controller.cluster.objects import format_timestamp, parse_timestamp
from cleave.controller.cluster.traffic_scraper import RECENT_WINDOWS
from cleave.controller.replan.reconcile import is_enabled
from cleave.controller.views import DeploymentView
from cleave.manifests.labels import Manifest
from cleave.traffic.counters import Buckets
from cleave.traffic.reuse_fit import get_repeated_share
from cleave.traffic.window import MIN_GAPS, TrafficWindow

_MIN_MEASURED = 20
"""In fewer responses, one slow one decides."""
_MIN_CHANGE = 0.05
"""Relative change below which figures count as equal."""
_MIN_MINUTE = 0.9
"""Share of a minute that figures need to replace others that are not too old."""
_REWRITE_S = 300.0
"""Age from which unchanged figures are written again, so that their time says they are known."""
_STALE_S = 600.0
"""Age from which figures say nothing about the present."""


def report_traffic(view: DeploymentView) -> Manifest | None:
    """Return `status.observed`; None: traffic is not known."""
    if not is_enabled(view.deployment):
        return None
    previous: Manifest | None = view.status.get("observed")
    if view.traffic is None:
        return previous
    age_s = _compute_age_s(previous, view.now_s) if previous is not None else 0.0
    minute_s = RECENT_WINDOWS * view.settings.traffic_poll_s
    # A new operator begins with a window of a few seconds, in which too few requests end.
    is_partial = view.traffic.length_s < _MIN_MINUTE * minute_s and age_s <= _STALE_S
    if previous is not None and (age_s < minute_s or is_partial):
        return previous
    current = _to_status(view.traffic, view.now_s)
    if previous is None or age_s >= _REWRITE_S or _has_changed(previous, current):
        return current
    slo = view.deployment.spec.slo
    return (
        previous if _compare_with_slo(previous, slo) == _compare_with_slo(current, slo) else current
    )


def build_slo_condition(
    deployment: LLMDeployment, observed: Manifest | None, now_s: float
) -> list[ConditionState]:
    """The condition SLOAttained from `observed` (status.observed); none without."""
    if observed is None:
        return []
    if _compute_age_s(observed, now_s) > _STALE_S:
        text = f"no gateway has reported its traffic since {observed.get('at')}"
        return [ConditionState(SLO_ATTAINED, None, "NotObserved", text)]
    slo = deployment.spec.slo
    is_met, reason = _compare_with_slo(observed, slo)
    targets = f"TTFT {slo.ttft_ms:g} ms and TPOT {slo.tpot_ms:g} ms"
    share = observed.get("attainment")
    if share is None:
        text = f"no response was measured against {targets}; only streams are"
    else:
        text = f"{share:.1%} of the measured requests were within {targets}, "
        text += f"target {slo.attainment:.1%}{_describe_own_targets(observed, slo)}; "
        text += f"{observed['rate']:g} req/s"
    return [ConditionState(SLO_ATTAINED, is_met, reason, text)]


def build_prometheus_condition(fault: str | None) -> list[ConditionState]:
    """The condition PrometheusRead; `fault`: what Prometheus did not have, None: it was not asked,
    so there is no condition."""
    if fault is None:
        return []
    if fault:
        text = f"{fault}; the operator reads the gateways themselves instead"
        return [ConditionState(PROMETHEUS_READ, False, "NotRead", text)]
    text = "Prometheus has recent counters of all gateways"
    return [ConditionState(PROMETHEUS_READ, True, "Read", text)]


def _compute_age_s(observed: Manifest, now_s: float) -> float:
    return now_s - (parse_timestamp(observed.get("at")) or 0.0)


def _compare_with_slo(observed: Manifest, slo: Slo) -> tuple[bool | None, str]:
    """Status and reason of the condition."""
    share = observed.get("attainment")
    if share is None:
        return None, "NotMeasured"
    # An earlier version did not write how many were measured.
    if observed.get("measured", observed["rate"] * observed["windowS"]) < _MIN_MEASURED:
        return None, "TooFewRequests"
    # An earlier version wrote none of these.
    own = observed.get("ttftAttainment", 1.0), observed.get("tpotAttainment", 1.0)
    is_met = slo.is_met(share, *own, _get_itl_p99_ms(observed) or 0.0)
    return (True, "Attained") if is_met else (False, "Missed")


def _describe_own_targets(observed: Manifest, slo: Slo) -> str:
    text = ""
    for name, share, target in (
        ("TTFT", observed.get("ttftAttainment"), slo.ttft_attainment),
        ("TPOT", observed.get("tpotAttainment"), slo.tpot_attainment),
    ):
        if share is not None and target is not None:
            text += f"; within {name} {share:.1%}, target {target:.1%}"
    if slo.itl_p99_ms is None:
        return text
    itl_ms = _get_itl_p99_ms(observed)
    found = "of too few gaps to tell" if itl_ms is None else f"{itl_ms:g} ms"
    return f"{text}; ITL P99 {found}, target {slo.itl_p99_ms:g} ms"


def _get_itl_p99_ms(observed: Manifest) -> float | None:
    """None: too few gaps were timed, or an earlier version wrote this."""
    return (observed.get("itlMs") or {}).get("p99")


def _to_status(traffic: TrafficWindow, now_s: float) -> Manifest:
    repeated = get_repeated_share(traffic.reuse)
    observed = ObservedTraffic.model_validate(
        {
            "at": format_timestamp(now_s),
            "window_s": round(traffic.length_s, 1),
            "rate": _round(traffic.rate),
            "prompt_tokens": _summarize_lengths(traffic.prompts),
            "output_tokens": _summarize_lengths(traffic.outputs),
            "repeated_share": None if repeated is None else _round(repeated),
            "attainment": _divide(traffic.attained, traffic.measured),
            "ttft_attainment": _divide(traffic.ttft_attained, traffic.measured),
            "tpot_attainment": _divide(traffic.tpot_attained, traffic.measured),
            "measured": _round(traffic.measured) if traffic.measured else None,
            "ttft_ms": _summarize_latency(traffic.ttft),
            "tpot_ms": _summarize_latency(traffic.tpot),
            "itl_ms": _summarize_latency(traffic.itl) if traffic.itl.num >= MIN_GAPS else None,
        }
    )
    return observed.model_dump(mode="json", exclude_none=True)


def _divide(attained: float, measured: float) -> float | None:
    return round(attained / measured, 4) if measured else None


def _summarize_lengths(buckets: Buckets) -> ObservedLengths | None:
    if not buckets.num:
        return None
    mean, p90 = _round(buckets.mean or 0.0), buckets.compute_quantile(0.9)
    return ObservedLengths(mean=mean, p90=None if p90 is None else _round(p90))


def _summarize_latency(buckets: Buckets) -> LatencyPercentiles | None:
    if not buckets.num:
        return None
    p50, p90, p99 = (_round(buckets.compute_quantile_ms(at) or 0.0) for at in (0.5, 0.9, 0.99))
    return LatencyPercentiles(p50=p50, p90=p90, p99=p99)


def _has_changed(before: Manifest, now: Manifest) -> bool:
    """Whether a figure has changed; time and size of the window do not count."""
    for key in (before.keys() | now.keys()) - {"at", "windowS", "measured"}:
        one, other = before.get(key), now.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            has_moved = _has_changed(one, other)
        elif isinstance(one, int | float) and isinstance(other, int | float):
            has_moved = abs(one - other) > _MIN_CHANGE * max(abs(one), abs(other))
        else:
            has_moved = one != other
        if has_moved:
            return True
    return False


def _round(value: float) -> float:
    """Round to three significant digits."""
    return float(f"{value:.3g}")
