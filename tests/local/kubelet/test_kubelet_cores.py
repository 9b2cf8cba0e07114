import pytest

from cleave.local.kubelet.kubelet import CoreShortageError, allocate_cores, get_shared_cores


def test_the_lowest_free_cores_are_given_out() -> None:
    assert allocate_cores(frozenset({5, 1, 3}), 2) == {1, 3}
    assert allocate_cores(frozenset({5}), 0) == frozenset()


def test_a_shortage_states_both_numbers() -> None:
    with pytest.raises(CoreShortageError, match=r"3 exclusive core\(s\) needed, 1 free"):
        allocate_cores(frozenset({0}), 3)


def test_pods_without_cores_share_the_rest_or_everything_when_there_is_no_rest() -> None:
    every = frozenset({0, 1, 2})
    assert get_shared_cores(every, frozenset({0})) == {1, 2}
    assert get_shared_cores(every, every) == every
