"""Instances without room: when they are given up, and when they are tried again."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cleave.api.role import Role
from cleave.controller.cluster.objects import ObservedPod
from cleave.controller.pool.unschedulable import CapacityProbe, SchedulingLimit, compute_limit

WHY = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
NOW_S = 1_000.0
TIMEOUT_S = 120.0


def placed(name: str) -> ObservedPod:
    return ObservedPod(name, name, Role.DECODE, "a", ready=True)


def waiting(name: str, age_s: float = 500.0, why: str = WHY) -> ObservedPod:
    return replace(
        placed(name),
        ready=False,
        phase="Pending",
        scheduled=False,
        unschedulable_reason=why,
        created_s=NOW_S - age_s,
    )


def last_probe(
    again_s: float, fits: int = 2, attempts: int = 1, nodes: str = "n1"
) -> CapacityProbe:
    return CapacityProbe(fits, attempts, again_s, nodes, WHY.rstrip("."))


def decide(
    desired: int,
    *pods: ObservedPod,
    last: CapacityProbe | None = None,
    now_s: float = NOW_S,
    nodes="n1",
) -> SchedulingLimit:
    return compute_limit(desired, pods, now_s=now_s, timeout_s=TIMEOUT_S, nodes=nodes, last=last)


def names(found: SchedulingLimit) -> list[str]:
    return [pod.name for pod in found.evict]


def test_nothing_is_said_of_a_pool_that_fits() -> None:
    assert decide(2, placed("a"), placed("b")) == SchedulingLimit()


def test_a_pod_may_wait_for_a_node_for_its_time() -> None:
    found = decide(2, placed("a"), waiting("b", age_s=100))
    assert found == SchedulingLimit(requeue_after_s=20.0)


def test_a_pod_not_yet_considered_by_the_scheduler_is_left_alone() -> None:
    unseen = waiting("b", why="")
    assert decide(2, placed("a"), unseen) == SchedulingLimit()


def test_after_its_time_it_is_given_up_and_the_pool_stays_at_what_fits() -> None:
    found = decide(4, placed("a"), placed("b"), waiting("c"), waiting("d"))
    assert names(found) == ["c", "d"]
    assert found.max_instances == 2
    assert found.requeue_after_s == 60.0
    assert found.reason == (
        "nodes have room for 2 of 4 instances: 0/2 nodes are available: 2 Insufficient "
        "nvidia.com/gpu; tried again at 1970-01-01T00:17:40Z or when nodes change"
    )


def test_until_the_next_trial_all_stays_as_it_is() -> None:
    last = decide(4, placed("a"), placed("b"), waiting("c"), waiting("d")).probe
    found = decide(4, placed("a"), placed("b"), last=last, now_s=NOW_S + 10)
    assert (found.evict, found.max_instances, found.requeue_after_s) == ((), 2, 50.0)
    assert found.probe == last
    assert "room for 2 of 4" in found.reason


def test_a_lost_instance_is_replaced_meanwhile() -> None:
    assert decide(4, placed("a"), last=last_probe(NOW_S + 30)).max_instances == 2


def test_the_next_trial_may_have_them_all_and_is_still_reported() -> None:
    found = decide(4, placed("a"), placed("b"), last=last_probe(NOW_S))
    assert found.max_instances is None
    assert found.reason.endswith("; being tried again")


def test_pauses_grow_up_to_ten_minutes() -> None:
    pauses, last, now_s = [], None, NOW_S
    for _ in range(6):
        found = decide(2, placed("a"), waiting("b", age_s=500), last=last, now_s=now_s)
        assert found.probe is not None
        pauses.append(found.probe.retry_at_s - now_s)
        last, now_s = found.probe, found.probe.retry_at_s
    assert pauses == [60.0, 120.0, 240.0, 480.0, 600.0, 600.0]


def test_other_nodes_begin_the_next_trial_at_once() -> None:
    found = decide(
        4, placed("a"), placed("b"), last=last_probe(NOW_S + 600, attempts=5), nodes="n2"
    )
    assert found.max_instances is None
    assert found.probe == replace(last_probe(NOW_S, attempts=0), nodes="n2")
    # With nodes that have not been tried the pauses begin anew.
    again = decide(3, placed("a"), placed("b"), waiting("c"), last=found.probe, nodes="n2")
    assert again.probe is not None
    assert again.probe.retry_at_s == NOW_S + 60
    at_once = decide(3, placed("a"), waiting("c"), last=last_probe(NOW_S, attempts=5), nodes="n3")
    assert at_once.probe is not None
    assert at_once.probe.retry_at_s == NOW_S + 60


def test_a_trial_that_found_room_ends_the_limit() -> None:
    assert (
        decide(3, placed("a"), placed("b"), placed("c"), last=last_probe(NOW_S))
        == SchedulingLimit()
    )


def test_wanting_no_more_than_fits_ends_the_limit() -> None:
    assert decide(2, placed("a"), placed("b"), last=last_probe(NOW_S + 600)) == SchedulingLimit()
    assert decide(2, placed("a"), last=last_probe(NOW_S + 600)) == SchedulingLimit()


def test_a_pool_without_any_instance_leaves_the_eldest_waiting() -> None:
    found = decide(3, waiting("b", age_s=400), waiting("a", age_s=500), waiting("c", age_s=300))
    assert names(found) == ["b", "c"]
    assert found.max_instances == 1
    later = decide(3, waiting("a", age_s=500), last=found.probe)
    assert later.evict == ()
    assert "room for 0 of 3 instances" in later.reason


def test_a_single_instance_waits_as_long_as_it_takes_and_says_why() -> None:
    found = decide(1, waiting("a"))
    assert found.evict == ()
    assert found.probe is None
    assert found.reason.startswith("nodes have room for 0 of 1 instances: 0/2 nodes are available")


def test_pods_that_go_or_are_over_count_for_nothing() -> None:
    going, over = replace(waiting("b"), deleting=True), replace(placed("c"), phase="Failed")
    assert decide(1, placed("a"), going, over) == SchedulingLimit()


def test_the_most_frequent_obstacle_is_reported() -> None:
    other = "0/2 nodes are available: 2 node(s) had untolerated taint."
    pods = [placed("a"), waiting("b", why=other), waiting("c"), waiting("d")]
    assert WHY.rstrip(".") in decide(4, *pods).reason


pods = st.lists(
    st.one_of(
        st.uuids().map(lambda name: placed(str(name))),
        st.builds(waiting, st.uuids().map(str), st.floats(0, 500)),
    ),
    max_size=6,
)
trials = st.none() | st.builds(
    last_probe,
    st.floats(500, 1500),
    st.integers(0, 6),
    st.integers(0, 6),
    st.sampled_from(["n1", "n2"]),
)


@given(st.integers(0, 8), pods, trials)
def test_an_executed_decision_is_not_repeated(
    desired: int, found: list[ObservedPod], last: CapacityProbe | None
) -> None:
    first = decide(desired, *found, last=last)
    left = [pod for pod in found if pod not in first.evict]
    second = decide(desired, *left, last=first.probe)
    assert second.evict == ()
    assert second.max_instances is None or second.max_instances == first.max_instances


@given(st.integers(0, 8), pods, trials)
def test_instances_with_a_node_are_never_given_up(
    desired: int, found: list[ObservedPod], last: CapacityProbe | None
) -> None:
    decided = decide(desired, *found, last=last)
    assert not any(pod.scheduled for pod in decided.evict)
    assert len(decided.evict) < max(1, len(found))
    assert bool(decided.reason) == (decided.probe is not None or decided.reason.endswith("a node"))
