"""Algorithm 2: who moves when predictions went wrong."""

from hypothesis import given
from hypothesis import strategies as st

from cleave.policy.rebalancing import Error, New, Ongoing, find_errors, rebalance

K2, C2 = 0.01, 1.0


def test_an_output_that_is_longer_than_predicted_makes_its_instance_fuller() -> None:
    errors = find_errors([Ongoing(1, predicted=100, made=120, ended=False)], [300], 2)
    assert errors == [Error(), Error(300, 1)]


def test_an_output_that_ended_early_makes_its_instance_emptier() -> None:
    errors = find_errors([Ongoing(0, predicted=100, made=40, ended=True)], [0], 2)
    assert errors == [Error(-60, -1), Error()]


def test_an_output_as_predicted_is_no_error() -> None:
    ongoing = [Ongoing(0, 100, 50, False), Ongoing(0, 100, 100, True)]
    assert find_errors(ongoing, [0, 0], 1) == [Error()]


def test_new_requests_leave_an_overfull_instance_for_an_emptier_one() -> None:
    errors = [Error(400, 2), Error(), Error(-400, -2)]
    assert rebalance([New(0, 300), New(1, 300)], errors, K2, C2) == {0: 2}


def test_nothing_moves_when_all_went_as_predicted() -> None:
    assert rebalance([New(0, 300), New(1, 10)], [Error(), Error()], K2, C2) == {}


def test_with_one_instance_there_is_nowhere_to_go() -> None:
    assert rebalance([New(0, 300)], [Error(900, 3)], K2, C2) == {}


@given(
    st.lists(
        st.tuples(st.floats(-2_000, 2_000), st.integers(-4, 4)).map(lambda e: Error(*e)),
        min_size=1,
        max_size=6,
    ),
    st.data(),
)
def test_moves_never_add_to_the_sum_of_distances(errors: list[Error], data: st.DataObject) -> None:
    slots = st.integers(0, len(errors) - 1)
    new = data.draw(st.lists(st.builds(New, slots, st.floats(1, 2_000)), max_size=8))
    moves = rebalance(new, errors, K2, C2)
    off = [error.find_ms(K2, C2) for error in errors]
    before = sum(map(abs, off))
    for index, there in moves.items():
        ms = K2 * new[index].predicted + C2
        off[new[index].instance] -= ms
        off[there] += ms
    assert sum(map(abs, off)) <= before + 1e-6
