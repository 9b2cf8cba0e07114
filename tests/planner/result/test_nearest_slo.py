"""The nearest SLO that holds."""

import pytest

from cleave.planner.problem import Problem
from cleave.planner.result import nearest_slo
from cleave.planner.search.candidates import list_candidates
from cleave.planner.search.trials import Targets

from tests.support import known_problems


def scale(problem: Problem, ttft_ms: float, tpot_ms: float, **own: float) -> float:
    search = known_problems.search(problem, Targets(ttft_ms, tpot_ms, 0.9, **own))
    found = nearest_slo.find_nearest_slo(search, list_candidates(problem))
    assert found is not None
    scaled = ttft_ms * found.scale, tpot_ms * found.scale
    assert found.ttft_ms in (ttft_ms, scaled[0])
    assert found.tpot_ms in (tpot_ms, scaled[1])
    assert (found.ttft_ms, found.tpot_ms) != (ttft_ms, tpot_ms)
    return found.scale


def test_twice_as_tight_an_slo_is_twice_as_far() -> None:
    problem = known_problems.blog(rate=4.0)
    assert scale(problem, 10, 2) == pytest.approx(2 * scale(problem, 20, 4), rel=0.12)


def test_a_percentile_of_one_latency_is_farther_than_that_of_both() -> None:
    problem = known_problems.blog(rate=4.0)
    assert scale(problem, 20, 40, ttft_attainment=0.999) > 1.1 * scale(problem, 20, 40)


def test_the_slo_found_is_near_the_fastest_passes_there_are() -> None:
    # TP 4 decodes one token in 10.4 ms at 544 tokens of context: no plan is faster.
    assert scale(known_problems.blog(rate=1.0), 400, 5) >= 10.3 / 5


def test_a_rate_beyond_all_gpus_has_no_nearest_slo() -> None:
    problem = known_problems.problem(
        known_problems.chat(rate=500.0), supplies=(known_problems.nodes(1),)
    )
    search = known_problems.search(problem)
    assert nearest_slo.find_nearest_slo(search, list_candidates(problem)) is None


def test_a_multiple_beyond_a_hundred_is_found_as_well() -> None:
    # 400 ms and 30 ms, given in seconds: a thousand times that holds with room.
    found = scale(known_problems.blog(rate=1.0), 0.4, 0.03)
    assert 100 < found < 1000


def test_a_target_that_is_met_stays_as_it_is() -> None:
    problem = known_problems.blog(rate=1.0)
    search = known_problems.search(problem, Targets(20, 60, 0.9))
    found = nearest_slo.find_nearest_slo(search, list_candidates(problem))
    assert found is not None
    assert found.tpot_ms == 60
    assert found.ttft_ms == pytest.approx(20 * found.scale)


def test_the_nearest_slo_is_never_tighter_than_the_one_that_is_missed() -> None:
    # A short trial finds this SLO feasible; the search asks only where long ones did not.
    problem = known_problems.blog(rate=1.0)
    assert 1 < scale(problem, 400, 40) < 1.02
