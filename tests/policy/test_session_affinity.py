"""Sessions that come back to their instance."""

import numpy as np

from cleave.policy.dispatch import NONE
from cleave.policy.session_affinity import find_session_instance, to_key

NAMES = [f"chat-prefill-{i}" for i in range(8)]
KEYS = np.array([to_key(name) for name in NAMES], np.uint64)
IDLE = np.zeros(8)
SESSIONS = [to_key(f"session-{i}") for i in range(400)]


def homes(scores: np.ndarray, keys: np.ndarray = KEYS) -> list[int]:
    return [find_session_instance(scores, keys, session, 1_000) for session in SESSIONS]


def test_a_session_comes_back_to_the_same_instance() -> None:
    assert homes(IDLE) == homes(IDLE)


def test_sessions_spread_over_all_instances() -> None:
    counts = np.bincount(homes(IDLE), minlength=8)
    assert counts.min() > 20


def test_only_sessions_of_an_instance_that_closes_move() -> None:
    closed = IDLE.copy()
    closed[3] = np.inf
    for before, after in zip(homes(IDLE), homes(closed), strict=True):
        assert after == before if before != 3 else after != 3


def test_only_sessions_for_a_new_instance_move() -> None:
    keys = np.append(KEYS, np.uint64(to_key("chat-prefill-8")))
    for before, after in zip(homes(IDLE), homes(np.zeros(9), keys), strict=True):
        assert after in (before, 8)


def test_a_queue_that_costs_more_than_coming_back_saves_is_left() -> None:
    busy = IDLE.copy()
    busy[3] = 900
    assert homes(busy) == homes(IDLE)
    busy[3] = 1_001
    assert 3 not in homes(busy)


def test_nothing_is_found_when_all_are_closed() -> None:
    assert find_session_instance(IDLE + np.inf, KEYS, 5, 10) == NONE
