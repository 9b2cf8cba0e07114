"""Plans side by side."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cleave.report.tradeoffs import build_frontier_chart, build_tradeoff_chart, find_pareto_front


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=30))
def test_nothing_beats_the_frontier_and_all_else_is_beaten(points) -> None:
    front = find_pareto_front(points)
    for place, (cost, worth) in enumerate(points):
        beaten = any(c <= cost and w >= worth for c, w in (points[i] for i in front))
        assert beaten
        if place in front:
            assert not any(c <= cost and w >= worth and (c, w) != (cost, worth) for c, w in points)


def test_without_prices_the_frontier_counts_gpus(study) -> None:
    def free(plan):
        return replace(plan, prediction=replace(plan.prediction, cost_per_hour=0.0))

    answer = replace(
        study.result,
        selected=free(study.result.selected),
        alternatives=tuple(map(free, study.result.alternatives)),
    )
    chart = build_frontier_chart(replace(study, result=answer))
    assert chart.heading[1] == "GPUs"
    assert chart.rows[0][1] == "6.00"


def test_latencies_that_lie_far_apart_get_a_logarithmic_axis(study) -> None:
    slow = study.result.alternatives[0]
    late = replace(slow.prediction, ttft_ms=replace(slow.prediction.ttft_ms, p90=90_000.0))
    answer = replace(study.result, alternatives=(replace(slow, prediction=late),))
    assert (
        build_tradeoff_chart(replace(study, result=answer), "ttft").figure.layout.xaxis.type
        == "log"
    )
    near = replace(study.result, alternatives=study.result.alternatives[:3])
    assert (
        build_tradeoff_chart(replace(study, result=near), "ttft").figure.layout.xaxis.type is None
    )
