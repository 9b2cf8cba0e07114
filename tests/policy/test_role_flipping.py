"""Role flipping between pools: which instances flip, which return, and that none flaps."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.policy import role_flipping
from cleave.policy.role_flipping import (
    DECODE,
    MIXED,
    NONE,
    PREFILL,
    FlipThresholds,
    Members,
    PressureHistory,
)

TERMS = FlipThresholds(wait_ms=100.0, rise_ms=1_000.0)
SECOND_MS = 1_000.0


def fleet(prefill: int = 2, decode: int = 2, mixed: int = 0) -> Members:
    """All at home, open, and without work."""
    members = role_flipping.build_members(prefill + decode + mixed)
    members["configured_role"] = members["role"] = (
        [PREFILL] * prefill + [DECODE] * decode + [MIXED] * mixed
    )
    members["is_open"] = 1
    return members


class Manager:
    """Decides each second, as a router's does."""

    def __init__(self, members: Members, terms: FlipThresholds = TERMS) -> None:
        self.members, self.terms = members, terms
        self.watch: PressureHistory = role_flipping.build_pressure_history()
        self.now_ms = 0.0
        self.flips: list[tuple[float, int, int]] = []

    def set(self, side: int, pressure: float) -> None:
        """All that serve this side are under so much pressure."""
        serve = self.members["role"] != 1 - side
        name, unit = ("use", 1.0) if side else ("wait_ms", self.terms.wait_ms)
        self.members[name] = np.where(serve, pressure * unit, 0.0)

    def run(self, seconds: int = 1) -> list[tuple[int, int]]:
        done = []
        for _ in range(seconds):
            self.now_ms += SECOND_MS
            slot, role = role_flipping.decide(self.members, self.watch, self.terms, self.now_ms)
            if slot != NONE:
                role_flipping.record_role(self.members, slot, role, self.now_ms)
                self.flips.append((self.now_ms, slot, role))
                done.append((slot, role))
        return done


@pytest.mark.parametrize(("ttft_ms", "wait_ms"), [(200, 200), (2_500, 2_500), (0, 250)])
def test_prompts_wait_until_they_are_late_before_others_help(
    ttft_ms: float, wait_ms: float
) -> None:
    assert role_flipping.build_thresholds(ttft_ms).wait_ms == wait_ms


def test_without_pressure_no_instance_flips() -> None:
    manager = Manager(fleet())
    manager.set(0, 0.9)
    assert manager.run(600) == []


def test_prompts_that_wait_get_the_emptiest_decode_instance() -> None:
    manager = Manager(fleet())
    manager.set(0, 1.5)
    manager.members["use"][2:] = 0.5, 0.3
    assert manager.run() == [], "it might be a burst"
    assert manager.run() == [(3, MIXED)]


def test_full_decode_instances_get_help_from_a_prefill_instance_without_prompts() -> None:
    manager = Manager(fleet())
    manager.set(1, 1.2)
    manager.members["wait_ms"][:2] = 30.0, 0.0
    assert manager.run(2) == [(1, MIXED)]


def test_prefill_instances_that_get_prompt_after_prompt_help_none() -> None:
    manager = Manager(fleet())
    manager.set(1, 1.2)
    for second in range(600):
        manager.members["wait_ms"][:2] = (1.0, 0.0) if second % 2 else (0.0, 1.0)
        assert manager.run() == []


def test_a_pressed_role_lends_no_instance() -> None:
    manager = Manager(fleet())
    manager.members["wait_ms"], manager.members["use"] = 500.0, 2.0
    assert manager.run(600) == []


def test_more_instances_flip_one_by_one_and_some_stay() -> None:
    manager = Manager(fleet(decode=3), TERMS._replace(min_decode=1))
    for _ in range(10):
        manager.set(0, 3.0)
        manager.run()
    assert [flip[1:] for flip in manager.flips] == [(2, MIXED), (3, MIXED)]


def test_they_come_home_when_it_has_been_calm_and_nothing_of_others_waits() -> None:
    manager = Manager(fleet())
    manager.set(0, 2.0)
    assert manager.run(2) == [(2, MIXED)]
    manager.set(0, 0.0)
    manager.members["wait_ms"][2] = 20.0
    assert manager.run(60) == [], "a prompt waits there"
    manager.set(0, 0.0)
    assert manager.run(1) == [(2, DECODE)]


def test_a_short_calm_returns_no_instance() -> None:
    manager = Manager(fleet())
    manager.set(0, 2.0)
    manager.run(10)
    for _ in range(20):
        manager.set(0, 0.0)
        assert manager.run(4) == []
        manager.set(0, 0.8)
        manager.run(1)


def test_who_has_nothing_to_do_at_home_is_lent_for_good_and_missed_later() -> None:
    manager = Manager(fleet())
    manager.set(0, 2.0)
    manager.members["use"][2:] = 0.0, 0.4
    assert manager.run(2) == [(2, MIXED)]
    manager.members["wait_ms"] = 200.0
    lent = manager.run(60)
    assert (2, PREFILL) in lent, "it decodes next to nothing"
    assert (3, PREFILL) not in lent, "somebody has to decode"
    back = []
    for _ in range(8):
        manager.set(0, 0.6)
        manager.set(1, 1.5)
        back += manager.run()
    assert (2, DECODE) in back, "relief is not waited for when the home is in need"


def test_closed_instances_are_neither_flipped_nor_counted() -> None:
    manager = Manager(fleet(decode=3))
    manager.members["is_open"][2] = 0
    manager.members["use"][4] = 0.1
    manager.set(0, 2.0)
    assert manager.run(2) == [(3, MIXED)]


def test_the_last_one_that_decodes_is_not_lent_unless_that_is_said() -> None:
    alone = Manager(fleet(prefill=3, decode=1))
    alone.set(0, 2.0)
    assert alone.run(100) == [], "all decoding would wait for prompts"
    lent = Manager(fleet(prefill=3, decode=1), TERMS._replace(min_decode=0))
    lent.set(0, 2.0)
    assert lent.run(2) == [(3, MIXED)]


def test_mixed_pools_are_never_flipped() -> None:
    manager = Manager(fleet(prefill=0, decode=0, mixed=3))
    manager.set(0, 9.0)
    assert manager.run(100) == []


def test_a_fleet_that_is_all_closed_decides_nothing() -> None:
    manager = Manager(fleet())
    manager.members["is_open"] = 0
    assert manager.run(100) == []


def test_instances_return_after_a_while_when_flipping_stops() -> None:
    manager = Manager(fleet(prefill=1, decode=3, mixed=1))
    role_flipping.record_role(manager.members, 2, MIXED, 1_000.0)
    role_flipping.record_role(manager.members, 3, PREFILL, 2_000.0)
    manager.members["is_open"][3] = 0
    soon = 1_000.0 + role_flipping.MAX_FLIP_MS
    assert role_flipping.return_flipped(manager.members, soon - 1) == (NONE, NONE)
    assert role_flipping.return_flipped(manager.members, soon) == (2, DECODE)
    role_flipping.record_role(manager.members, 2, DECODE, soon)
    assert role_flipping.return_flipped(manager.members, soon + 9e9) == (NONE, NONE), (
        "closed ones are left alone"
    )
    manager.members["is_open"][3] = 1
    assert role_flipping.return_flipped(manager.members, soon + 9e9) == (3, DECODE)


@pytest.mark.parametrize("period_s", [1, 3, 8, 30, 120, 600])
@pytest.mark.parametrize("side", [0, 1])
def test_square_waves_of_any_period_do_not_make_it_flap(period_s: int, side: int) -> None:
    manager = Manager(fleet())
    for second in range(2 * 3600):
        manager.set(side, 2.0 if second % period_s < period_s / 2 else 0.0)
        manager.run()
    _check_bounds(manager, hours=2.0)


pressures = st.tuples(st.sampled_from([0.0, 0.4, 0.8, 1.5]), st.sampled_from([0.0, 0.4, 0.8, 1.5]))


@settings(max_examples=60)
@given(st.lists(st.tuples(pressures, st.integers(1, 90)), min_size=1, max_size=60))
def test_under_any_load_flips_are_bounded_and_both_roles_serve(
    history: list[tuple[tuple[float, float], int]],
) -> None:
    manager = Manager(fleet(prefill=2, decode=3))
    for (prompts, decodes), seconds in history:
        for _ in range(seconds):
            manager.set(0, prompts)
            use = manager.members["role"] != PREFILL
            manager.members["use"] = np.where(use, decodes, 0.0)
            manager.run()
            roles = manager.members["role"]
            assert (roles != PREFILL).any()
            assert (roles != DECODE).any()
    _check_bounds(manager, hours=manager.now_ms / 3_600_000.0)


shares = st.sampled_from([0.0, 0.04, 0.4, 0.8, 1.5, 4.0])


@settings(max_examples=60)
@given(st.lists(st.tuples(shares, shares), min_size=4, max_size=4), st.integers(1, 400))
def test_checking_only_on_changes_misses_nothing(
    loads: list[tuple[float, float]], before_s: int
) -> None:
    """Prompts that wait get on; what holds KV stays, and so does who is there."""
    terms = TERMS._replace(wait_ms=60_000.0)
    each_second, less_often = Manager(fleet(), terms), Manager(fleet(), terms)
    for manager in (each_second, less_often):
        manager.set(0, 1.5)
        manager.run(before_s)
    waits_ms = np.array([prompts for prompts, _ in loads]) * terms.wait_ms
    start_ms, skipped = each_second.now_ms, 0
    for manager in (each_second, less_often):
        manager.members["use"] = [decodes for _, decodes in loads]
        quiet_until_ms = 0.0
        while manager.now_ms < start_ms + 600 * SECOND_MS:
            if manager is less_often and manager.now_ms + 2 * SECOND_MS < quiet_until_ms:
                manager.now_ms += SECOND_MS
                skipped += 1
                continue
            ahead_ms = start_ms + SECOND_MS - manager.now_ms
            manager.members["wait_ms"] = (waits_ms + ahead_ms).clip(0) * (waits_ms > 0)
            if not manager.run():
                known = manager.members, manager.watch, manager.terms, manager.now_ms
                quiet_until_ms = role_flipping.compute_next_check_ms(*known)
    assert less_often.flips == each_second.flips
    assert skipped > 0
    for name in ("role", "since_ms", "min_flip_ms", "idle_ms"):
        assert list(less_often.members[name]) == list(each_second.members[name])
    assert less_often.watch.tolist() == each_second.watch.tolist()


def _find_most_flips(hours: float) -> float:
    """What one instance does in so many hours at most.

    A trip has three flips: out, for good, and home. It lasts FIRST_MIN_FLIP_MS, the next one twice
    as long, and so on; those after that MAX_MIN_FLIP_MS each. To begin anew takes BACKOFF_RESET_MS
    at home, in which more long trips would have been made than short ones are won.
    """
    short = math.log2(role_flipping.MAX_MIN_FLIP_MS / role_flipping.FIRST_MIN_FLIP_MS)
    return 3.0 * (short + 1.0 + hours * 3_600_000.0 / role_flipping.MAX_MIN_FLIP_MS)


def _check_bounds(manager: Manager, hours: float) -> None:
    for slot in range(len(manager.members)):
        mine = [(at, role) for at, which, role in manager.flips if which == slot]
        assert len(mine) <= _find_most_flips(hours)
        home = manager.members["configured_role"][slot]
        for (left, role), (back, later) in pairwise(mine):
            if role != home and later == home:
                assert back - left >= role_flipping.FIRST_MIN_FLIP_MS
