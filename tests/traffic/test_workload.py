import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.api import workload as api
from cleave.simulator.trace import PromptBlocks, Trace
from cleave.traffic import workload
from cleave.traffic.workload import (
    Demand,
    DemandError,
    GeneratedRequests,
    IndependentLengths,
    LogNormal,
    Quantiles,
    RecordedLengths,
)

CHAT = api.Workload(
    rate=5.0,
    prompt_tokens=api.LengthDistribution(mean=700, p90=1400),
    output_tokens=api.LengthDistribution(mean=200, p90=400),
)


@pytest.fixture
def chat(tmp_path) -> Demand:
    return workload.build_from_spec(CHAT, tmp_path)


@pytest.fixture
def recorded() -> Trace:
    return Trace(
        np.array([0.0, 100.0, 900.0, 1000.0, 3000.0]),
        np.array([10, 20, 30, 40, 50]),
        np.array([1, 2, 3, 4, 5]),
    )


def test_drawn_lengths_have_the_declared_mean_and_90th_percentile(chat) -> None:
    trace = chat.draw(200_000)
    assert np.mean(trace.prompt_tokens) == pytest.approx(700, rel=0.01)
    assert np.percentile(trace.prompt_tokens, 90) == pytest.approx(1400, rel=0.01)
    assert np.mean(trace.output_tokens) == pytest.approx(200, rel=0.01)
    assert trace.rate == pytest.approx(5, rel=0.01)


def test_lengths_of_prompt_and_output_are_drawn_apart(chat) -> None:
    trace = chat.draw(50_000)
    assert abs(np.corrcoef(trace.prompt_tokens, trace.output_tokens)[0, 1]) < 0.02


@given(seed=st.integers(0, 2**32), rate=st.floats(0.01, 1000), num=st.integers(1, 200))
def test_another_rate_is_the_same_sequence_stretched(seed, rate, num) -> None:
    demand = Demand(
        1.0, GeneratedRequests(IndependentLengths(LogNormal(5, 1), LogNormal(4, 1)), 2.0)
    )
    slow, fast = demand.draw(num, 1.0, seed), demand.draw(num, rate, seed)
    assert np.array_equal(slow.prompt_tokens, fast.prompt_tokens)
    assert np.array_equal(slow.output_tokens, fast.output_tokens)
    assert np.allclose(slow.arrival_ms, fast.arrival_ms * rate)


@given(
    seed=st.integers(0, 1000),
    burstiness=st.sampled_from([0.0, 0.3, 1.0, 4.0, 20.0]),
    num=st.integers(1, 300),
)
def test_a_longer_draw_begins_with_the_shorter_one(seed, burstiness, num) -> None:
    recorded = np.arange(1, 8)
    marginals = IndependentLengths(LogNormal(5, 1), Quantiles((0, 0.5, 1), (1, 10, 400)))
    for lengths in (marginals, RecordedLengths(recorded, recorded * 2)):
        demand = Demand(1.0, GeneratedRequests(lengths, burstiness))
        short, long = demand.draw(num, seed=seed), demand.draw(2 * num, seed=seed)
        assert np.array_equal(short.arrival_ms, long.arrival_ms[:num])
        assert np.array_equal(short.prompt_tokens, long.prompt_tokens[:num])
        assert np.array_equal(short.output_tokens, long.output_tokens[:num])


def test_seeds_differ(chat) -> None:
    assert not np.array_equal(chat.draw(50).prompt_tokens, chat.draw(50, seed=1).prompt_tokens)
    assert not np.array_equal(chat.draw(50).arrival_ms, chat.draw(50, seed=1).arrival_ms)


def test_what_is_drawn_belongs_to_the_caller(chat) -> None:
    first = chat.draw(10)
    first.prompt_tokens[:] = 0
    first.arrival_ms[:] = 0
    again = chat.draw(10)
    assert np.all(again.prompt_tokens > 0)
    assert np.all(again.arrival_ms > 0)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 3.0])
def test_gaps_have_the_declared_coefficient_of_variation(burstiness) -> None:
    gaps = np.diff(workload.build_fixed(10, 10, 2.0, burstiness).draw(100_000).arrival_ms)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness, rel=0.03)


def test_regular_arrivals_are_regular() -> None:
    trace = workload.build_fixed(512, 64, 4.0, burstiness=0.0).draw(4)
    assert trace.arrival_ms.tolist() == [250, 500, 750, 1000]
    assert trace.prompt_tokens.tolist() == [512] * 4
    assert trace.output_tokens.tolist() == [64] * 4


@given(
    lengths=st.tuples(st.floats(1, 50_000), st.floats(1, 2.27)),
    limit=st.integers(2, 5000),
    seed=st.integers(0, 100),
)
def test_lengths_are_at_least_one_and_within_the_model(lengths, limit, seed) -> None:
    mean, ratio = lengths
    marginal = LogNormal.from_mean_and_p90(mean, mean * ratio)
    demand = Demand(
        1.0, GeneratedRequests(IndependentLengths(marginal, marginal))
    ).with_max_model_len(limit)
    trace = demand.draw(100, seed=seed)
    assert trace.prompt_tokens.min() >= 1
    assert trace.output_tokens.min() >= 1
    assert (trace.prompt_tokens + trace.output_tokens).max() <= limit


def test_the_share_that_does_not_fit_the_model_is_reported(recorded) -> None:
    demand = workload.resample_trace(recorded, 1.0)
    assert demand.compute_share_longer_than(54) == pytest.approx(0.2, abs=0.02)
    assert demand.compute_share_longer_than(55) == 0


def test_mean_lengths_are_those_after_the_limit(recorded) -> None:
    demand = workload.build_from_trace(recorded)
    assert (demand.mean_prompt_tokens, demand.mean_output_tokens) == (30, 3)
    assert demand.with_max_model_len(41).mean_prompt_tokens == 28


def test_a_trace_is_replayed_as_it_came(recorded) -> None:
    demand = workload.build_from_trace(recorded)
    trace = demand.draw(5)
    assert np.allclose(np.diff(trace.arrival_ms), np.diff(recorded.arrival_ms))
    assert np.array_equal(trace.prompt_tokens, recorded.prompt_tokens)
    assert np.array_equal(trace.output_tokens, recorded.output_tokens)


def test_a_replay_longer_than_its_trace_goes_round_at_the_same_rate(recorded) -> None:
    trace = workload.build_from_trace(recorded).draw(501)
    assert trace.prompt_tokens[5:10].tolist() == [10, 20, 30, 40, 50]
    assert trace.rate == pytest.approx(recorded.rate)


def test_another_seed_replays_from_another_request_on(recorded) -> None:
    demand = workload.build_from_trace(recorded)
    starts = {int(demand.draw(1, seed=seed).prompt_tokens[0]) for seed in range(1, 30)}
    assert starts == {10, 20, 30, 40, 50}
    for seed in range(1, 5):
        prompts = demand.draw(5, seed=seed).prompt_tokens
        assert np.array_equal(demand.draw(5, seed=seed).output_tokens * 10, prompts)


def test_resampling_keeps_pairs_together(recorded) -> None:
    trace = workload.resample_trace(recorded, 3.0).draw(1000)
    assert np.array_equal(trace.output_tokens * 10, trace.prompt_tokens)
    assert set(trace.prompt_tokens.tolist()) == {10, 20, 30, 40, 50}


def test_quantiles_are_met() -> None:
    lengths = Quantiles((0.0, 0.5, 0.9, 1.0), (1.0, 100.0, 500.0, 4000.0))
    drawn = lengths.draw(np.random.default_rng(1), 200_000)
    assert np.percentile(drawn, [50, 90]) == pytest.approx([100, 500], rel=0.02)


@pytest.mark.parametrize("p90", [99, 228, float("nan")])
def test_a_90th_percentile_that_no_log_normal_has_is_refused(p90) -> None:
    with pytest.raises(DemandError, match="no log-normal distribution has it"):
        LogNormal.from_mean_and_p90(100, p90)


def test_rates_and_counts_that_mean_nothing_are_refused(recorded) -> None:
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(DemandError, match="rate"):
            workload.build_fixed(1, 1, rate)
        with pytest.raises(DemandError, match="rate"):
            workload.build_fixed(1, 1, 1.0).draw(5, rate)
    with pytest.raises(DemandError, match="num_requests 0"):
        workload.build_fixed(1, 1, 1.0).draw(0)
    with pytest.raises(DemandError, match="max_model_len 1"):
        workload.build_fixed(1, 1, 1.0).with_max_model_len(1)
    at_once = Trace(np.zeros(3), np.ones(3, np.int64), np.ones(3, np.int64))
    with pytest.raises(DemandError, match="span no time"):
        workload.build_from_trace(at_once)


def build_recorded_blocks() -> Trace:
    blocks = PromptBlocks(16, np.array([0, 2, 4, 5]), np.array([0, 1, 0, 2, 0]), 3)
    tokens = np.array([32, 32, 16])
    return Trace(np.array([0.0, 100.0, 200.0]), tokens, tokens, blocks=blocks)


def test_a_replay_keeps_the_blocks_of_its_prompts_and_repeats_none_in_the_next_lap() -> None:
    drawn = workload.build_from_trace(build_recorded_blocks()).draw(5).blocks
    assert drawn.starts.tolist() == [0, 2, 4, 5, 7, 9]
    assert drawn.numbers.tolist() == [0, 1, 0, 2, 0, 3, 4, 3, 5]
    assert drawn.count == 6


def test_prompts_that_are_cut_lose_the_blocks_of_their_end() -> None:
    demand = workload.build_from_trace(build_recorded_blocks()).with_max_model_len(17)
    assert demand.draw(3).blocks.numbers.tolist() == [0, 0, 0]


def test_resampled_lengths_have_no_blocks() -> None:
    assert workload.resample_trace(build_recorded_blocks(), 1.0).draw(3).blocks is None


def test_a_trace_with_blocks_keeps_its_order_at_another_rate(tmp_path) -> None:
    lines = [
        {"timestamp": at, "input_length": 600, "output_length": 2, "hash_ids": [1, at]}
        for at in (0, 1000, 2000)
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = api.TraceSource(path="t.jsonl")
    demand = workload.build_from_spec(api.Workload(rate=50.0, trace=source), tmp_path)
    drawn = demand.draw(3000)
    assert drawn.rate == pytest.approx(50, rel=0.1)
    assert drawn.blocks.count_repeated()[:4].tolist() == [0, 1, 1, 0]
    assert np.diff(drawn.arrival_ms).std() == pytest.approx(20, rel=0.1)
