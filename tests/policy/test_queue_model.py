"""Own books and stale reports, added up without counting anything twice; how fast queues are."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.policy.queue_model import (
    DEFAULT_SUMS,
    DEFAULT_TOKEN_MS,
    INTERVAL_MS,
    MAX_INTERVAL_MS,
    OutstandingTokens,
    PrefillQueueModel,
    add_completion,
    choose_report_interval_ms,
    estimate_pending,
    fit_prompt_times,
)

amounts = st.integers(0, 1_000_000)


def test_a_router_that_alone_sends_requests_gets_fewer_reports() -> None:
    assert choose_report_interval_ms(INTERVAL_MS, 1) == MAX_INTERVAL_MS
    assert choose_report_interval_ms(INTERVAL_MS, 2) == INTERVAL_MS
    assert choose_report_interval_ms(INTERVAL_MS, 0) == INTERVAL_MS


def test_no_watcher_gets_reports_more_often_than_requested() -> None:
    assert choose_report_interval_ms(400, 1) == MAX_INTERVAL_MS
    assert choose_report_interval_ms(60_000, 1) == 60_000


def test_others_work_is_added_to_own() -> None:
    # 1,000 reported of which 300 were ours; 200 more of ours since.
    assert estimate_pending(own=500, reported=1_000, own_at_report=300) == 1_200


def test_work_the_engine_has_done_already_is_not_counted_as_negative_work_of_others() -> None:
    assert estimate_pending(own=500, reported=100, own_at_report=500) == 500


@given(amounts, amounts, amounts)
def test_an_estimate_is_never_below_own_books_nor_above_the_sum(own, reported, at_report) -> None:
    estimate = estimate_pending(own, reported, at_report)
    assert own <= estimate <= own + reported


@given(amounts, amounts)
def test_a_report_of_own_work_alone_adds_nothing(own: int, later: int) -> None:
    book = OutstandingTokens()
    book.add(own)
    book.update_from_report(own)
    book.add(later)
    assert book.pending == own + later


@given(st.lists(st.tuples(amounts, st.booleans()), max_size=60), amounts)
def test_books_come_back_to_zero_and_leave_what_others_had(steps, others: int) -> None:
    """In any order of dispatches, releases and reports."""
    book, open_requests = OutstandingTokens(), []
    for tokens, release_one in steps:
        book.add(tokens)
        open_requests.append(tokens)
        book.update_from_report(sum(open_requests) + others)
        assert book.pending == sum(open_requests) + others
        if release_one:
            book.remove(open_requests.pop(0))
    for tokens in open_requests:
        book.remove(tokens)
    assert book.own == 0
    book.update_from_report(others)
    assert book.pending == others


def teach(answers: list[tuple[float, float]]) -> PrefillQueueModel:
    """A queue that was always full, and these prompts: (tokens, ms since the one before)."""
    queue, now_ms = PrefillQueueModel(), 0.0
    for tokens, ms in answers:
        now_ms += ms
        assert queue.observe_completion(tokens, now_ms) == pytest.approx(ms, abs=1e-6)
    return queue


def draw_lengths(seed: int, count: int = 600) -> list[float]:
    rng = random.Random(seed)
    return [round(rng.lognormvariate(6.5, 1.0)) + 1.0 for _ in range(count)]


@pytest.mark.parametrize(("prompt_ms", "token_ms"), [(10.0, 0.1), (0.0, 0.02), (80.0, 0.5)])
def test_time_per_prompt_is_separated_from_time_per_token(
    prompt_ms: float, token_ms: float
) -> None:
    queue = teach([(tokens, prompt_ms + token_ms * tokens) for tokens in draw_lengths(1)])
    assert queue.prompt_ms == pytest.approx(prompt_ms, rel=0.02, abs=0.1)
    assert queue.token_ms == pytest.approx(token_ms, rel=0.01)
    assert queue.upper_token_ms == pytest.approx(token_ms, rel=0.06)


def test_without_other_lengths_all_time_counts_as_token_time() -> None:
    queue = teach([(500.0, 60.0)] * 300)
    assert queue.predict_ms(500.0, 1.0) == pytest.approx(60.0, rel=1e-3)
    assert queue.token_ms == pytest.approx(60.0 / 500.0, rel=0.02)


def test_prompts_of_one_pass_are_not_mistaken_for_prompts_that_take_no_time() -> None:
    lengths = iter(draw_lengths(2))
    answers = []
    for first, second, third in zip(lengths, lengths, lengths, strict=True):
        together_ms = 12.0 + 0.1 * (first + second + third)
        answers += [(first, together_ms), (second, 0.0), (third, 0.001)]
    queue = teach(answers)
    assert queue.prompt_ms == pytest.approx(12.0 / 3, rel=0.1)
    assert queue.token_ms == pytest.approx(0.1, rel=0.02)


def test_the_less_lengths_explain_the_later_a_queue_is_said_to_be_through() -> None:
    """The rest of an overdue prompt is unknown."""
    rng, margins = random.Random(3), []
    for error in (0.0, 0.1, 0.3):
        answers = [
            (tokens * rng.lognormvariate(0.0, error), 10.0 + 0.1 * tokens)
            for tokens in draw_lengths(3)
        ]
        queue = teach(answers)
        margins.append(queue.upper_token_ms / queue.token_ms)
    assert margins[0] < 1.03
    assert margins[0] + 0.05 < margins[1] < margins[2] - 0.05 < 1.95


@given(
    st.lists(
        st.tuples(
            st.floats(1, 200_000),
            st.one_of(st.just(0.0), st.floats(1e-3, 1e6)),
        ),
        max_size=60,
    )
)
def test_times_are_finite_and_right_on_average_for_any_prompts(answers) -> None:
    sums = DEFAULT_SUMS
    for tokens, ms in answers:
        sums = add_completion(sums, tokens, ms)
        prompt_ms, token_ms, safe_ms = fit_prompt_times(sums)
        assert 0.0 <= prompt_ms < float("inf")
        # All that is left may be the last digit of what was taken off.
        assert -1e-9 * sums[4] / sums[2] <= token_ms <= safe_ms < float("inf")
        total_ms = prompt_ms * sums[1] + token_ms * sums[2]
        # Sums of 1e7 ms are exact to 2e-9.
        assert total_ms == pytest.approx(sums[4], rel=1e-12, abs=1e-9)


def test_prompts_that_were_cached_in_full_teach_nothing() -> None:
    queue = teach([(0.0, 5_000.0)] * 10)
    assert (queue.prompt_ms, queue.token_ms) == (0.0, DEFAULT_TOKEN_MS)


def test_before_anything_is_learnt_the_nominal_rate_counts() -> None:
    prompt_ms, token_ms, safe_ms = fit_prompt_times(DEFAULT_SUMS)
    assert prompt_ms == pytest.approx(0.0, abs=1e-9)
    assert token_ms == pytest.approx(DEFAULT_TOKEN_MS)
    assert safe_ms == pytest.approx(DEFAULT_TOKEN_MS, rel=1e-3)
