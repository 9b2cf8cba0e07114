"""Algorithm 1: phases apart, then replicas."""

from dataclasses import replace

import pytest

from cleave.api.role import Role
from cleave.planner.search import goodput, high_affinity
from cleave.planner.search.candidate_placement import build_cell
from cleave.planner.search.candidates import list_candidates
from cleave.planner.search.context import SearchContext
from cleave.planner.search.trials import Targets, Trials

from tests.support import known_problems


@pytest.mark.parametrize("slo", [(200, 100), (90, 25)])
def test_each_phase_is_the_best_of_all_that_an_exhaustive_search_tries(
    slo: tuple[float, float],
) -> None:
    problem = known_problems.problem(supplies=(known_problems.nodes(1),))
    trials, targets = Trials(problem.demand), Targets(*slo, 0.9)
    found = list_candidates(problem)
    (phases,) = high_affinity.optimize(SearchContext(problem, trials, targets), found)
    for role, alone, rated in (
        (Role.PREFILL, targets.prefill_only, phases.prefill),
        (Role.DECODE, targets.decode_only, phases.decode),
    ):
        rates = [
            goodput.find_goodput(
                trials,
                build_cell(problem, high_affinity.build_single(problem, each, role)),
                alone,
            ).rate
            / each.gpus
            for each in found
        ]
        assert rated is not None
        # Limits of a pass are tuned on top, so it may be better than all.
        assert rated.per_resource >= max(rates) * 0.985


def test_tight_ttft_takes_tensor_parallel_prefill_and_lax_ttft_does_not() -> None:
    # DistServe, section 3.1: intra-op shortens execution, which counts when the target is near it.
    sizes = []
    for ttft_ms in (75, 2000):
        problem = known_problems.blog()
        search = known_problems.search(problem, Targets(ttft_ms, 40, 0.9))
        (phases,) = high_affinity.optimize(search, list_candidates(problem))
        assert phases.prefill is not None
        sizes.append(phases.prefill.placement.groups[0].instance.candidate.parallelism.tensor)
    assert sizes[0] > 1
    assert sizes[1] == 1


def test_a_phase_whose_target_no_instance_meets_has_no_instance() -> None:
    problem = known_problems.blog()
    search = known_problems.search(problem, Targets(400, 5, 0.9))
    (phases,) = high_affinity.optimize(search, list_candidates(problem))
    assert phases.decode is None
    assert phases.prefill is not None
    assert high_affinity.list_pairs(problem, [phases]) == []


def test_different_kinds_of_gpu_are_paired_in_every_way() -> None:
    problem = known_problems.problem(
        supplies=(known_problems.nodes(1), known_problems.nodes(1, gpu="H100")),
        kinds=(("H100", known_problems.Kind(prompt=0.5, decode=0.8)),),
    )
    phases = high_affinity.optimize(known_problems.search(problem), list_candidates(problem))
    pairs = high_affinity.list_pairs(problem, phases)
    kinds = {
        tuple(
            group.instance.candidate.supply.gpu
            for rated in pair
            for group in rated.placement.groups
        )
        for pair in pairs
    }
    assert kinds == {("A100", "A100"), ("A100", "H100"), ("H100", "A100"), ("H100", "H100")}


def test_kv_heads_in_copies_are_not_given_to_fewer_gpus() -> None:
    problem = known_problems.problem()
    search = known_problems.search(problem)
    (prefill,) = high_affinity.optimize(search, [known_problems.of_size(problem, 4)])
    (decode,) = high_affinity.optimize(search, [known_problems.of_size(problem, 2)])
    phases = [replace(prefill, decode=None), replace(decode, prefill=None)]
    assert len(high_affinity.list_pairs(problem, phases)) == 1
    few = replace(problem, shape=replace(problem.shape, num_kv_heads=2))
    assert high_affinity.list_pairs(few, phases) == []
