from dataclasses import replace

import pytest

from cleave.perf.estimate import Confidence, Estimate, LatencySource
from cleave.perf.timing import EngineTiming
from cleave.planner.plan import Percentiles
from cleave.planner.provision.search import (
    ClusterDesign,
    MachinePair,
    MachineType,
    PairSearch,
    ProvisioningError,
    ProvisioningObjective,
    ProvisioningRequest,
    provision,
)
from cleave.planner.provision.slowdown import SPLITWISE_TABLE_VI, Slowdowns
from cleave.planner.search.trials import Trials
from cleave.simulator.fleet import Batching, SimulatedTransfer
from cleave.simulator.run import simulate
from cleave.traffic import workload
from cleave.traffic.conversations import Conversations
from cleave.traffic.workload import Demand, GeneratedRequests, IndependentLengths, LogNormal

CHAT = Demand(
    1.0,
    GeneratedRequests(
        IndependentLengths(
            LogNormal.from_mean_and_p90(900, 1800), LogNormal.from_mean_and_p90(60, 120)
        )
    ),
)


def machine(
    name: str, prompt_ms: float, token_ms: float, cost: float, power: float, kv: int = 200_000
) -> MachineType:
    """Prompt of 1,000 tokens, and token, in ms."""
    timing = EngineTiming(
        prompt_step=1000.0,
        prompt_ms=(10.0, 10.0 + prompt_ms),
        prompt_square_ms=0.0,
        decode_ms=(token_ms, token_ms * 1.004),
        decode_context_ms=(token_ms / 400_000,),
    )
    estimate = Estimate(
        timing,
        kv,
        512,
        8192,
        1 << 18,
        1e11,
        power,
        cost,
        Confidence(LatencySource.MEASURED, "made up", None),
    )
    return MachineType(name, estimate)


OLD = machine("A", 180, 42, cost=1.0, power=1.0)
NEW = machine("H", 80, 28, cost=2.35, power=1.75)
CAPPED = machine("Hcap", 104, 28, cost=2.35, power=1.23)
LINK = SimulatedTransfer(latency_ms=5.0)
AA, HH = MachinePair("AA", OLD, OLD, LINK), MachinePair("HH", NEW, NEW, LINK)
HA, HHCAP = MachinePair("HA", NEW, OLD, LINK), MachinePair("HHcap", NEW, CAPPED, LINK)
MIXED = MachinePair("baseline A", OLD, None)


def question(
    objective: ProvisioningObjective, pairs: tuple[MachinePair, ...], **settings: object
) -> ProvisioningRequest:
    return replace(ProvisioningRequest(CHAT, pairs, OLD.estimate.timing, objective), **settings)


def shape(design: ClusterDesign) -> tuple[str, int, int]:
    return design.name, design.num_prompt, design.num_token


@pytest.mark.parametrize(
    ("objective", "pair"), [(ProvisioningObjective.COST, HA), (ProvisioningObjective.POWER, HHCAP)]
)
def test_the_cheapest_cluster_is_that_of_the_full_grid(
    objective: ProvisioningObjective, pair: MachinePair
) -> None:
    most, rate = 8, 12.0
    problem = question(objective, (pair,), rate=rate, max_machines=most)
    weight = (
        pair.compute_cost_per_hour
        if objective is ProvisioningObjective.COST
        else pair.compute_power_watts
    )
    grid = PairSearch(problem, pair)
    holding = [
        (weight(prompts, tokens), prompts, tokens)
        for prompts in range(1, most + 1)
        for tokens in range(1, most + 1)
        if grid.holds(prompts, tokens, rate)
    ]
    assert 0 < len(holding) < most * most
    edge = PairSearch(problem, pair)
    found = edge.find_cheapest()
    assert found is not None
    assert weight(found.num_prompt, found.num_token) == pytest.approx(min(holding)[0])
    assert edge.num_trials < grid.num_trials / 2


def test_the_best_split_of_a_power_budget_is_that_of_all_splits() -> None:
    budget = 14.0
    problem = question(
        ProvisioningObjective.THROUGHPUT, (HA,), max_power_watts=budget, max_machines=14
    )
    (found,) = provision(problem)
    everything = PairSearch(problem, HA)
    rates = {
        (prompts, tokens): everything.find_highest_rate(prompts, tokens, 0.0, bound * 1.05)
        for bound, prompts, tokens in everything.list_splits()
    }
    assert len(rates) > 5
    assert found.rate == pytest.approx(max(rates.values()), rel=0.03)
    assert found.power_watts <= budget
    assert HA.compute_power_watts(found.num_prompt, found.num_token + 1) > budget


def test_slowdowns_of_a_design_hold_and_one_machine_fewer_breaks_them() -> None:
    problem = question(ProvisioningObjective.COST, (AA,), rate=10.0, max_machines=20)
    (design,) = provision(problem)
    search = PairSearch(problem, AA)
    assert design.slowdowns.is_within(SPLITWISE_TABLE_VI)
    assert design.rate == 10
    assert design.num_prompt > 1
    assert not search.holds(design.num_prompt - 1, design.num_token, 10.0)
    assert design.num_token == 1 or not search.holds(design.num_prompt, design.num_token - 1, 10.0)


def test_what_pools_may_serve_by_helping_each_other_is_simulated() -> None:
    problem = question(ProvisioningObjective.COST, (HHCAP,), rate=16.5)
    lending, alone = (PairSearch(problem, replace(HHCAP, lends=lends)) for lends in (True, False))
    rate = 1.1 * alone.compute_rate_bound(1, 2)
    assert not alone.holds(1, 2, rate)
    lending.holds(1, 2, rate)
    assert (alone.num_trials, lending.num_trials) == (0, 1)
    assert not lending.holds(1, 2, 1.1 * lending.compute_rate_bound(1, 2))
    assert lending.num_trials == 1


def test_the_bound_of_a_pair_that_lends_is_that_of_machines_that_compute_both() -> None:
    problem = question(ProvisioningObjective.COST, (AA,), rate=1.0)
    lending, alone = (PairSearch(problem, replace(AA, lends=lends)) for lends in (True, False))
    prompts, tokens = alone.compute_rate_bound(1, 100), alone.compute_rate_bound(100, 1)
    assert lending.compute_rate_bound(2, 3) == pytest.approx(5 * min(prompts, tokens), rel=0.1)


def test_capped_token_machines_save_power_and_no_throughput() -> None:
    capped, full = provision(
        question(ProvisioningObjective.POWER, (HH, HHCAP), rate=25.0, max_machines=20)
    )
    assert shape(capped)[1:] == shape(full)[1:]
    assert (capped.name, full.name) == ("HHcap", "HH")
    assert capped.power_watts < full.power_watts
    assert capped.cost_per_hour == full.cost_per_hour


def test_designs_are_ranked_by_the_objective() -> None:
    pairs = (AA, HH, HA, HHCAP, MIXED)
    by_rate = provision(
        question(ProvisioningObjective.THROUGHPUT, pairs, max_power_watts=21.0, max_machines=24)
    )
    assert [each.rate for each in by_rate] == sorted((d.rate for d in by_rate), reverse=True)
    assert len(by_rate) == len(pairs)
    by_cost = provision(question(ProvisioningObjective.COST, pairs, rate=8.0, max_machines=24))
    assert [each.cost_per_hour for each in by_cost] == sorted(d.cost_per_hour for d in by_cost)


def test_mixed_machines_compute_prompts_in_chunks_as_vllm_does() -> None:
    (pool,) = MIXED.build_fleet(3, 0).mixed
    assert pool.engine.batching is Batching.VLLM
    assert (pool.engine.max_num_batched_tokens, pool.replicas) == (2048, 3)


def test_mixed_machines_are_all_alike_and_fill_the_budget() -> None:
    (design,) = provision(
        question(ProvisioningObjective.THROUGHPUT, (MIXED,), max_cost_per_hour=6.5)
    )
    assert (design.num_prompt, design.num_token, design.machines) == (6, 0, 6)
    (cheapest,) = provision(question(ProvisioningObjective.COST, (MIXED,), rate=design.rate / 2))
    assert cheapest.num_prompt in (3, 4)


def test_a_pair_that_cannot_meet_the_limits_is_left_out() -> None:
    impossible = Slowdowns(*(Percentiles(0.01, 0.01, 0.01),) * 3)
    for objective, settings in (
        (ProvisioningObjective.COST, {"rate": 2.0}),
        (ProvisioningObjective.THROUGHPUT, {"max_power_watts": 6.0}),
    ):
        problem = question(objective, (AA,), limits=impossible, max_machines=4, **settings)
        assert provision(problem) == ()


def test_a_rate_beyond_all_machines_has_no_design() -> None:
    assert (
        provision(question(ProvisioningObjective.COST, (AA, MIXED), rate=1e5, max_machines=3)) == ()
    )


def test_both_budgets_count_at_once() -> None:
    problem = question(
        ProvisioningObjective.THROUGHPUT,
        (HH,),
        max_power_watts=14.0,
        max_cost_per_hour=14.1,
        max_machines=20,
    )
    (design,) = provision(problem)
    assert design.machines == 6
    assert design.cost_per_hour <= 14.1


def test_answers_are_the_same_again() -> None:
    problem = question(ProvisioningObjective.THROUGHPUT, (HA,), max_power_watts=8.0, max_machines=8)
    assert provision(problem) == provision(problem)


def test_progress_is_reported_for_each_pair() -> None:
    progress: list[tuple[int, int, str]] = []
    problem = question(ProvisioningObjective.COST, (AA, HA), rate=1.0, max_machines=4)
    provision(problem, lambda *step: progress.append(step))
    assert progress == [(0, 2, "AA"), (1, 2, "HA")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pairs": ()}, "pairs: set at least one pair"),
        (
            {"objective": ProvisioningObjective.THROUGHPUT},
            "set max_power_watts or max_cost_per_hour",
        ),
        ({"objective": ProvisioningObjective.POWER}, "goal Power: set the rate to serve"),
        ({"rate": 0.0}, "rate 0: must be above 0"),
        ({"rate": float("nan")}, "rate nan: must be above 0"),
        ({"rate": 1.0, "max_machines": 0}, "max_machines 0: must be above 0"),
    ],
)
def test_a_question_without_an_answer_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ProvisioningError, match=message):
        provision(replace(question(ProvisioningObjective.COST, (AA,)), **settings))


def test_a_demand_of_fixed_lengths_can_be_provisioned_for() -> None:
    problem = replace(
        question(ProvisioningObjective.COST, (AA,), rate=4.0, max_machines=10),
        demand=workload.build_fixed(1500, 13, 1.0),
    )
    (design,) = provision(problem)
    assert design.num_prompt > design.num_token


def test_token_machines_help_while_prompts_wait_too_long() -> None:
    fleet = AA.build_fleet(1, 3)
    assert fleet.flipping is not None
    assert fleet.flipping.wait_ms == 4 * OLD.estimate.timing.predict_prefill_ms([2048])
    trace = CHAT.draw(600, 6.0)
    alone = simulate(replace(AA, lends=False).build_fleet(1, 3), trace)
    helped = simulate(fleet, trace)
    assert (alone.num_flips, helped.num_flips > 0) == (0, True)
    assert helped.ttft_ms.max() < alone.ttft_ms.max()


def test_clusters_for_prompts_that_repeat_are_tried_with_full_caches(monkeypatch) -> None:
    spans = []

    def record(self, fleet, rate, span):
        spans.append(span)
        return simulate(fleet, self.build_trace(span.total, rate), self.seed)

    monkeypatch.setattr(Trials, "simulate", record)
    source = replace(CHAT.source, conversations=Conversations(5, 40, 64))
    request = question(ProvisioningObjective.COST, (MIXED,), demand=replace(CHAT, source=source))
    PairSearch(request, MIXED).simulate_slowdowns(2, 0, 1.0)
    assert spans[0].warmup > 50
    PairSearch(question(ProvisioningObjective.COST, (MIXED,)), MIXED).simulate_slowdowns(2, 0, 1.0)
    assert spans[1].warmup == 0


@pytest.mark.parametrize("pair", [HA, replace(HA, lends=False)], ids=["lending", "alone"])
@pytest.mark.parametrize("rate", [8.0, 16.0])
def test_more_machines_never_serve_worse(pair: MachinePair, rate: float) -> None:
    """What the search along the edge of the feasible counts relies on."""
    search = PairSearch(question(ProvisioningObjective.COST, (pair,), rate=rate), pair)
    counts = range(1, 6)
    holds = {(p, t): search.holds(p, t, rate) for p in counts for t in counts}
    assert 0 < sum(holds.values()) < len(holds)
    for prompts, tokens in holds:
        for more in ((prompts + 1, tokens), (prompts, tokens + 1)):
            if more in holds and holds[prompts, tokens]:
                assert holds[more], f"{prompts} + {tokens} hold, {more[0]} + {more[1]} do not"
