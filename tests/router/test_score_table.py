"""Score tables: what is found in them without arrays."""

import random

import numpy as np
import pytest

from cleave.api.enums import DispatchPolicy
from cleave.policy.dispatch import NONE, prefer_own
from cleave.policy.prompt_cost import count_all_mixed
from cleave.router.pair_proofs import PairResult
from cleave.router.registry import InstanceRegistry
from cleave.router.score_table import (
    MAX_LIST_INSTANCES,
    ArrayScoreColumn,
    ListScoreColumn,
    ScoreTable,
    build_ring,
)
from cleave.router.shared_load import SharedLoad, build_table
from cleave.router.shared_score_table import build_shared_table
from cleave.rpc.v1 import agent_pb2

from tests.router.conftest import ROLES

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


COLUMNS = ["prefill", "decode", "mixed", "colocated", "spare", "pending_prompt"]
ARRAYS = ["room", "heaviness", "batch", "context", "keys", "is_remote"]
STATES = [agent_pb2.STATE_READY, agent_pb2.STATE_READY, agent_pb2.STATE_DRAINING]
NAMES = list(ROLES)


def describe(table: ScoreTable) -> dict[str, object]:
    """All that is found in a table."""
    table.refresh()
    columns = [getattr(table, name) for name in COLUMNS]
    closed = table.closed_pairs
    described = {name: c.to_list() for name, c in zip(COLUMNS, columns, strict=True)}
    described |= {name: getattr(table, name).tolist() for name in ARRAYS}
    described["shared columns"] = [[a is b and a.size > 0 for a in columns] for b in columns]
    open_ = table.mixed if table.mixed.size else table.pending_prompt
    described["preferred"] = [table.find_preferred(key << 24, open_) for key in range(256)]
    for name in ("prompt_slots", "slot_by_boot", "slot_by_holder"):
        described[name] = getattr(table, name)
    described["closed"] = (closed.count, closed.alone.tolist(), closed.expiry_s)
    size = len(table.instances)
    described["pairs"] = [closed.is_closed(p, d) for p in range(size) for d in range(size)]
    return described


@pytest.mark.parametrize("policy", [DispatchPolicy.PREFIX_AWARE, DispatchPolicy.BEST_FIT])
@pytest.mark.parametrize("count", [1, 3, MAX_LIST_INSTANCES + 2])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_table_of_instances_that_change_equals_one_that_is_built_of_them(
    make_event, loaded, policy: DispatchPolicy, count: int, is_shared: bool
) -> None:
    shared = SharedLoad(build_table(1).for_process(0)) if is_shared else None
    registry, rng = InstanceRegistry(policy, shared), random.Random(count)
    boots = {f"i{number:02}": 0 for number in range(count)}

    def report(name: str, now: float) -> agent_pb2.WatchEvent:
        boots[name] += rng.random() < 0.2
        event = make_event(
            name, rng.choice(NAMES), verified=rng.random() < 0.8, boot_id=f"{name} {boots[name]}"
        )
        event.registration.state = rng.choice(STATES)
        event.registration.kv_blocks_total = rng.choice([1_000, 2_000])
        return event

    for name in boots:
        registry.on_event(name, report(name, 0.0), 0.0)
    (table,) = registry.list_tables()
    for step in range(150):
        now, name = 0.1 * step, rng.choice(list(boots))
        instance, boot_id = registry.instances[name], f"{name} {boots[name]}"
        if rng.random() < 0.5:
            registry.on_event(name, report(name, now), now)
        elif rng.random() < 0.3:
            registry.on_disconnect(name)
        elif rng.random() < 0.5:
            other = rng.choice(list(boots))
            result = PairResult(other, rng.choice([1, 2, 3]), now)
            registry.record_pair(instance, f"{other} {boots[other]}", result, now)
        else:
            tokens, routers = rng.randrange(9_000), rng.choice([1, 2])
            report_ = loaded(name, tokens, boot_id=boot_id, num_routers=routers)
            registry.on_event(name, report_, now)
        if step % 3 == 0:
            assert registry.list_tables() == [table]
            table.update_pairs(now)
            rebuilt = (
                build_shared_table(table.instances, policy, shared)
                if shared
                else (ScoreTable(table.instances, policy))
            )
            rebuilt.update_pairs(now)
            assert describe(table) == describe(rebuilt)
