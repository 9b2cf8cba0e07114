"""The simulator and the formulas side by side in an answer."""

from dataclasses import replace

import numpy as np

from cleave.planner.problem import Problem
from cleave.planner.result import md1_crosscheck
from cleave.planner.result.prediction import PredictedPlan, predict
from cleave.planner.search.trials import CONFIRMATION_PRECISION

from tests.support import known_problems


def predicted(
    problem: Problem, n: int = 1, m: int = 2, size: tuple[int, int] = (1, 1)
) -> PredictedPlan:
    draft = known_problems.split(
        problem, known_problems.of_size(problem, *size), n, known_problems.of_size(problem, 2), m
    )
    search = known_problems.search(problem).with_precision(CONFIRMATION_PRECISION)
    return predict(search, draft, "Algorithm 1")


def test_equal_prompts_on_one_instance_agree_with_the_formula() -> None:
    for size in ((1, 1), (1, 2)):
        finalist = predicted(known_problems.blog(rate=8.0), size=size)
        assert md1_crosscheck.compute_expected_prefill_ms(finalist) is not None
        assert list(md1_crosscheck.list_disagreements(finalist)) == []


def test_a_difference_is_reported_with_both_figures() -> None:
    finalist = predicted(known_problems.blog(rate=8.0))
    late = replace(
        finalist,
        outcome=replace(finalist.outcome, prefill_end_ms=finalist.outcome.prefill_end_ms + 50),
    )
    (disagreement,) = md1_crosscheck.list_disagreements(late)
    assert "by the M/D/1 formula" in disagreement


def test_prompts_of_different_length_or_several_instances_are_not_checked() -> None:
    assert (
        md1_crosscheck.compute_expected_prefill_ms(
            predicted(known_problems.problem(known_problems.chat(5.0)))
        )
        is None
    )
    assert (
        md1_crosscheck.compute_expected_prefill_ms(predicted(known_problems.blog(rate=8.0), n=2))
        is None
    )


def test_figures_of_a_prediction_are_those_of_its_simulation() -> None:
    finalist = predicted(known_problems.blog(rate=8.0))
    seen, window = finalist.plan.prediction, finalist.span.window
    ttft_ms = finalist.outcome.ttft_ms[window]
    assert seen.ttft_ms.p90 == np.quantile(ttft_ms, 0.9, method="higher")
    assert finalist.holds(0.9) == (seen.attainment >= 0.9)
