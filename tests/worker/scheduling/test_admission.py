"""Admission by what answers are predicted to need."""

from hypothesis import given
from hypothesis import strategies as st

from cleave.policy.admission import Admission
from cleave_worker.scheduling.admission import EngineAdmission, RequestLengths

RESERVE = [Admission.RESERVE_STATIC, Admission.RESERVE_DYNAMIC]


def test_before_anything_is_learnt_the_limit_counts() -> None:
    admitting = EngineAdmission()
    request = RequestLengths(prompt=50, generated=0, limit=100)
    for admission in RESERVE:
        assert admitting.may_join(admission, 149, request, list)
        assert not admitting.may_join(admission, 148, request, list)


def test_answers_that_ended_early_make_room_for_more() -> None:
    admitting = EngineAdmission()
    for _ in range(64):
        admitting.learn(RequestLengths(prompt=50, generated=10, limit=100))
    request = RequestLengths(prompt=50, generated=0, limit=100)
    assert admitting.may_join(Admission.RESERVE_STATIC, 60, request, list)
    assert not admitting.may_join(Admission.RESERVE_STATIC, 58, request, list)


def test_greedy_lets_the_blocks_decide() -> None:
    assert EngineAdmission().may_join(Admission.GREEDY, 0, RequestLengths(9, 0, 9), list)


@given(
    st.sampled_from(RESERVE),
    st.integers(1, 100),
    st.integers(0, 99),
    st.integers(1, 100),
    st.lists(st.integers(1, 200)),
)
def test_an_empty_engine_admits_a_request_that_fits_alone_after_any_history(
    admission: Admission, prompt: int, generated: int, more: int, seen: list[int]
) -> None:
    admitting = EngineAdmission()
    for output in seen:
        admitting.learn(RequestLengths(prompt, output, 200))
    request = RequestLengths(prompt, generated, generated + more)
    assert admitting.may_join(admission, prompt + generated + more - 1, request, list)


ALONE = 10.0
"""ms of an iteration of one request; of the 40 ms to a target of 50, 38 are filled."""


def test_decode_iterations_stay_within_the_target() -> None:
    admitting = EngineAdmission()
    assert admitting.keeps_tpot(47.0, ALONE, 0.0, 50.0, False, [])
    assert not admitting.keeps_tpot(49.0, ALONE, 0.0, 50.0, False, [])
    assert admitting.keeps_tpot(39.0, ALONE, 0.0, 50.0, True, [])
    assert not admitting.keeps_tpot(41.0, ALONE, 0.0, 50.0, True, []), "room for those in time"
    assert admitting.keeps_tpot(0.0, 0.0, 0.0, 50.0, False, []), "nothing is known yet"


def test_late_requests_join_where_an_iteration_alone_takes_most_of_the_target() -> None:
    admitting = EngineAdmission()
    assert admitting.keeps_tpot(47.0, 42.0, 0.0, 50.0, True, [])
    assert not admitting.keeps_tpot(49.0, 42.0, 0.0, 50.0, True, [])
    assert not admitting.keeps_tpot(62.0, 60.0, 0.0, 50.0, False, []), "not to be met at all"


def test_a_prompt_waits_until_decoding_requests_have_saved_its_time() -> None:
    admitting = EngineAdmission()

    def joins(generated: int, prompt_ms: float = 300.0) -> bool:
        # Iterations of 20 ms, where 48 ms are allowed; the last token of 100.
        lengths = RequestLengths(50, generated, generated + 1)
        decoding = [(lengths, 20.0 * (generated - 1))]
        return admitting.keeps_tpot(20.0, ALONE, prompt_ms, 50.0, False, decoding)

    assert not joins(generated=9)
    assert joins(generated=10)
    assert joins(generated=1, prompt_ms=50.0)


def test_a_request_that_can_still_make_up_for_it_lets_a_prompt_in() -> None:
    admitting, early = EngineAdmission(), RequestLengths(50, 1, 101)
    # A fifth of 100 times 28 ms.
    assert admitting.keeps_tpot(20.0, ALONE, 550.0, 50.0, False, [(early, 0.0)])
    assert not admitting.keeps_tpot(20.0, ALONE, 620.0, 50.0, False, [(early, 0.0)])


def test_a_request_that_has_lost_its_target_delays_no_prompt() -> None:
    admitting, lost = EngineAdmission(), RequestLengths(50, 99, 100)

    def joins(behind_ms: float) -> bool:
        decoding = [(lost, 48.0 * 99 + behind_ms)]
        return admitting.keeps_tpot(20.0, ALONE, 300.0, 50.0, False, decoding)

    assert not joins(behind_ms=400.0)
    assert joins(behind_ms=600.0)
