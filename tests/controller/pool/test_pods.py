"""Which instances go when there are too many."""

from hypothesis import given
from hypothesis import strategies as st

from cleave.api.role import Role
from cleave.controller.cluster.objects import ObservedPod
from cleave.controller.pool.pods import choose_victims


def pod(name: str, **seen: object) -> ObservedPod:
    fields = {"uid": name, "role": Role.DECODE, "revision": "a", "ready": True, **seen}
    return ObservedPod(name=name, **fields)  # type: ignore[arg-type]


def chosen(*pods: ObservedPod, count: int = 1) -> list[str]:
    return [each.name for each in choose_victims(pods, count)]


def test_what_is_not_ready_goes_before_what_works() -> None:
    starting = pod("starting", ready=False, created_s=1.0, load=5)
    assert chosen(pod("idle", load=0), starting) == ["starting"]


def test_what_has_no_node_goes_first_of_all() -> None:
    waiting = pod("waiting", ready=False, scheduled=False)
    assert chosen(pod("starting", ready=False, created_s=9.0), waiting) == ["waiting"]


def test_the_emptiest_goes() -> None:
    assert chosen(pod("busy", load=7), pod("quiet", load=2), pod("busier", load=9)) == ["quiet"]


def test_an_instance_of_unknown_load_counts_as_busy() -> None:
    assert chosen(pod("unknown"), pod("busy", load=100)) == ["busy"]


def test_of_equals_the_youngest_goes() -> None:
    old, young = pod("old", created_s=1.0), pod("young", created_s=2.0)
    assert chosen(old, young) == ["young"]
    same = [pod("b", created_s=1.0), pod("a", created_s=1.0)]
    assert chosen(*same) == ["a"]


def test_what_starts_is_chosen_by_age_alone() -> None:
    # A load from before it was started again says nothing.
    old = pod("old", ready=False, created_s=1.0, load=0)
    assert chosen(old, pod("young", ready=False, created_s=2.0)) == ["young"]


def test_what_goes_already_is_not_chosen_again() -> None:
    going = pod("going", ready=False, deleting=True)
    assert chosen(going, pod("staying"), count=2) == ["staying"]


def test_no_victim_is_chosen_when_none_is_needed() -> None:
    assert chosen(pod("only"), count=0) == []
    assert chosen(*map(pod, "abcde"), count=-3) == []


def test_what_others_reclaim_goes_before_everything_else() -> None:
    found = [pod("idle", load=0), pod("busy", load=9), pod("waiting", ready=False, scheduled=False)]
    victims = choose_victims(found, 2, {"busy"})
    assert [each.name for each in victims] == ["busy", "waiting"]


pods = st.lists(
    st.builds(
        pod,
        st.uuids().map(str),
        ready=st.booleans(),
        deleting=st.booleans(),
        load=st.none() | st.floats(0, 100),
        created_s=st.floats(0, 100),
    ),
    max_size=12,
)


@given(pods, st.integers(0, 12))
def test_the_choice_is_the_same_in_any_order_and_grows_by_one_at_a_time(
    found: list[ObservedPod], count: int
) -> None:
    victims = choose_victims(found, count)
    assert choose_victims(found[::-1], count) == victims
    assert choose_victims(found, count + 1)[: len(victims)] == victims


@given(pods, st.integers(0, 12))
def test_nothing_ready_goes_while_something_unready_stays(
    found: list[ObservedPod], count: int
) -> None:
    victims = choose_victims(found, count)
    left = [each for each in found if each not in victims and not each.deleting]
    assert not any(each.ready for each in victims) or all(each.ready for each in left)
