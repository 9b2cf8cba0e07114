"""Pairs that failed canary handoffs are not picked together; their instances are."""

import math
import random
import time
from collections.abc import Collection

import pytest

from cleave.api.enums import DispatchPolicy, FallbackPolicy
from cleave.policy.dispatch import NONE
from cleave.router.errors import NoInstance
from cleave.router.pair_proofs import PairResult
from cleave.router.registry import InstanceRegistry
from cleave.router.router import Router
from cleave.router.routing_request import RoutingRequest
from cleave.rpc.v1 import agent_pb2

FAILED, SUSPECT, PROVEN = (
    agent_pb2.TRUST_FAILED,
    agent_pb2.TRUST_SUSPECT,
    agent_pb2.TRUST_PROVEN,
)


def report(registry, decode: str, now: float = 10.0, age_s: float = 0.0, **trust: int) -> None:
    """What the agent of `decode` says of pairs with the prefill instances named."""
    proofs = agent_pb2.PairProofs(boot_id=f"{decode}-boot")
    for prefill, each in trust.items():
        proofs.proofs.add(
            prefill=prefill, prefill_boot_id=f"{prefill}-boot", trust=each, age_ms=int(age_s * 1000)
        )
    registry.on_event(decode, agent_pb2.WatchEvent(pairs=proofs), now)


def pick_pairs(router: Router, count: int = 40) -> set[str]:
    draw = random.Random(7).randint  # else equal requests would alternate between two pairs
    picks = [router.pick("m", draw(10, 3_000), draw(1, 3_000)) for _ in range(count)]
    return {f"{p.prefill.instance if p.prefill else ''}-{p.decode.instance}" for p in picks}


@pytest.fixture
def four(fleet_of):
    return fleet_of(p1="prefill", p2="prefill", d1="decode", d2="decode")


@pytest.mark.parametrize("policy", list(DispatchPolicy))
def test_a_failed_pair_is_never_picked_and_both_its_instances_are(
    make_event, policy: DispatchPolicy
) -> None:
    registry = InstanceRegistry(policy)
    for name, role in {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}.items():
        registry.on_event(name, make_event(name, role), 0.0)
    report(registry, "d2", p1=FAILED, p2=PROVEN)
    picked = pick_pairs(Router(registry))
    assert picked <= {"p1-d1", "p2-d1", "p2-d2"}
    assert {name for pair in picked for name in pair.split("-")} == {"p1", "p2", "d1", "d2"}


def test_a_suspect_pair_is_closed_until_it_is_proven(four) -> None:
    report(four, "d1", p1=SUSPECT)
    assert "p1-d1" not in pick_pairs(Router(four))
    report(four, "d1", p1=PROVEN)
    assert "p1-d1" in pick_pairs(Router(four))


def test_a_prefill_instance_without_an_open_pair_computes_no_prompts_of_others(four) -> None:
    report(four, "d1", p1=FAILED)
    report(four, "d2", p1=FAILED)
    assert pick_pairs(Router(four)) == {"p2-d1", "p2-d2"}


def test_without_any_open_pair_the_fallback_decides(four) -> None:
    for decode in ("d1", "d2"):
        report(four, decode, p1=FAILED, p2=FAILED)
    assert pick_pairs(Router(four)) == {"-d1", "-d2"}
    with pytest.raises(NoInstance, match="4 of their pairs failed canary handoffs"):
        Router(four, FallbackPolicy.NEVER).pick("m", 100)


@pytest.mark.parametrize(("trust", "expiry_s"), [(SUSPECT, 60.0), (FAILED, 600.0)])
def test_results_that_are_not_renewed_close_nothing_any_more(four, trust: int, expiry_s) -> None:
    report(four, "d1", age_s=10.0, p1=trust)
    four.update_connectivity(10.0 + expiry_s - 11.0)
    table = four.models["m"].score_tables[0]
    assert table.closed_pairs.count == 1
    four.update_connectivity(10.0 + expiry_s - 9.0)
    assert not table.closed_pairs.count


def test_results_belong_to_boots(four, make_event) -> None:
    report(four, "d1", p1=FAILED)
    four.on_event("p2", make_event("p2", "prefill"), 11.0)
    assert "p1-d1" not in pick_pairs(Router(four))
    four.on_event("d1", make_event("d1", "decode", boot_id="d1-next"), 12.0)
    assert "p1-d1" in pick_pairs(Router(four))
    report(four, "d1", p1=FAILED)  # of the boot before
    assert "p1-d1" in pick_pairs(Router(four))


def record(registry, decode: str, trust: int, at: float, sequence: int = 1, source="w") -> None:
    """What this process finds out about the pair of `decode` with p1."""
    result = PairResult("p1", trust, at, source=source, sequence=sequence)
    registry.record_pair(registry.instances[decode], "p1-boot", result, at)


def test_what_an_agent_sent_before_replaces_no_newer_result_of_this_process(four) -> None:
    record(four, "d1", PROVEN, 10.0)
    record(four, "d1", FAILED, 10.1, sequence=2)
    report(four, "d1", now=10.2, age_s=0.1, p1=PROVEN, p2=PROVEN)  # by the age of both: 10.1
    assert "p1-d1" in pick_pairs(Router(four)), "of another source, and as new"
    record(four, "d1", FAILED, 10.3, sequence=3)
    report(four, "d1", now=10.4, age_s=0.2, p1=PROVEN)
    assert "p1-d1" not in pick_pairs(Router(four))
    # It took half a second: by its age it is newer, by its number it is not.
    proofs = agent_pb2.PairProofs(boot_id="d1-boot")
    proofs.proofs.add(prefill="p1", prefill_boot_id="p1-boot", trust=PROVEN, source="w", sequence=2)
    four.on_event("d1", agent_pb2.WatchEvent(pairs=proofs), 10.8)
    assert "p1-d1" not in pick_pairs(Router(four))
    proofs.proofs[0].sequence = 4
    four.on_event("d1", agent_pb2.WatchEvent(pairs=proofs), 10.9)
    assert "p1-d1" in pick_pairs(Router(four))


def test_a_result_that_the_agent_does_not_know_counts_only_while_it_is_under_way(four) -> None:
    record(four, "d1", FAILED, 10.0)
    report(four, "d1", now=10.5, p2=PROVEN)
    assert "p1-d1" not in pick_pairs(Router(four))
    report(four, "d1", now=21.0, p2=PROVEN)
    assert "p1-d1" in pick_pairs(Router(four))


def test_results_of_an_earlier_version_count_as_they_come(four) -> None:
    report(four, "d1", now=10.0, p1=FAILED)
    report(four, "d1", now=10.0, p1=PROVEN)
    assert "p1-d1" in pick_pairs(Router(four))


def test_a_newer_version_may_send_results_that_this_one_does_not_know(four) -> None:
    report(four, "d1", p1=9)
    assert "p1-d1" in pick_pairs(Router(four))


def find_open_pair(table, is_open, excluded: Collection[int]) -> tuple[int, int]:
    """The pair of the default policy by trying all of them; NONE: no such pair."""

    def rank(column, slots: Collection[int]) -> int:
        scores = [(column.get_score(each), each) for each in slots if each not in excluded]
        score, slot = min(scores, default=(math.inf, NONE))
        return slot if score < math.inf else NONE

    decodes = [s for s in range(len(table.instances)) if table.decode.get_score(s) < math.inf]
    partners = {p: [d for d in decodes if is_open(p, d)] for p in range(len(table.instances))}
    first = rank(table.prefill, [p for p, ds in partners.items() if set(ds) - set(excluded)])
    second = rank(table.decode, partners[first]) if first != NONE else NONE
    return (first, second) if second != NONE else (NONE, NONE)


@pytest.mark.parametrize("sizes", [(2, 3), (9, 7), (20, 30)], ids=str)
@pytest.mark.parametrize("policy", [DispatchPolicy.SHORTEST_WAIT, DispatchPolicy.PENDING_TOKENS])
def test_the_pick_is_the_least_of_the_open_pairs(make_event, sizes, policy) -> None:
    draw = random.Random(str((sizes, policy)))
    registry = InstanceRegistry(policy)
    prefills, decodes = (
        [f"{kind}{n:02d}" for n in range(m)] for kind, m in zip("pd", sizes, strict=True)
    )
    for name in (*prefills, *decodes):
        role = "prefill" if name.startswith("p") else "decode"
        registry.on_event(name, make_event(name, role), 0.0)
    router = Router(registry, clock=lambda: 0.0)
    (table,) = registry.models["m"].score_tables
    request = RoutingRequest(100, 100.0)
    for share in (0.0, 0.1, 0.5, 0.9, 0.98, 1.0) * 5:
        failed = {(p, d) for p in prefills for d in decodes if draw.random() < share}
        for d in decodes:
            report(registry, d, **{p: FAILED if (p, d) in failed else PROVEN for p in prefills})
        if len(failed) < len(prefills) * len(decodes):
            router.pick("m", draw.randint(10, 3_000), draw.randint(1, 3_000))
        names = [each.name for each in table.instances]
        assert table.closed_pairs.count == len(failed)

        def is_open(p: int, d: int, failed=failed, names=names) -> bool:
            return (names[p], names[d]) not in failed

        for excluded in ([], draw.sample(range(len(names)), 2)):
            right = find_open_pair(table, is_open, excluded)
            assert router._selector.select_pair(table, excluded, request) == right


@pytest.mark.interpreted
def test_closed_pairs_cost_a_pick_and_a_result_little(make_event) -> None:
    """Each prefill instance has a closed pair, one of them no other, as in a fleet that a witness
    tests. CPU time of this thread; the limits leave room for a busy machine. Compiled code makes a
    pick cheaper than what it is compared with."""
    registry, size = InstanceRegistry(), 64
    for n in range(size):
        registry.on_event(f"p{n}", make_event(f"p{n}", "prefill"), 0.0)
        registry.on_event(f"d{n}", make_event(f"d{n}", "decode"), 0.0)
    router = Router(registry, clock=lambda: 0.0)

    def measure_pick_s() -> float:
        rounds = []
        for _ in range(10):
            start = time.thread_time()
            picks = [router.pick("m", 500, 300) for _ in range(100)]
            rounds.append((time.thread_time() - start) / 100)
            for each in picks:
                router.release(each)
        return min(rounds)

    open_s = measure_pick_s()
    for n in range(size):
        proofs = {f"p{m}": FAILED if m in (0, n) else PROVEN for m in range(size)}
        report(registry, f"d{n}", **proofs)
    assert measure_pick_s() < 4 * open_s
    (table,) = registry.models["m"].score_tables
    assert table.closed_pairs.count == 2 * size - 1
    start = time.thread_time()
    for _ in range(20):
        report(registry, "d1", p1=FAILED)
    one_s = (time.thread_time() - start) / 20
    start = time.thread_time()
    for n in range(20):
        registry.update_connectivity(n / 1_000)
    sweep_s = (time.thread_time() - start) / 20
    assert one_s < 20 * open_s
    assert sweep_s < 20 * open_s
