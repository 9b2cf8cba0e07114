"""The simulator and the formulas side by side in an answer."""

from dataclasses import replace

import numpy as np

from cleave.planner import crosscheck
from cleave.planner.predict import Finalist, predict
from cleave.planner.problem import Problem
from cleave.planner.trials import CONFIRMED, Trials

from tests.support import worlds


def predicted(asked: Problem, n: int = 1, m: int = 2, size: tuple[int, int] = (1, 1)) -> Finalist:
    draft = worlds.split(asked, worlds.of_size(asked, *size), n, worlds.of_size(asked, 2), m)
    trials = Trials(asked.demand, precision=CONFIRMED)
    return predict(asked, trials, draft, worlds.targets(asked), "Algorithm 1")


def test_equal_prompts_on_one_instance_agree_with_the_formula() -> None:
    for size in ((1, 1), (1, 2)):
        finalist = predicted(worlds.blog(rate=8.0), size=size)
        assert crosscheck.expected_prefill_ms(finalist) is not None
        assert list(crosscheck.disagreements(finalist)) == []


def test_a_difference_is_told_with_both_figures() -> None:
    finalist = predicted(worlds.blog(rate=8.0))
    late = replace(
        finalist,
        outcome=replace(finalist.outcome, prefill_end_ms=finalist.outcome.prefill_end_ms + 50),
    )
    (told,) = crosscheck.disagreements(late)
    assert "by the M/D/1 formula" in told


def test_unlike_prompts_or_several_instances_are_not_checked() -> None:
    assert crosscheck.expected_prefill_ms(predicted(worlds.problem(worlds.chat(5.0)))) is None
    assert crosscheck.expected_prefill_ms(predicted(worlds.blog(rate=8.0), n=2)) is None


def test_figures_of_a_prediction_are_those_of_its_simulation() -> None:
    finalist = predicted(worlds.blog(rate=8.0))
    seen, window = finalist.plan.prediction, finalist.span.window
    ttft_ms = finalist.outcome.ttft_ms[window]
    assert seen.ttft_ms.p90 == np.quantile(ttft_ms, 0.9, method="higher")
    assert finalist.holds(0.9) == (seen.attainment >= 0.9)
