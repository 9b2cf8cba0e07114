"""The order of a roll-out, step by step, for states that show one thing each."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from cleave.api.role import Role
from cleave.controller.rollout.planner import (
    InstanceCount,
    RoleState,
    RolloutError,
    RolloutLimits,
    RolloutStep,
    apply_step,
    compute_capacity,
    is_done,
    list_steps,
    make_ready,
    plan_next_step,
)

P, D, M = Role.PREFILL, Role.DECODE, Role.MIXED
LIMITS = RolloutLimits(max_surge=1, max_unavailable=0)
NO_ROOM = RolloutLimits(max_surge=0, max_unavailable=1)


def running(**replicas: int) -> dict[Role, RoleState]:
    """Every instance is of the old revision, and ready."""
    return {Role(role): RoleState(n, old=n, old_ready=n) for role, n in replicas.items()}


def describe_step(step: Mapping[Role, RolloutStep]) -> dict[str, tuple[int, int]]:
    return {str(role): (each.new, each.old) for role, each in step.items()}


def way(roles: Mapping[Role, RoleState], limits: RolloutLimits = LIMITS) -> list[tuple[int, ...]]:
    """New and old of every role, step by step, when all becomes ready."""
    return [
        tuple(count for each in step.values() for count in (each.new, each.old))
        for step in list_steps(roles, limits)
    ]


def test_a_pair_is_replaced_by_a_pair() -> None:
    assert way(running(prefill=1, decode=1)) == [(1, 1, 1, 1), (1, 0, 1, 0)]


def test_roles_of_one_size_move_together() -> None:
    both = [(1, 2), (1, 1), (2, 1), (2, 0)]
    assert way(running(prefill=2, decode=2)) == [counts * 2 for counts in both]


def test_roles_of_different_size_move_in_proportion() -> None:
    assert way(running(prefill=2, decode=6)) == [
        (1, 2, 1, 6),
        (1, 2, 1, 5),
        (1, 2, 2, 5),
        (1, 2, 2, 4),
        (1, 2, 3, 4),
        # Half of both roles is new: the first old prefill instance has served its time.
        (1, 1, 3, 3),
        (2, 1, 4, 3),
        (2, 1, 4, 2),
        (2, 1, 5, 2),
        (2, 1, 5, 1),
        (2, 1, 6, 1),
        (2, 0, 6, 0),
    ]


def test_a_large_deployment_serves_its_whole_plan_all_the_way() -> None:
    roles: Mapping[Role, RoleState] = running(prefill=7, decode=30)
    for step in list_steps(roles, LIMITS):
        reached = apply_step(roles, step)
        assert compute_capacity(reached) >= 1
        roles = make_ready(reached)
    assert is_done(roles)


def test_mixed_instances_need_no_partners() -> None:
    assert way(running(mixed=3)) == [(1, 3), (1, 2), (2, 2), (2, 1), (3, 1), (3, 0)]


def test_a_larger_surge_takes_larger_steps() -> None:
    limits = RolloutLimits(max_surge=4, max_unavailable=0)
    assert way(running(prefill=4, decode=4), limits) == [(4, 4, 4, 4), (4, 0, 4, 0)]


def test_without_a_free_gpu_an_old_pair_goes_first() -> None:
    both = [(0, 1), (1, 1), (1, 0), (2, 0)]
    assert way(running(prefill=2, decode=2), NO_ROOM) == [counts * 2 for counts in both]


def test_without_a_free_gpu_no_role_misses_more_than_it_may() -> None:
    assert way(running(prefill=2, decode=4), NO_ROOM)[:4] == [
        (0, 1, 0, 3),
        (1, 1, 1, 3),
        (1, 1, 1, 2),
        (1, 1, 2, 2),
    ]


def test_without_a_free_gpu_the_only_prefill_instance_goes_first() -> None:
    # Decode instances serve whole requests meanwhile.
    assert way(running(prefill=1, decode=2), NO_ROOM) == [
        (0, 0, 0, 1),
        (1, 0, 1, 1),
        (1, 0, 1, 0),
        (1, 0, 2, 0),
    ]


def test_without_a_free_gpu_the_only_decode_instance_takes_the_others_with_it() -> None:
    assert way(running(prefill=3, decode=1), NO_ROOM) == [(0, 0, 0, 0), (3, 0, 1, 0)]


def test_what_may_be_missing_is_counted_in_the_larger_role() -> None:
    limits = RolloutLimits(max_surge=1, max_unavailable=1)
    step = plan_next_step(running(prefill=2, decode=6), limits)
    assert describe_step(step) == {"prefill": (1, 2), "decode": (1, 5)}


def test_nothing_goes_before_the_new_pair_is_whole() -> None:
    roles = {
        P: RoleState(2, old=2, old_ready=2, new=1, new_ready=1),
        D: RoleState(2, old=2, old_ready=2, new=1, new_ready=0),
    }
    assert describe_step(plan_next_step(roles, LIMITS)) == {"prefill": (1, 2), "decode": (1, 2)}


def test_no_role_begins_before_the_others_have_a_place() -> None:
    # Two decode instances drain still: a new prefill instance would wait for a partner.
    roles = {P: RoleState(2, old=2, old_ready=2), D: RoleState(2, old=1, old_ready=1, leaving=2)}
    assert describe_step(plan_next_step(roles, LIMITS)) == {"prefill": (0, 2), "decode": (0, 1)}


def test_instances_that_drain_hold_their_places() -> None:
    roles = {M: RoleState(3, old=2, old_ready=2, new=1, new_ready=1, leaving=1)}
    assert describe_step(plan_next_step(roles, LIMITS)) == {"mixed": (1, 2)}
    assert describe_step(plan_next_step({M: replace(roles[M], leaving=0)}, LIMITS)) == {
        "mixed": (2, 2)
    }


def test_a_role_that_lost_its_old_instances_does_not_run_ahead() -> None:
    roles = {P: RoleState(8), D: RoleState(8, old=8, old_ready=8)}
    assert describe_step(plan_next_step(roles, LIMITS)) == {"prefill": (3, 0), "decode": (1, 8)}
    strict = replace(LIMITS, max_skew=0.0)
    assert describe_step(plan_next_step(roles, strict)) == {"prefill": (1, 0), "decode": (1, 8)}


def test_a_failing_revision_is_rolled_back_in_one_step() -> None:
    broken = {role: RoleState(3, new=3, new_ready=3, old=1, old_ready=0) for role in (P, D)}
    assert describe_step(plan_next_step(broken, LIMITS)) == {"prefill": (3, 0), "decode": (3, 0)}


def test_an_old_revision_that_fails_is_replaced_too() -> None:
    broken = {role: RoleState(3, old=3, old_ready=0) for role in (P, D)}
    assert way(broken)[-1] == (3, 0, 3, 0)


def test_old_prefill_instances_without_decode_instances_go_at_once() -> None:
    roles = {P: RoleState(3, old=3, old_ready=3), D: RoleState(3, old=0)}
    assert describe_step(plan_next_step(roles, LIMITS))["prefill"] == (1, 0)


def test_old_decode_instances_without_prefill_instances_go_one_by_one() -> None:
    # They compute prompts too when they have to.
    roles = {P: RoleState(1), D: RoleState(3, old=3, old_ready=3)}
    assert [step[2:] for step in way(roles)] == [(1, 3), (1, 2), (2, 2), (2, 1), (3, 1), (3, 0)]


def test_fewer_are_desired_while_the_revision_changes() -> None:
    assert way({M: RoleState(2, old=4, old_ready=4)})[0] == (0, 2)


def test_more_are_desired_while_the_revision_changes() -> None:
    assert way({M: RoleState(4, old=2, old_ready=2)}) == [(3, 2), (3, 1), (4, 1), (4, 0)]


def test_a_scale_change_alone_takes_one_step() -> None:
    roles = {P: RoleState(3, new=1, new_ready=1), D: RoleState(2, new=5, new_ready=5)}
    assert way(roles) == [(3, 0, 2, 0)]


def test_a_removed_role_serves_until_the_others_can() -> None:
    roles = {
        P: RoleState(0, new=2, new_ready=2),
        D: RoleState(0, old=2, old_ready=2),
        M: RoleState(3),
    }
    assert way(roles) == [(2, 0, 0, 2, 3, 0), (0, 0, 0, 0, 3, 0)]


def test_zero_desired_means_zero_left() -> None:
    roles = {P: RoleState(0, old=2, old_ready=2), D: RoleState(0, new=2, new_ready=2)}
    assert way(roles) == [(0, 0, 0, 0)]


def test_of_two_old_revisions_the_one_without_partners_goes_first() -> None:
    roles = {
        P: RoleState(
            3, old=4, old_ready=4, older={"a": InstanceCount(3, 3), "b": InstanceCount(1, 1)}
        ),
        D: RoleState(
            3, old=4, old_ready=3, older={"a": InstanceCount(3, 3), "b": InstanceCount(1, 0)}
        ),
    }
    step = plan_next_step(roles, LIMITS)
    assert [step[role].older for role in (P, D)] == [{"a": 3, "b": 0}] * 2
    assert describe_step(step) == {"prefill": (0, 3), "decode": (0, 3)}


def test_of_two_old_revisions_the_one_that_is_worth_more_stays() -> None:
    roles = {
        role: RoleState(
            3, old=4, old_ready=4, older={"a": InstanceCount(1, 1), "b": InstanceCount(3, 3)}
        )
        for role in (P, D)
    }
    assert plan_next_step(roles, LIMITS)[P].older == {"a": 0, "b": 3}


def test_instances_that_are_not_ready_for_a_moment_stay_with_their_partners() -> None:
    roles = {
        P: RoleState(2, old=2, old_ready=2, new=1, new_ready=1),
        D: RoleState(6, old=5, old_ready=3, new=1, new_ready=1),
    }
    step = describe_step(plan_next_step(roles, LIMITS))
    assert (step["prefill"][1], step["decode"][1]) == (2, 5)


def test_a_third_revision_waits_for_what_is_on_its_way() -> None:
    # Full as below, but a place will be free by itself.
    draining = {
        P: RoleState(
            2, old=3, old_ready=3, older={"a": InstanceCount(2, 2), "b": InstanceCount(1, 1)}
        ),
        D: RoleState(
            6,
            old=6,
            old_ready=6,
            leaving=1,
            older={"a": InstanceCount(4, 4), "b": InstanceCount(2, 2)},
        ),
    }
    assert describe_step(plan_next_step(draining, LIMITS)) == {"prefill": (0, 3), "decode": (0, 6)}
    pairs = {"a": InstanceCount(1, 1), "b": InstanceCount(1, 1)}
    starting = {
        P: RoleState(2, old=2, old_ready=2, new=1, older=pairs),
        D: RoleState(2, old=2, old_ready=2, new=1, older=pairs),
    }
    assert describe_step(plan_next_step(starting, LIMITS)) == {"prefill": (1, 2), "decode": (1, 2)}


def test_a_third_revision_finds_its_place_at_the_least_cost() -> None:
    # Pairs of a and b fill all seven and three places: one prefill instance of a has to go.
    roles = {
        P: RoleState(
            2, old=3, old_ready=3, older={"a": InstanceCount(2, 2), "b": InstanceCount(1, 1)}
        ),
        D: RoleState(
            6, old=6, old_ready=6, older={"a": InstanceCount(4, 4), "b": InstanceCount(2, 2)}
        ),
    }
    step = plan_next_step(roles, LIMITS)
    assert step[P].older == {"a": 1, "b": 1}
    assert step[D].older == {"a": 4, "b": 2}
    assert compute_capacity(apply_step(roles, step)) == pytest.approx(5 / 6)


def test_capacity_counts_pairs_only() -> None:
    roles = {
        P: RoleState(2, old=1, old_ready=1, new=1, new_ready=1),
        D: RoleState(4, old=4, old_ready=4, new=1, new_ready=1),
    }
    assert compute_capacity(roles) == pytest.approx(1 / 2 + 1 / 4)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_surge": 0, "max_unavailable": 0}, "must not both be 0"),
        ({"max_surge": -1, "max_unavailable": 1}, "maxSurge: must be at least 0 (got -1)"),
        ({"max_skew": float("nan")}, "maxSkew: must be a number"),
    ],
)
def test_limits_that_allow_nothing_are_refused(limits: dict[str, float], message: str) -> None:
    with pytest.raises(RolloutError) as raised:
        RolloutLimits(**limits)  # type: ignore[arg-type]
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_preview_starts_from_what_is_there() -> None:
    roles = make_ready(apply_step(running(mixed=2), plan_next_step(running(mixed=2), LIMITS)))
    assert way(roles) == way(running(mixed=2))[1:]
