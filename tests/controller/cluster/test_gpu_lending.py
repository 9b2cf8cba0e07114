"""Which instances are lent and reclaimed, and that all find their place in the end."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cleave.api.pool import InstancePool
from cleave.api.role import Role
from cleave.controller.cluster.cache import ResourceKey
from cleave.controller.cluster.gpu_claims import subtract_claims
from cleave.controller.cluster.gpu_lending import (
    GpuShare,
    build_share,
    count_guaranteed,
    find_reclaimed,
    find_room,
    fit_pools,
)
from cleave.controller.cluster.objects import ObservedNode, ObservedPod

Pools = list[tuple[InstancePool, list[ObservedPod]]]


def key(name: str, namespace: str = "default") -> ResourceKey:
    return ResourceKey("LLMDeployment", namespace, name)


def node(name: str, gpus: int = 8, gpu: str = "H100") -> ObservedNode:
    return ObservedNode(name, True, True, gpu=gpu, num_gpus=gpus)


def pool(name: str, replicas: int, gpus: int = 1, **spec: Any) -> InstancePool:
    declared = {
        "deployment": "x",
        "role": "mixed",
        "replicas": replicas,
        "parallelism": {"tensor": gpus},
        "revision": "r",
        "model": "m",
        "engine": {"type": "vLLM"},
        **spec,
    }
    head = {"apiVersion": "cleave.dev/v1alpha1", "kind": "InstancePool"}
    return InstancePool.model_validate({**head, "metadata": {"name": name}, "spec": declared})


def pods(name: str, *nodes: str, **fields: Any) -> list[ObservedPod]:
    return [
        ObservedPod(f"{name}-{at}-{number}", "u", Role.MIXED, "r", True, node=at, **fields)
        for number, at in enumerate(nodes)
    ]


def share(pools: Pools, priority: int = 0, min_gpus: int | None = None) -> GpuShare:
    return build_share(pools, "gpu", priority, min_gpus)


def test_only_what_is_above_the_guarantee_is_lent() -> None:
    group = [(pool("a", 4), pods("a", "n1", "n1", "n1", "n2"))]
    assert not share(group).lent
    found = share(group, min_gpus=2)
    assert [each.gpus for each in found.lent] == [(("n2", 1),), (("n1", 1),)]
    assert found.guaranteed.placed == {"n1": 2}
    assert len(share(group, min_gpus=0).lent) == 3, "one instance serves"
    assert not share(group, min_gpus=9).lent
    assert share([(pool("a", 4), [])], min_gpus=3).guaranteed.count_gpus() == 3, (
        "also without a node"
    )


@pytest.mark.parametrize(
    ("min_gpus", "guaranteed"),
    [
        (0, {"prefill": 1, "decode": 1}),
        (5, {"prefill": 1, "decode": 2}),
        (8, {"prefill": 2, "decode": 3}),
        (99, {"prefill": 4, "decode": 6}),
    ],
)
def test_roles_are_kept_in_proportion(min_gpus: int, guaranteed: dict[str, int]) -> None:
    found = count_guaranteed({"prefill": 4, "decode": 6}, {"prefill": 1, "decode": 2}, min_gpus)
    assert found == guaranteed
    assert count_guaranteed({"mixed": 0}, {"mixed": 1}, 4) == {"mixed": 0}, "scaled to zero"


def test_the_node_with_the_fewest_lent_gpus_is_chosen() -> None:
    lender = share([(pool("a", 9), pods("a", *["n1"] * 6, *["n2"] * 3))], min_gpus=0)
    wide = share([(pool("b", 1, 8), [])], priority=1)
    nodes = [node("n1"), node("n2")]
    shares = {key("a"): lender, key("b"): wide}
    assert find_reclaimed(nodes, shares, {}) == {
        key("a"): frozenset(f"a-n2-{number}" for number in (6, 7, 8))
    }
    room = find_room(key("a"), nodes, shares, find_reclaimed(nodes, shares, {}), None)
    assert room is not None
    assert room.borrowers == ("default/b (priority 1)",)
    assert fit_pools([pool("a", 9)], room, "gpu") == {"a": 6}, "first three drain"
    left = share([(pool("a", 6), pods("a", *["n1"] * 6))], min_gpus=0)
    for size, fits in ((8, 8), (2, 6)):
        shares = {key("a"): left, key("b"): share([(pool("b", 1, size), [])], priority=1)}
        room = find_room(key("a"), nodes, shares, {}, None)
        assert room is not None
        assert fit_pools([pool("a", 9)], room, "gpu") == {"a": fits}, "where it does not go"


def test_the_lowest_priority_gives_first_and_equals_give_nothing() -> None:
    def build(*priorities: int) -> dict[ResourceKey, GpuShare]:
        return {
            key(f"l{number}"): share(
                [(pool(f"l{number}", 4), pods(f"l{number}", *["n1"] * 4))], priority, 0
            )
            for number, priority in enumerate(priorities)
        }

    waits = {key("b"): share([(pool("b", 2), [])], priority=2)}
    assert find_reclaimed([node("n1")], {**build(1, 0), **waits}, {}).keys() == {key("l1")}
    assert not find_reclaimed([node("n1")], {**build(2, 2), **waits}, {})
    assert not find_reclaimed([node("n1")], {**build(2, 3), **waits}, {})
    room = find_room(key("l0"), [node("n1")], {**build(2, 2), **waits}, {}, None)
    assert room is None


def test_one_that_lends_to_some_borrows_from_others() -> None:
    middle = share([(pool("m", 1), pods("m", "n1"))], priority=1, min_gpus=0)
    shares = {
        key("low"): share([(pool("low", 3), pods("low", *["n1"] * 3))], min_gpus=1),
        key("m"): middle,
        key("high"): share([(pool("high", 4), pods("high", *["n1"] * 4))], priority=2),
    }
    for quota, fits in ((None, 3), (7, 2)):
        room = find_room(key("m"), [node("n1")], shares, {}, quota)
        assert room is not None
        assert fit_pools([pool("m", 4)], room, "gpu") == {"m": fits}


def test_pods_that_fit_beside_it_reclaim_nothing() -> None:
    lender = share([(pool("a", 4), pods("a", *["n1"] * 4))], min_gpus=0)
    shares = {key("a"): lender, key("b"): share([(pool("b", 4), [])], priority=1)}
    assert not find_reclaimed([node("n1")], shares, {})
    other = {**shares, key("b"): share([(pool("b", 5, gpu="A100"), [])], priority=1)}
    assert not find_reclaimed([node("n1")], other, {}), "another kind of GPU"


def test_the_quota_of_the_namespace_reclaims_as_well() -> None:
    lender = share([(pool("a", 4), pods("a", *["n1"] * 4))], min_gpus=1)
    shares = {key("a"): lender, key("b"): share([(pool("b", 3), [])], priority=1)}
    nodes = [node("n1", 16)]
    assert not find_reclaimed(nodes, shares, {"default": 7})
    assert len(find_reclaimed(nodes, shares, {"default": 5})[key("a")]) == 2
    assert len(find_reclaimed(nodes, shares, {"default": 2})[key("a")]) == 3
    assert not find_reclaimed(nodes, shares, {"default": 1}), "the guarantee takes all of it"
    assert not find_reclaimed(nodes, {key("a"): lender}, {"default": 1}), "nothing needs it"
    elsewhere = {key("a"): lender, key("b", "other"): shares[key("b")]}
    assert not find_reclaimed(nodes, elsewhere, {"default": 1})
    full = {key("a"): lender, key("b", "other"): share([(pool("b", 9), [])], priority=1)}
    assert not find_reclaimed([node("n1", 4)], full, {"other": 0}), "its pods are refused"
    assert len(find_reclaimed([node("n1", 4)], full, {"other": 2})[key("a")]) == 2
    served = share([(pool("b", 4), pods("b", *["n1"] * 4))], priority=1)
    assert not find_reclaimed(nodes, {key("a"): lender, key("b"): served}, {"default": 4}), (
        "a lowered quota ends nothing"
    )
    a100 = {key("a"): lender, key("b"): share([(pool("b", 3, gpu="A100"), [])], priority=1)}
    assert not find_reclaimed(nodes, a100, {"default": 5}), "no node has such GPUs"
    room = find_room(key("a"), nodes, shares, {}, 5)
    assert room is not None
    assert room.max_gpus == 2
    assert fit_pools([pool("a", 6)], room, "gpu") == {"a": 4}, "those that run, until reclaimed"


def test_the_guarantee_is_the_same_for_the_plan_and_for_what_is_left() -> None:
    sizes = {"prefill": 1, "decode": 1}
    for left in ({"prefill": 2, "decode": 6}, {"prefill": 2, "decode": 3}):
        assert count_guaranteed(left, sizes, 4) == {"prefill": 2, "decode": 2}


def test_nothing_is_reclaimed_for_a_node_that_takes_no_pods() -> None:
    lender = share([(pool("a", 4), pods("a", *["n1"] * 4))], min_gpus=0)
    shares = {key("a"): lender, key("b"): share([(pool("b", 2), [])], priority=1)}
    cordoned = replace(node("n2", 8), schedulable=False)
    assert not find_reclaimed([replace(node("n1", 4), ready=False)], shares, {})
    assert len(find_reclaimed([node("n1", 4), cordoned], shares, {})[key("a")]) == 2


def test_one_with_other_gpus_is_no_borrower() -> None:
    lender = share([(pool("a", 4), pods("a", *["n1"] * 2))], min_gpus=0)
    other = share([(pool("b", 1, gpu="A100"), pods("b", "n2"))], priority=1)
    nodes = [node("n1", 2), replace(node("n2", 8), gpu="A100")]
    assert find_room(key("a"), nodes, {key("a"): lender, key("b"): other}, {}, None) is None


def test_pods_of_a_dropped_pool_make_room_for_the_new_one() -> None:
    lender = share([(pool("a", 4), pods("a", *["n1"] * 4))], min_gpus=0)
    shares = {
        key("a"): lender,
        key("b"): share([(pool("b", 4), pods("b", *["n1"] * 4))], priority=1),
    }
    room = find_room(key("a"), [node("n1")], shares, {}, None)
    assert room is not None
    assert fit_pools([pool("new", 2, 2)], room, "gpu") == {"new": 2}
    assert fit_pools([pool("new", 2, 4)], room, "gpu") == {"new": 1}
    emulated = pool("new", 9, engine={"type": "Emulated"})
    assert fit_pools([emulated], room, "gpu") == {}


def test_an_instance_over_nodes_goes_as_a_whole() -> None:
    spans = pool("a", 1, nodes=2, parallelism={"tensor": 8, "pipeline": 2}, gpu="H100")
    both = [
        replace(pods("a", "n1")[0], instance="a-1"),
        replace(pods("a", "n2")[0], instance="a-1"),
    ]
    single = (pool("s", 1), pods("s", "n3"))
    lender = share([(spans, both), single], min_gpus=0)
    assert lender.claims.placed == {"n1": 8, "n2": 8, "n3": 1}
    two = pool("a", 2, nodes=2, parallelism={"tensor": 8, "pipeline": 2}, gpu="H100")
    more = [replace(pods("b", each)[0], instance="a-2") for each in ("n4", "n5")]
    lender = share([(two, both + more)], min_gpus=0)
    shares = {key("a"): lender, key("b"): share([(pool("b", 1), [])], priority=1)}
    nodes = [node(f"n{number}") for number in range(1, 6) if number != 3]
    assert find_reclaimed(nodes, shares, {}) == {key("a"): frozenset({"a-2"})}


@dataclass
class Declared:
    """A deployment with one pool, in a small model of a cluster."""

    name: str
    priority: int
    min_gpus: int | None
    size: int
    planned: int
    replicas: int
    pods: list[ObservedPod]
    number: int = 0

    @property
    def pools(self) -> Pools:
        return [(pool(self.name, self.replicas, self.size), self.pods)]

    @property
    def share(self) -> GpuShare:
        return share(self.pools, self.priority, self.min_gpus)


def settle(nodes: list[ObservedNode], all_: list[Declared]) -> None:
    """Let the operator and a scheduler work until nothing changes."""
    for _ in range(40):
        before = [(each.replicas, len(each.pods)) for each in all_]
        for each in all_:
            shares = {key(other.name): other.share for other in all_}
            reclaimed = find_reclaimed(nodes, shares, {})
            room = find_room(key(each.name), nodes, shares, reclaimed, None)
            each.replicas = each.planned
            if room is not None:
                desired = pool(each.name, each.planned, each.size)
                each.replicas = fit_pools([desired], room, "gpu")[each.name]
            # The pool decides later, with its new replicas.
            shares = {key(other.name): other.share for other in all_}
            gone = find_reclaimed(nodes, shares, {}).get(key(each.name), frozenset())
            each.pods.sort(key=lambda pod: pod.name in gone)
            del each.pods[each.replicas :]
            schedule(nodes, all_, each)
        if before == [(each.replicas, len(each.pods)) for each in all_]:
            return
    pytest.fail("it does not settle")


def schedule(nodes: list[ObservedNode], all_: list[Declared], each: Declared) -> None:
    while len(each.pods) < each.replicas:
        used = Counter(pod.node for other in all_ for pod in other.pods for _ in range(other.size))
        found = [at.name for at in nodes if at.num_gpus - used[at.name] >= each.size]
        if not found:
            return
        each.number += 1
        name = f"{each.name}-{each.number}"
        each.pods += [replace(pods(each.name, found[0])[0], name=name, num_gpus=each.size)]


deployments = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.none() | st.integers(0, 6),
        st.sampled_from([1, 2, 4]),
        st.integers(1, 8),
    ),
    min_size=3,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@example([8], [(2, None, 1, 3), (0, 0, 1, 8), (1, 0, 1, 8)])
@example([4, 4, 4], [(0, 0, 1, 8), (0, None, 1, 1), (1, None, 2, 2)])
@given(st.lists(st.sampled_from([4, 8]), min_size=1, max_size=3), deployments)
def test_claims_settle_within_the_nodes_and_above_guarantees(
    sizes: list[int], declared: list[tuple[int, int | None, int, int]]
) -> None:
    nodes = [node(f"n{number}", size) for number, size in enumerate(sizes)]
    here: list[Declared] = []
    for number, (priority, min_gpus, size, planned) in enumerate(declared):
        new = Declared(f"d{number}", priority, min_gpus, size, 0, 0, [])
        # Its plan: as many instances as it wants, of those that the others leave.
        lower = [
            each.share.guaranteed
            if each.min_gpus is not None and each.priority < priority
            else each.share.claims
            for each in here
        ]
        claims = share([]).claims
        for each in lower:
            claims.placed.update(each.placed)
            claims.waiting.update(each.waiting)
        free = subtract_claims(nodes, claims).nodes
        new.planned = min(planned, sum(each.num_gpus // size for each in free))
        before = {each.name: len(each.pods) for each in here}
        here.append(new)
        settle(nodes, here)
        assert len(new.pods) == new.planned, "a plan finds its GPUs"
        for each in here[:-1]:
            least = count_guaranteed({"x": each.planned}, {"x": each.size}, each.min_gpus or 0)["x"]
            if each.min_gpus is None or each.priority >= priority:
                least = before[each.name]
            assert len(each.pods) >= min(least, before[each.name])
    # What is given back is used again.
    high = [each for each in here if each.priority == max(one.priority for one in here)]
    for each in high:
        each.planned, each.min_gpus = 0, None
    settle(nodes, here)
    left = [each for each in here if each not in high]
    if len(left) == 1:
        assert len(left[0].pods) == left[0].planned
