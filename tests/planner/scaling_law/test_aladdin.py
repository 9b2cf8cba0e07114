import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.perf import named_profiles
from cleave.perf.estimate import Confidence, Estimate, LatencySource
from cleave.perf.published import distserve
from cleave.planner.scaling_law import aladdin
from cleave.planner.scaling_law.aladdin import ScalingError, WorkerLaw
from cleave.planner.search.trials import Targets, Trials
from cleave.simulator.fleet import SimulatedEngine, SimulatedFleet, SimulatedPool
from cleave.traffic import workload
from cleave.traffic.workload import Demand, GeneratedRequests, IndependentLengths, LogNormal

CHAT = Demand(
    1.0,
    GeneratedRequests(
        IndependentLengths(
            LogNormal.from_mean_and_p90(300, 600), LogNormal.from_mean_and_p90(100, 200)
        )
    ),
)


def opt_66b(gpus: int, kv_capacity_tokens: int | None = None) -> Estimate:
    name = f"distserve/opt-66b/tp{gpus}"
    tokens = kv_capacity_tokens or distserve.KV_CAPACITY_TOKENS["opt-66b"][gpus, 1]
    timing = named_profiles.to_timing(distserve.FITS[name])
    trust = Confidence(LatencySource.MEASURED, name, None)
    return Estimate(timing, tokens, 512, 2048, 1 << 20, 1e11, 400 * gpus, gpus, trust)


WORKERS = {gpus: opt_66b(gpus) for gpus in (2, 4, 8)}


def test_the_best_size_is_the_largest_of_equation_6() -> None:
    tpot_ms = 60.0
    context = CHAT.mean_prompt_tokens + CHAT.mean_output_tokens / 2
    expected_rates = {}
    for gpus, worker in WORKERS.items():
        batch = max(
            n
            for n in range(2000)
            if worker.timing.predict_decode_ms(n, round(n * context)) <= tpot_ms
        )
        batch = min(batch, int(worker.kv_capacity_tokens / context))
        pass_ms = worker.timing.predict_decode_ms(batch, round(batch * context))
        expected_rates[gpus] = batch * 1000 / pass_ms / gpus
    sizes = aladdin.rank_worker_sizes(WORKERS, CHAT, tpot_ms)
    assert {size.gpus: size.tokens_per_s_per_gpu for size in sizes} == pytest.approx(expected_rates)
    assert sizes[0].gpus == max(expected_rates, key=expected_rates.__getitem__)


def test_little_memory_asks_for_more_gpus_per_worker_than_compute_alone() -> None:
    roomy = {gpus: opt_66b(gpus, 10_000_000) for gpus in (2, 4, 8)}
    assert aladdin.rank_worker_sizes(roomy, CHAT, 200.0)[0].gpus == 2
    best, *_ = aladdin.rank_worker_sizes(WORKERS, CHAT, 200.0)
    assert best.gpus > 2
    (two,) = (size for size in aladdin.rank_worker_sizes(WORKERS, CHAT, 200.0) if size.gpus == 2)
    assert two.is_bound_by_kv
    assert two.batch == int(
        WORKERS[2].kv_capacity_tokens / (CHAT.mean_prompt_tokens + CHAT.mean_output_tokens / 2)
    )


def test_a_tight_target_leaves_only_large_workers() -> None:
    sizes = aladdin.rank_worker_sizes(WORKERS, CHAT, 27.0)
    assert [size.gpus for size in sizes] == [8]
    assert not sizes[0].is_bound_by_kv
    with pytest.raises(ScalingError, match="tpot_ms 5: no worker of 2, 4, 8 GPUs decodes"):
        aladdin.rank_worker_sizes(WORKERS, CHAT, 5.0)


@given(
    k5=st.floats(0.01, 5),
    c5=st.floats(-3, 5),
    rates=st.lists(st.integers(1, 1000), min_size=2, max_size=12, unique=True),
)
def test_a_fitted_law_never_undercuts_a_count(k5: float, c5: float, rates: list[int]) -> None:
    counts = {float(rate): max(1, math.ceil(k5 * rate + c5)) for rate in rates}
    law = aladdin.fit_workers(counts)
    for rate, count in counts.items():
        assert law.compute_workers(rate) >= count


def test_a_fitted_law_recovers_the_line_behind_the_counts() -> None:
    true = WorkerLaw(0.37, 0.8, 0.0)
    law = aladdin.fit_workers(
        {float(rate): true.compute_workers(rate) for rate in range(5, 200, 5)}
    )
    assert law.k5 == pytest.approx(true.k5, rel=0.02)
    assert all(
        abs(law.compute_workers(rate) - true.compute_workers(rate)) <= 1 for rate in range(5, 400)
    )


def test_rates_below_the_lower_bound_do_not_count() -> None:
    law = aladdin.fit_workers({1.0: 50, 20.0: 2, 40.0: 4}, lowest_rate=10.0)
    assert law.compute_workers(40) == 4
    assert law.holds_at(11)
    assert not law.holds_at(10)
    with pytest.raises(ScalingError, match="1 rates above 30"):
        aladdin.fit_workers({20.0: 2, 40.0: 4}, lowest_rate=30.0)


def test_workers_for_no_traffic_are_one() -> None:
    assert WorkerLaw(0.5, -3, 0).compute_workers(0) == 1
    assert WorkerLaw(0.5, -3, 0).compute_fraction(0) == 0


@given(
    needed=st.lists(st.integers(1, 60), min_size=1, max_size=8).map(sorted),
    most=st.integers(60, 100),
)
def test_counts_are_the_fewest_that_hold(needed: list[int], most: int) -> None:
    need = {float(at): count for at, count in enumerate(needed, 1)}
    calls = []

    def holds(workers: int, rate: float) -> bool:
        calls.append(workers)
        return workers >= need[rate]

    assert aladdin.count_workers(holds, list(need)[::-1], most) == need
    assert max(calls) <= most


def test_a_rate_that_no_number_of_workers_sustains_is_reported() -> None:
    with pytest.raises(ScalingError, match="rate 3: 8 workers do not serve it"):
        aladdin.count_workers(lambda workers, rate: rate < 3, [1.0, 3.0], max_workers=8)


def test_the_lower_bound_comes_from_the_standard_error_of_the_lengths() -> None:
    regular = replace(CHAT, source=workload.build_fixed(100, 100, 1.0).source)
    assert aladdin.compute_lowest_rate(regular, heartbeat_s=1) == 0
    drawn = CHAT.draw(20_000)
    variation = max(
        drawn.prompt_tokens.std() / drawn.prompt_tokens.mean(),
        drawn.output_tokens.std() / drawn.output_tokens.mean(),
    )
    bound = aladdin.compute_lowest_rate(CHAT, heartbeat_s=30, error=0.05)
    assert variation / math.sqrt(bound * 30) == pytest.approx(0.05)
    with pytest.raises(ScalingError, match="heartbeat_s 0 must be above 0"):
        aladdin.compute_lowest_rate(CHAT, 0)


def test_simulated_counts_of_workers_lie_on_a_line() -> None:
    """The claim of section 5.2, with the simulator in the place of the paper's Algorithm 1."""
    profile = named_profiles.load_profile("vllm/opt-13b/tp1")
    engine = SimulatedEngine(profile.timing, profile.kv_capacity_tokens)
    trials, targets = Trials(CHAT), Targets(1000.0, 60.0, 0.9)

    def holds(workers: int, rate: float) -> bool:
        fleet = SimulatedFleet(mixed=(SimulatedPool(engine, workers),))
        span = trials.compute_span(rate, targets)
        return trials.measure_shares(fleet, rate, targets, span).both >= targets.attainment

    counts = aladdin.count_workers(holds, [5.0, 10.0, 20.0, 30.0, 40.0])
    law = aladdin.fit_workers(counts)
    assert all(law.compute_workers(rate) - count in (0, 1) for rate, count in counts.items())
    predicted = law.compute_workers(60.0)
    assert holds(predicted + 1, 60.0)
    assert not holds(predicted - 2, 60.0)
