"""Score tables: what is found in them without arrays."""

import random

import numpy as np
import pytest

from cleave.api.enums import DispatchPolicy
from cleave.policy.dispatch import NONE, prefer_own
from cleave.policy.prompt_cost import count_all_mixed
from cleave.router.registry import InstanceRegistry
from cleave.router.score_table import (
    MAX_LIST_INSTANCES,
    ArrayScoreColumn,
    ListScoreColumn,
    ScoreTable,
    build_ring,
)

COUNTS = [1, 8, MAX_LIST_INSTANCES, MAX_LIST_INSTANCES + 1]


@pytest.fixture
def make_table(make_event, loaded):
    """A table of instances by role, whose odd ones belong to another of two routers."""

    def make(roles: dict[str, str], num_routers: int = 1) -> ScoreTable:
        registry = InstanceRegistry(DispatchPolicy.PREFIX_AWARE)
        for name, role in roles.items():
            registry.on_event(name, make_event(name, role), 0.0)
        for name in roles:
            registry.on_event(name, loaded(name, num_routers=num_routers), 0.0)
        (table,) = registry.list_tables()
        return table

    return make


def make_columns(rng: random.Random, count: int):
    scores = [rng.choice([float("inf"), float(rng.randrange(50))]) for _ in range(count)]
    return scores, ListScoreColumn(list(scores)), ArrayScoreColumn(np.array(scores))


@pytest.mark.parametrize("count", COUNTS)
def test_own_instances_are_preferred_as_by_the_policy(make_table, count: int) -> None:
    table = make_table({f"m{n:02d}": "mixed" for n in range(count)}, num_routers=2)
    rng = random.Random(count)
    assert table.is_remote.tolist() == [bool(n % 2) for n in range(count)]
    for _ in range(200):
        scores, *columns = make_columns(rng, count)
        margin, now = float(rng.randrange(20)), float(rng.randrange(30))
        expected = prefer_own(np.array(scores), table.is_remote, margin, now)
        assert {table.find_own(each, margin, now) for each in columns} == {expected}


@pytest.mark.parametrize("count", COUNTS)
def test_the_shortest_wait_is_that_of_the_policy(make_table, count: int) -> None:
    table = make_table({f"m{n:02d}": "mixed" for n in range(count)})
    rng = random.Random(count)
    for _ in range(100):
        pending = [float(rng.randrange(50)) for _ in range(count)]
        for slot, tokens in enumerate(pending):
            table.pending_prompt.set_score(slot, tokens)
        scores, *columns = make_columns(rng, count)
        waits = count_all_mixed(np.array(pending), np.array(scores))
        for column in columns:
            slot = table.find_shortest_wait(column)
            assert slot == (int(waits.argmin()) if waits.min() < np.inf else NONE)
            assert table.measure_waits(column).to_list() == pytest.approx(waits.tolist())


def test_prompts_prefer_instances_that_compute_prompts(make_table) -> None:
    roles = {"p1": "prefill", "d1": "decode", "p2": "prefill", "d2": "decode", "m1": "mixed"}
    table = make_table(roles)
    keys = [random.Random(n).getrandbits(32) for n in range(200)]
    found = [table.instances[table.find_preferred(key, table.prefill)].name for key in keys]
    assert set(found) == {"p1", "p2"}
    assert {table.instances[table.find_preferred(key, table.mixed)].name for key in keys} == {"m1"}


def test_when_an_instance_is_added_only_its_keys_move_and_order_does_not_matter(make_table) -> None:
    keys = [random.Random(n).getrandbits(32) for n in range(300)]

    def find(names: list[str]) -> list[str]:
        table = make_table(dict.fromkeys(names, "mixed"))
        return [table.instances[table.find_preferred(key, table.mixed)].name for key in keys]

    before, after = find(["m3", "m1", "m2"]), find(["m1", "m2", "m3", "m4"])
    assert all(new in (old, "m4") for old, new in zip(before, after, strict=True))
    assert 30 < after.count("m4") < 150


def test_the_ring_is_built_once_for_the_same_instances(make_table) -> None:
    roles = {"p1": "prefill", "d1": "decode", "p2": "prefill"}
    build_ring.cache_clear()
    for _ in range(3):
        table = make_table(roles)
        table.find_preferred(1, table.prefill)
        table.find_preferred(2, table.prefill)
    table = make_table({**roles, "d2": "decode"})
    table.find_preferred(1, table.prefill)
    assert build_ring.cache_info().misses == 1
    assert len(build_ring(("p1", "p2"))) == 32
