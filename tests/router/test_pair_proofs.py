"""Pairs that failed canary handoffs are not picked together; their instances are."""

import random

import pytest

from cleave.api.enums import DispatchPolicy, FallbackPolicy
from cleave.router.errors import NoInstance
from cleave.router.registry import InstanceRegistry
from cleave.router.router import Router
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
    assert len(table.closed_pairs) == 1
    four.update_connectivity(10.0 + expiry_s - 9.0)
    assert not table.closed_pairs


def test_results_belong_to_boots(four, make_event) -> None:
    report(four, "d1", p1=FAILED)
    four.on_event("p2", make_event("p2", "prefill"), 11.0)
    assert "p1-d1" not in pick_pairs(Router(four))
    four.on_event("d1", make_event("d1", "decode", boot_id="d1-next"), 12.0)
    assert "p1-d1" in pick_pairs(Router(four))
    report(four, "d1", p1=FAILED)  # of the boot before
    assert "p1-d1" in pick_pairs(Router(four))


def test_a_newer_version_may_send_results_that_this_one_does_not_know(four) -> None:
    report(four, "d1", p1=9)
    assert "p1-d1" in pick_pairs(Router(four))
