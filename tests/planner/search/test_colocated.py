"""The best plan without disaggregation, and the price of another workload's configuration."""

import pytest

from cleave.planner.problem import Policies
from cleave.planner.search import colocated, goodput
from cleave.planner.search.batch_limits import NUM_BATCHED_TOKENS, NUM_SEQS
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup, build_cell
from cleave.planner.search.candidates import build_mixed, list_candidates
from cleave.planner.search.trials import Trials
from cleave.simulator.fleet import Batching

from tests.support import known_problems


def test_no_parallelism_batch_or_chunk_is_much_better_than_what_is_found() -> None:
    problem = known_problems.blog(engine="vllm", policies=Policies())
    trials, targets = Trials(problem.demand), known_problems.targets(problem)
    found = [each for each in list_candidates(problem) if each.gpus <= 4]
    rated = colocated.optimize(known_problems.search(problem), found)
    rates = []
    for candidate in found:
        instance = build_mixed(problem, candidate, Batching.VLLM)
        for seqs in NUM_SEQS[::2]:
            for tokens in NUM_BATCHED_TOKENS[::2]:
                limited = instance.with_limits(seqs, tokens)
                draft = CandidatePlacement((InstanceGroup(known_problems.Role.MIXED, limited, 1),))
                fleet = build_cell(problem, draft)
                rates.append(goodput.find_goodput(trials, fleet, targets).rate / candidate.gpus)
    assert rated is not None
    assert rated.per_resource >= max(rates) * 0.97


def test_every_requested_policy_is_tried() -> None:
    paged = Policies(mixed=(Batching.ORCA_PAGED, Batching.PREFILL_FIRST, Batching.VLLM))
    best = {}
    for policies in (paged, *(Policies(mixed=(each,)) for each in paged.mixed)):
        problem = known_problems.blog(policies=policies)
        rated = colocated.optimize(known_problems.search(problem), list_candidates(problem)[:1])
        assert rated is not None
        best[policies.mixed] = rated.per_resource
    assert best[paged.mixed] == pytest.approx(max(best[(each,)] for each in paged.mixed), rel=0.02)
