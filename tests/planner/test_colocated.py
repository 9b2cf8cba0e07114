"""The best plan without disaggregation, and the price of another workload's configuration."""

import pytest

from cleave.planner import colocated, goodput
from cleave.planner.candidates import candidates, mixed_instance
from cleave.planner.draft import Draft, Group, cell_fleet
from cleave.planner.problem import Policies
from cleave.planner.trials import Trials
from cleave.planner.tuning import NUM_BATCHED_TOKENS, NUM_SEQS
from cleave.simulator.fleet import Batching

from tests.support import worlds


def test_no_parallelism_batch_or_chunk_is_much_better_than_what_is_found() -> None:
    asked = worlds.blog(engine="vllm", policies=Policies())
    trials, targets = Trials(asked.demand), worlds.targets(asked)
    found = [each for each in candidates(asked) if each.gpus <= 4]
    rated = colocated.optimise(asked, trials, found, targets)
    rates = []
    for candidate in found:
        instance = mixed_instance(asked, candidate, Batching.VLLM)
        for seqs in NUM_SEQS[::2]:
            for tokens in NUM_BATCHED_TOKENS[::2]:
                limited = instance.limited(seqs, tokens)
                draft = Draft((Group(worlds.Role.MIXED, limited, 1),))
                fleet = cell_fleet(asked, draft)
                rates.append(goodput.find(trials, fleet, targets).rate / candidate.gpus)
    assert rated is not None
    assert rated.per_resource >= max(rates) * 0.97


def test_every_policy_that_is_asked_for_is_tried() -> None:
    paged = Policies(mixed=(Batching.ORCA_PAGED, Batching.PREFILL_FIRST, Batching.VLLM))
    best = {}
    for policies in (paged, *(Policies(mixed=(each,)) for each in paged.mixed)):
        asked = worlds.blog(policies=policies)
        rated = colocated.optimise(
            asked, Trials(asked.demand), candidates(asked)[:1], worlds.targets(asked)
        )
        assert rated is not None
        best[policies.mixed] = rated.per_resource
    assert best[paged.mixed] == pytest.approx(max(best[(each,)] for each in paged.mixed), rel=0.02)


def test_at_a_low_rate_one_small_instance_is_enough() -> None:
    asked = worlds.blog(rate=1.0)
    found = candidates(asked)
    rated = colocated.fewest(asked, Trials(asked.demand), found, worlds.targets(asked))
    assert rated is not None
    assert rated.draft.gpus == 1


def test_the_configuration_of_another_workload_costs_more_and_the_own_one_nothing() -> None:
    chat, long = worlds.problem(), worlds.problem(worlds.chat(prompt=1200, output=400))
    drafts = []
    for asked in (chat, long):
        rated = colocated.optimise(
            asked, Trials(asked.demand), candidates(asked), worlds.targets(asked)
        )
        assert rated is not None
        drafts.append(rated.draft)
    own, foreign = drafts
    trials, targets = Trials(chat.demand), worlds.targets(chat)
    assert colocated.misconfiguration_cost(chat, trials, targets, own, own) == 1
    assert colocated.misconfiguration_cost(chat, trials, targets, own, foreign) >= 0.98
    hopeless = worlds.Targets(10, 5, 0.9)
    assert colocated.misconfiguration_cost(chat, trials, hopeless, own, foreign) == float("inf")
