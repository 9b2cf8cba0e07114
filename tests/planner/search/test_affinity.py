"""Which algorithm: what the network allows."""

from dataclasses import replace

from cleave.api.planning import Affinity, Planning
from cleave.planner.problem import Problem
from cleave.planner.search import affinity
from cleave.planner.search.affinity import AffinityChoice
from cleave.planner.search.candidates import list_candidates

from tests.support import known_problems


def choose(problem: Problem) -> AffinityChoice:
    return affinity.choose_affinity(known_problems.search(problem), list_candidates(problem))


def test_infiniband_is_high_affinity_and_the_papers_25_gigabit_is_low() -> None:
    # DistServe, section 6.1: 25 Gbit/s between nodes, so Algorithm 2 in most experiments.
    fast = choose(known_problems.problem())
    assert fast.affinity is Affinity.HIGH
    assert fast.reason.startswith("KV may leave its node: ")
    slow = choose(
        known_problems.problem(
            supplies=(known_problems.nodes(4, network=known_problems.SLOW_NETWORK),)
        )
    )
    assert slow.affinity is Affinity.LOW
    assert slow.reason.startswith("KV stays inside a node: over the network that of a mean prompt ")


def test_longer_prompts_or_a_tighter_target_lower_the_affinity() -> None:
    assert choose(known_problems.problem(known_problems.chat(prompt=900))).affinity is Affinity.LOW
    tight = known_problems.problem(slo=known_problems.Slo(ttft_ms=80, tpot_ms=100))
    assert choose(tight).affinity is Affinity.LOW


def test_one_node_needs_no_network() -> None:
    slow = known_problems.nodes(1, network=known_problems.SLOW_NETWORK)
    assert choose(known_problems.problem(supplies=(slow,))).affinity is Affinity.HIGH


def test_pods_of_one_node_use_the_network_unless_they_are_one_cell() -> None:
    one = known_problems.nodes(1, network=known_problems.SLOW_NETWORK)
    pods = replace(one, node_link=known_problems.SLOW_NETWORK, cell_link=known_problems.NVLINK)
    choice = choose(known_problems.problem(supplies=(pods,)))
    assert choice.affinity is Affinity.LOW
    assert "inside a cell that is one pod it moves at" in choice.reason
    assert "GB/s (NVLink), as was seen there" in choice.reason
    fast = replace(pods, network_link=known_problems.INFINIBAND)
    assert choose(known_problems.problem(supplies=(fast,))).affinity is Affinity.HIGH


def test_an_explicit_choice_is_followed() -> None:
    for mode in (Affinity.HIGH, Affinity.LOW):
        choice = choose(known_problems.problem(planning=Planning(affinity=mode)))
        assert choice == AffinityChoice(mode, f"{mode.value} affinity as requested")
