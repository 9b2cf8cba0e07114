"""The pairs of large fleets: a history only where one is needed, and no step that takes long."""

import time
import tracemalloc

import pytest

from cleave.gateway.witness import pair_list
from cleave.gateway.witness.pair_list import PairList
from cleave.router.registry import InstanceRegistry
from cleave.router.score_table import ScoreTable
from cleave.rpc.v1 import agent_pb2
from cleave.time_slices import run_at_once

PERIOD_S = 20.0


def build_tables(prefills: int, decodes: int, boot: str = "") -> list[ScoreTable]:
    registry = InstanceRegistry()
    registry._rebuild = lambda: None
    roles = [agent_pb2.ROLE_PREFILL] * prefills + [agent_pb2.ROLE_DECODE] * decodes
    for number, role in enumerate(roles):
        name = f"i{number}"
        registration = agent_pb2.Registration(
            instance=name,
            model="m",
            revision="r",
            boot_id=f"boot-{name}{boot if number == 0 else ''}",
            role=role,
            state=agent_pb2.STATE_READY,
            engine_url=f"http://127.0.0.1:{1000 + number}",
            kv_path=agent_pb2.KvPath(verified=True),
        )
        registry.on_event(name, agent_pb2.WatchEvent(registration=registration), 0.0)
    del registry._rebuild
    registry._rebuild()
    return registry.list_tables()


def take_all(pairs: PairList, now: float, ticks: int) -> set[tuple[str, str]]:
    return {pair.key for _ in range(ticks) for pair in pairs.take_next(now)}


pytestmark = pytest.mark.interpreted


def test_pairs_without_a_history_are_tested_at_times_spread_over_the_period() -> None:
    pairs = PairList(PERIOD_S)
    run_at_once(pairs.update(build_tables(20, 20), 100.0))
    due = [len(take_all(pairs, 100.0 + after, 40)) for after in (0.0, 5.0, 10.0, 20.0)]
    assert due[0] < 20
    assert due == sorted(due)
    assert 60 < due[1] < 140
    assert due[3] == 400, "all of them"


def test_histories_remain_while_both_engines_do() -> None:
    pairs = PairList(PERIOD_S)
    run_at_once(pairs.update(build_tables(2, 2), 0.0))
    for pair in pairs.take_next(PERIOD_S):
        pair.reason = "kept"
        pairs.keep(pair)
    run_at_once(pairs.update(build_tables(2, 2, boot="-again"), 30.0))
    kept = {pair.key: pair.reason for pair in pairs.take_next(30.0 + PERIOD_S)}
    assert len(kept) == 4
    assert {key[0] for key, reason in kept.items() if reason} == {"boot-i1"}


def test_a_quarter_of_a_million_pairs_take_neither_memory_nor_a_long_step() -> None:
    tables, pairs = build_tables(512, 512), PairList(PERIOD_S)
    tracemalloc.start()
    run_at_once(pairs.update(tables, 0.0))
    began = time.thread_time()
    for _ in range(200):
        pairs.take_next(PERIOD_S)
    mean_s = (time.thread_time() - began) / 200
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 8 << 20
    assert mean_s < 0.02, "without tracing a tenth"
    for _ in range(40):
        for pair in pairs.take_next(PERIOD_S):
            pairs.keep(pair)
    longest_s, steps = 0.0, pairs.update(tables, 0.0)
    while True:
        began = time.thread_time()
        if next(steps, "end") == "end":
            break
        longest_s = max(longest_s, time.thread_time() - began)
    assert longest_s < 0.005


def test_large_fleets_are_looked_at_in_turn(monkeypatch) -> None:
    monkeypatch.setattr(pair_list, "PAIRS_PER_TICK", 7)
    pairs = PairList(PERIOD_S)
    run_at_once(pairs.update(build_tables(5, 5), 0.0))
    assert [len(pairs.take_next(PERIOD_S)) for _ in range(5)] == [7, 7, 7, 4, 7]
