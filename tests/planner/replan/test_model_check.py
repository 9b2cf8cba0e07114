"""Predictions held to what was seen, and models mended by it."""

from dataclasses import replace

import pytest

from cleave.perf.latency_correction import NO_CORRECTION, Correction
from cleave.planner.replan import replay
from cleave.planner.replan.model_check import MIN_RESPONSES, ModelAssessment, assess
from cleave.planner.replan.replay import ReplayModel
from cleave.planner.search import trials
from cleave.traffic.conversations import Conversations
from cleave.traffic.refit import to_demand

from tests.support.simulated_traffic import FLIPPING, TWO_PAIRS, Play, ask


def assess_play(play: Play, **more) -> ModelAssessment:
    windows = play.serve(**more)
    problem = replace(play.problem, demand=to_demand(windows).with_max_model_len(2048))
    return assess(problem, play.running, windows, play.correction)


@pytest.mark.parametrize("shape", ["Always", "Never"])
def test_a_model_that_is_right_holds_and_stays(shape: str) -> None:
    found = assess_play(Play(ask(shape)))
    assert found.holds
    assert abs(found.error) < 0.2
    assert found.correction.prefill == pytest.approx(1.0, abs=0.08)
    assert found.correction.decode == pytest.approx(1.0, abs=0.08)
    assert found.reason.startswith("the prediction holds within ")


@pytest.mark.parametrize(
    ("shape", "truth"),
    [
        ("Always", Correction(2.0, 1.0)),
        ("Always", Correction(1.0, 1.5)),
        ("Always", Correction(0.5, 0.5)),
        ("Never", Correction(2.0, 2.0)),
        ("Never", Correction(0.5, 0.5)),
    ],
    ids=str,
)
def test_a_wrong_model_is_reported_and_corrected_at_the_first_review(
    shape: str, truth: Correction
) -> None:
    found = assess_play(Play(ask(shape, 9.0), truth))
    assert not found.holds
    assert found.correction.prefill == pytest.approx(truth.prefill, rel=0.12)
    assert found.correction.decode == pytest.approx(truth.decode, rel=0.12)
    assert 1_500 < found.correction.num_requests < 3_000


def test_short_prompts_on_decode_instances_do_not_look_like_fast_prefill_instances() -> None:
    play = Play(ask("Always"), running=TWO_PAIRS)
    windows = play.serve()
    problem = replace(play.problem, demand=to_demand(windows).with_max_model_len(2048))
    assert assess(problem, play.running, windows).correction == NO_CORRECTION
    without = replace(play.running, whole_below_tokens=0)
    assert assess(problem, without, windows).correction.prefill < 0.95


def test_part_of_a_window_is_simulated_where_its_prompts_have_too_many_blocks(monkeypatch) -> None:
    unrepeated = ask("Never", rate=13.7)
    source = replace(unrepeated.demand.source, conversations=Conversations(6, 60, 64))
    problem = replace(unrepeated, demand=replace(unrepeated.demand, source=source))
    spans = []

    class Recorder(trials.Trials):
        def simulate(self, fleet, rate, span):
            spans.append(span)
            return super().simulate(fleet, rate, span)

    monkeypatch.setattr(replay, "Trials", Recorder)
    monkeypatch.setattr(trials, "_MAX_BLOCKS", 80_000)
    window = ReplayModel(problem, Play(unrepeated).running, 600.0).simulate(NO_CORRECTION)
    assert spans[0].total * problem.demand.blocks_per_prompt <= 80_000
    assert spans[0].counted > 500
    # Requests of the part that is simulated, not of the ten minutes.
    assert len(window.ttft_ms) == pytest.approx(spans[0].counted, rel=0.1)


def test_each_figure_is_shown_with_its_error() -> None:
    play = Play(ask("Always"), Correction(2.0, 1.0), running=TWO_PAIRS)
    found = assess_play(play)
    ttft, tpot = found.comparisons[:2], found.comparisons[2:]
    assert [each.name for each in found.comparisons] == [
        "P50 TTFT", "P90 TTFT", "P50 TPOT", "P90 TPOT",
    ]  # fmt: skip
    assert all(each.exceeds_threshold and each.error > 0.5 for each in ttft)
    # Decode instances compute short prompts, which take twice as long, too.
    assert all(not each.exceeds_threshold and 0.1 < each.error < 0.25 for each in tpot)
    assert "TTFT" in found.reason
    assert "ms were predicted; step times corrected by x" in found.reason


def test_where_decode_is_overloaded_prefill_is_left_alone() -> None:
    found = assess_play(Play(ask("Always"), Correction(1.0, 2.0)))
    assert found.comparisons[0].error > 10
    assert found.correction.prefill == 1.0
    assert found.correction.decode == pytest.approx(2.0, rel=0.1)


def test_queues_of_an_overload_that_was_foreseen_are_no_error_of_the_model() -> None:
    play = Play(ask("Always"), running=TWO_PAIRS)
    found = assess_play(play, demand=play.problem.demand.with_rate(40.0))
    assert found.attainment < 0.5
    assert found.holds
    assert found.correction.prefill == pytest.approx(1.0, abs=0.1)


def test_a_model_wrong_by_more_than_a_step_is_mended_in_several() -> None:
    play = Play(ask("Never", 0.7), Correction(5.0, 5.0))
    first = assess_play(play)
    assert first.correction.decode == pytest.approx(3.0, rel=0.02)
    play.correction = first.correction
    assert assess_play(play).correction.decode == pytest.approx(5.0, rel=0.12)


def test_factors_that_stand_at_a_limit_are_sought_within_it() -> None:
    patient = ask("Never", 0.2, slo={"ttftMs": 60_000, "tpotMs": 4_000})
    found = assess_play(Play(patient, Correction(9.0, 2.0), correction=Correction(8.0, 1.0)))
    assert not found.holds
    assert found.correction.prefill == pytest.approx(9.0, rel=0.12)
    assert found.correction.decode == pytest.approx(2.0, rel=0.12)


def test_few_answers_say_nothing() -> None:
    play = Play(ask("Always"), Correction(2.0, 2.0))
    windows = play.serve()[:1]
    assert windows[0].num_requests > MIN_RESPONSES
    few = replace(windows[0], ttft=replace(windows[0].ttft, counts=(99.0,) * 18))
    found = assess(play.problem, play.running, [few])
    assert (found.comparisons, found.error, found.correction) == ((), None, NO_CORRECTION)
    assert found.holds
    assert found.attainment > 0.9


def test_latencies_beside_a_batch_say_nothing_of_the_model() -> None:
    play = Play(ask("Always"), Correction(2.0, 2.0))
    windows = play.serve()
    tokens = sum(each.prompts.total + each.outputs.total for each in windows)
    for share, is_assessed in ((0.001, True), (1.0, False)):
        beside = [replace(each, flex_tokens=share * tokens / len(windows)) for each in windows]
        found = assess(play.problem, play.running, beside)
        assert (found.error is not None) is is_assessed
        assert ("share the engines" in found.reason) is not is_assessed
        assert (found.correction == NO_CORRECTION) is not is_assessed


@pytest.mark.parametrize("start_s", [0.0, 5.0, 10.0, 15.0])
def test_reviews_near_saturation_stay_where_they_are_right(start_s: float) -> None:
    """Decode instances are full for a while and free again: that is no error of prompts' times."""
    play = Play(ask("Always"), running=TWO_PAIRS, correction=Correction(1.3, 1.3), now_s=start_s)
    for _ in range(3):
        found = assess_play(play, demand=play.problem.demand.with_rate(18.0))
        play.correction = found.correction
    assert play.correction.prefill == pytest.approx(1.0, abs=0.1)
    assert play.correction.decode == pytest.approx(1.0, abs=0.05)


def test_pools_that_lend_are_foreseen_to_lend() -> None:
    problems = [ask("Always", rate=22.0), ask("Always", rate=22.0, pools=FLIPPING)]
    windows = Play(problems[0], running=TWO_PAIRS).serve()
    fixed, lent = (assess(each, TWO_PAIRS, windows) for each in problems)
    assert lent.attainment > fixed.attainment


def test_what_fails_by_the_model_and_in_fact_says_nothing_of_the_model() -> None:
    play = Play(ask("Always"), Correction(1.2, 1.2))
    found = assess_play(play, demand=play.problem.demand.with_rate(30.0))
    assert found.comparisons
    assert (found.holds, found.error, found.correction) == (True, None, NO_CORRECTION)
    assert found.reason == "latencies are changing, so the prediction is not assessed"


@pytest.mark.parametrize(("lends", "rate"), [(False, 18.0), (True, 20.0), (True, 24.0)])
def test_a_model_that_is_too_slow_is_seen_where_more_is_attained_than_it_allows(
    lends: bool, rate: float
) -> None:
    """Else it would find every plan failing, the one that runs among them, and stay."""
    problem = ask("Always", pools=FLIPPING) if lends else ask("Always")
    play = Play(problem, running=TWO_PAIRS)
    play.correction = Correction(1.3, 1.3)
    demand = play.problem.demand.with_rate(rate)
    found = assess_play(play, demand=demand)
    assert found.attainment < 0.4
    assert not found.holds
    # So near to saturation a queue that a flip has emptied hides some of what prompts take, and the
    # moments without prompts in which instances are lent differ for each correction.
    assert found.correction.prefill == pytest.approx(1.0, abs=0.3 if lends else 0.08)
    assert found.correction.decode == pytest.approx(1.0, abs=0.15 if lends else 0.08)
    play.correction = found.correction
    corrected = assess_play(play, demand=demand)
    assert corrected.holds
    assert corrected.attainment > found.attainment + 0.4
