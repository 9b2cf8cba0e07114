import pytest

from cleave.local.kubelet.cpu_manager import CoreShortageError, allocate, shared


def test_the_lowest_free_cores_are_given_out() -> None:
    assert allocate(frozenset({5, 1, 3}), 2) == {1, 3}
    assert allocate(frozenset({5}), 0) == frozenset()


def test_a_shortage_states_both_numbers() -> None:
    with pytest.raises(CoreShortageError, match=r"3 exclusive core\(s\) needed, 1 free"):
        allocate(frozenset({0}), 3)


def test_pods_without_cores_share_the_rest_or_everything_when_there_is_no_rest() -> None:
    every = frozenset({0, 1, 2})
    assert shared(every, frozenset({0})) == {1, 2}
    assert shared(every, every) == every
