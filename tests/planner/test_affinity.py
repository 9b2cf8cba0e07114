"""Which algorithm: what the network allows."""

from cleave.api.planning import Affinity, Planning
from cleave.planner import affinity
from cleave.planner.affinity import Choice
from cleave.planner.candidates import candidates
from cleave.planner.problem import Problem
from cleave.planner.trials import Trials

from tests.support import worlds


def choose(asked: Problem) -> Choice:
    return affinity.choose(asked, Trials(asked.demand), candidates(asked))


def test_infiniband_is_high_affinity_and_the_papers_25_gigabit_is_low() -> None:
    # DistServe, section 6.1: 25 Gbit/s between nodes, so Algorithm 2 in most experiments.
    assert choose(worlds.problem()).affinity is Affinity.HIGH
    slow = choose(worlds.problem(supplies=(worlds.nodes(4, network=worlds.SLOW_NETWORK),)))
    assert slow.affinity is Affinity.LOW
    assert "ms over the network" in slow.reason


def test_longer_prompts_or_a_tighter_target_lower_the_affinity() -> None:
    assert choose(worlds.problem(worlds.chat(prompt=900))).affinity is Affinity.LOW
    tight = worlds.problem(slo=worlds.Slo(ttft_ms=80, tpot_ms=100))
    assert choose(tight).affinity is Affinity.LOW


def test_one_node_needs_no_network() -> None:
    slow = worlds.nodes(1, network=worlds.SLOW_NETWORK)
    assert choose(worlds.problem(supplies=(slow,))).affinity is Affinity.HIGH


def test_what_is_asked_for_is_done() -> None:
    for asked in (Affinity.HIGH, Affinity.LOW):
        choice = choose(worlds.problem(planning=Planning(affinity=asked)))
        assert choice == Choice(asked, f"{asked.value} affinity as requested")
