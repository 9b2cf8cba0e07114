"""Whole simulations: known answers, invariants, and what is refused."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.perf.published.aladdin import Coefficients
from cleave.perf.timing import EngineTiming
from cleave.policy.best_fit import BestFitModel
from cleave.policy.role_flipping import build_thresholds
from cleave.simulator.fleet import (
    Batching,
    DispatchPolicy,
    SimulatedEngine,
    SimulatedFleet,
    SimulatedPool,
    SimulatedTransfer,
)
from cleave.simulator.outcome import RequestOutcome
from cleave.simulator.run import EarlyVerdict, measure_latencies, prepare_fleet, simulate
from cleave.simulator.trace import Trace
from cleave.simulator.validation import SimulationError

from tests.support.fleets import OPT_13B, draw_trace, fixed_timing

ENGINE = SimulatedEngine(OPT_13B, 66_144)
PREFILL = dataclasses.replace(ENGINE, batching=Batching.PREFILL_FIRST, max_num_batched_tokens=512)
PACKING = BestFitModel(Coefficients(0.1, 18.0, 0.0005, 0.1, 15.0), ttft_ms=2_000, tpot_ms=40)
seeds = st.integers(0, 1_000_000)


def lone_prompts(timing: EngineTiming) -> SimulatedFleet:
    """A prefill instance that runs one prompt at a time."""
    engine = SimulatedEngine(
        timing, 1 << 40, batching=Batching.PREFILL_FIRST, max_num_batched_tokens=1
    )
    return SimulatedFleet(prefill=(SimulatedPool(engine, 1),))


def mixed(*, schedules_ahead: bool) -> SimulatedFleet:
    timing = dataclasses.replace(fixed_timing(), schedules_ahead=schedules_ahead)
    return SimulatedFleet(mixed=(SimulatedPool(SimulatedEngine(timing, 1_000), 1),))


def disaggregated(prefill: int = 1, decode: int = 1) -> SimulatedFleet:
    transfer = SimulatedTransfer(latency_ms=1.0, token_ms=0.01)
    return SimulatedFleet(
        (SimulatedPool(PREFILL, prefill),), (SimulatedPool(ENGINE, decode),), transfer=transfer
    )


def test_a_prompt_beside_decoding_waits_for_the_iteration_that_is_scheduled_already() -> None:
    trace = Trace(np.array([0.0, 12.5, 12.7]), np.array([5, 5, 5]), np.array([50, 2, 2]))
    starts = {
        is_ahead: simulate(mixed(schedules_ahead=is_ahead), trace).prefill_start_ms
        for is_ahead in (False, True)
    }
    assert starts[False] == pytest.approx([0.0, 13.0, 13.0])
    assert starts[True] == pytest.approx([0.0, 14.0, 14.0])


def test_a_prompt_that_is_computed_in_chunks_waits_for_room_for_all_of_it() -> None:
    engine = SimulatedEngine(fixed_timing(), 40, kv_block_size=4, max_num_batched_tokens=8)
    trace = Trace(np.array([0.0, 0.0]), np.array([8, 36]), np.array([3, 2]))
    starts = simulate(SimulatedFleet(mixed=(SimulatedPool(engine, 1),)), trace).prefill_start_ms
    assert starts == pytest.approx([0.0, 12.0])


@pytest.mark.parametrize(("blocks", "seats"), [(1_000, 2), (22, 8)])
def test_what_ends_beside_decoding_leaves_room_for_the_iteration_after_the_next(
    blocks: int, seats: int
) -> None:
    trace = Trace(np.zeros(3), np.array([20, 20, 20]), np.array([9, 2, 2]))
    starts = {}
    for is_ahead in (False, True):
        timing = dataclasses.replace(fixed_timing(), schedules_ahead=is_ahead)
        engine = SimulatedEngine(timing, 2 * blocks, kv_block_size=2, max_num_seqs=seats)
        result = simulate(SimulatedFleet(mixed=(SimulatedPool(engine, 1),)), trace)
        starts[is_ahead] = result.prefill_start_ms[2]
    assert starts == {False: pytest.approx(11.0), True: pytest.approx(12.0)}


def test_an_engine_with_nothing_else_to_compute_schedules_at_once() -> None:
    timing = dataclasses.replace(fixed_timing(), schedules_ahead=True)
    pool = SimulatedPool(SimulatedEngine(timing, 1_000), 1)
    trace = Trace(np.array([0.0, 3.0, 40.0]), np.array([5, 5, 5]), np.array([2, 2, 2]))
    starts = simulate(SimulatedFleet(prefill=(pool,)), trace).prefill_start_ms
    assert starts == pytest.approx([0.0, 10.0, 40.0])


def test_kv_that_arrives_beside_decoding_joins_the_iteration_after_the_next() -> None:
    timing = dataclasses.replace(fixed_timing(), schedules_ahead=True)
    pool = SimulatedPool(SimulatedEngine(timing, 1_000), 1)
    fleet = SimulatedFleet(decode=(pool,))
    trace = Trace(np.array([0.0, 4.5]), np.array([5, 5]), np.array([50, 5]))
    # The pull starts when the running iteration ends, at 5 ms, and takes no time here.
    assert simulate(fleet, trace).transfer_start_ms[1] == pytest.approx(5.0)
    assert simulate(fleet, trace).decode_start_ms[1] == pytest.approx(6.0)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_prompts_of_one_length_wait_as_an_m_d_1_queue_says(load: float) -> None:
    """DistServe, Eq. 1: D + R D^2 / 2 (1 - R D)."""
    d = 50.0
    rate = load / d
    ttft = mean_ttft(fixed_timing(prompt_ms=d), rate)
    assert ttft == pytest.approx(d + rate * d * d / (2 * (1 - rate * d)), rel=0.01)


@pytest.mark.parametrize("load", [0.5, 1.2, 1.6])
def test_two_stages_wait_as_eq_2_says(load: float) -> None:
    """Inter-op: D + R D^2 / 4 (2 - R D): each stage takes half of D."""
    d = 50.0
    rate = load / d
    ttft = mean_ttft(fixed_timing(prompt_ms=d, stages=2), rate)
    assert ttft == pytest.approx(d + rate * d * d / (4 * (2 - rate * d)), rel=0.01)


def test_two_way_tensor_parallelism_waits_as_eq_3_says() -> None:
    """Intra-op with speed-up K: D / K + R D^2 / 2 K (K - R D)."""
    d, k = 50.0, 1.7
    rate = 1.2 / d
    ttft = mean_ttft(fixed_timing(prompt_ms=d / k), rate)
    assert ttft == pytest.approx(d / k + rate * d * d / (2 * k * (k - rate * d)), rel=0.01)


def mean_ttft(timing: EngineTiming, rate_per_ms: float) -> float:
    trace = draw_trace(1_500_000, rate_per_ms * 1000, prompt=100, output=1)
    return float(measure_latencies(lone_prompts(timing), trace)[0].mean())


def test_one_request_takes_what_the_latency_model_says() -> None:
    outcome = simulate(disaggregated(), Trace(np.array([0.0]), np.array([320]), np.array([3])))
    prefill = OPT_13B.predict_prefill_ms([320])
    pulled = prefill + 1.0 + 320 * 0.01
    passes = [OPT_13B.predict_decode_ms(1, 320 + generated) for generated in range(3)]
    assert outcome.prefill_end_ms[0] == pytest.approx(prefill)
    assert outcome.transfer_end_ms[0] == pytest.approx(pulled)
    assert outcome.ttft_ms[0] == pytest.approx(pulled + passes[0])
    assert outcome.end_ms[0] == pytest.approx(pulled + sum(passes))
    assert outcome.instances.decode_tokens.tolist() == [0, 3]


def test_the_first_token_counts_from_the_prefill_instance_where_the_paper_counts_so() -> None:
    fleet = dataclasses.replace(disaggregated(), first_token_by_decode=False)
    outcome = simulate(fleet, Trace(np.array([0.0]), np.array([320]), np.array([3])))
    assert outcome.ttft_ms[0] == pytest.approx(OPT_13B.predict_prefill_ms([320]))
    assert outcome.instances.decode_tokens.tolist() == [0, 2]


def test_prefill_memory_is_the_queue_before_a_full_decode_instance() -> None:
    """Pull: the prefill instance starts no prompt while its memory holds unpulled KV."""
    prefill = dataclasses.replace(PREFILL, kv_capacity_tokens=512, max_num_batched_tokens=160)
    decode = dataclasses.replace(ENGINE, kv_capacity_tokens=208)
    fleet = SimulatedFleet((SimulatedPool(prefill, 1),), (SimulatedPool(decode, 1),))
    count = 6
    trace = Trace(np.zeros(count), np.full(count, 160), np.full(count, 40))
    outcome = simulate(fleet, trace)
    # One decodes at a time; three prompts fill the prefill instance, the next waits for a pull.
    assert (outcome.transfer_start_ms[1:] >= outcome.end_ms[:-1]).all()
    assert (outcome.prefill_start_ms[4:] >= outcome.transfer_end_ms[1:-3]).all()
    assert outcome.instances.kv_peak_tokens[0] <= 512


def test_transfers_of_one_prefill_instance_share_its_link_in_order() -> None:
    transfer = SimulatedTransfer(latency_ms=5.0)
    batch = dataclasses.replace(PREFILL, max_num_batched_tokens=4096)
    trace = Trace(np.zeros(3), np.full(3, 64), np.full(3, 2))
    for is_shared, expected in ((True, [5, 10, 15]), (False, [5, 5, 5])):
        fleet = SimulatedFleet(
            (SimulatedPool(batch, 1),),
            (SimulatedPool(ENGINE, 1),),
            transfer=dataclasses.replace(transfer, is_shared=is_shared),
        )
        outcome = simulate(fleet, trace)
        assert list(outcome.transfer_end_ms - outcome.prefill_end_ms) == pytest.approx(expected)


def test_what_overlaps_the_prompt_is_not_waited_for() -> None:
    transfer = SimulatedTransfer(token_ms=0.1, overlapped_token_ms=0.08, overlap_from_tokens=256)
    fleet = dataclasses.replace(disaggregated(), transfer=transfer)
    outcome = simulate(fleet, Trace(np.array([0.0, 9e3]), np.array([128, 256]), np.array([2, 2])))
    took = outcome.transfer_end_ms - outcome.transfer_start_ms
    assert list(took) == pytest.approx([12.8, 256 * 0.02])


def test_pulls_lengthen_the_one_pass_that_begins_with_them() -> None:
    transfer = SimulatedTransfer(latency_ms=5.0, receiver_ms=3.0, receiver_token_ms=0.01)
    fleet = SimulatedFleet(
        (SimulatedPool(PREFILL, 1),), (SimulatedPool(ENGINE, 1),), transfer=transfer
    )
    # Two hand-offs come together while the first request decodes, the last to an idle instance.
    trace = Trace(np.array([0, 100, 100, 9e6]), np.full(4, 64), np.array([400, 2, 2, 2]))
    pulled = simulate(fleet, trace)
    free = simulate(
        dataclasses.replace(
            fleet, transfer=dataclasses.replace(transfer, receiver_ms=0.0, receiver_token_ms=0.0)
        ),
        trace,
    )
    assert pulled.end_ms[0] - free.end_ms[0] == pytest.approx(3.0 + 2 * 0.64)
    assert pulled.end_ms[3] == pytest.approx(free.end_ms[3])
    assert pulled.instances.iterations[1] == free.instances.iterations[1]


def test_dispatch_is_paid_before_the_prompt_and_before_the_pull() -> None:
    fleet = dataclasses.replace(disaggregated(), dispatch_ms=7.0)
    outcome = simulate(fleet, Trace(np.array([3.0]), np.array([100]), np.array([2])))
    assert outcome.prefill_start_ms[0] == 10.0
    assert outcome.transfer_start_ms[0] - outcome.prefill_end_ms[0] == pytest.approx(7.0)


def test_a_decode_fleet_begins_with_computed_prompts() -> None:
    fleet = SimulatedFleet(decode=(SimulatedPool(ENGINE, 1),), first_token_by_decode=False)
    outcome = simulate(fleet, Trace(np.array([4.0]), np.array([100]), np.array([3])))
    expected = sum(OPT_13B.predict_decode_ms(1, 101 + generated) for generated in range(2))
    assert outcome.ttft_ms[0] == 0
    assert outcome.tpot_ms[0] == pytest.approx(expected / 2)
    assert outcome.prefill_instance[0] == -1


def test_mixed_instances_take_requests_beside_the_split_ones() -> None:
    fleet = dataclasses.replace(disaggregated(2, 2), mixed=(SimulatedPool(ENGINE, 1),))
    outcome = simulate(fleet, draw_trace(400, 20))
    whole = outcome.prefill_instance == outcome.decode_instance
    assert 0 < whole.sum() < 400
    assert set(outcome.prefill_instance[whole]) == {4}
    assert not np.isnan(outcome.end_ms).any()


SPREADING = [each for each in DispatchPolicy if each is not DispatchPolicy.BEST_FIT]


@pytest.mark.parametrize("dispatch", SPREADING)
def test_every_way_to_dispatch_but_best_fit_uses_all_instances(dispatch: DispatchPolicy) -> None:
    fleet = dataclasses.replace(disaggregated(3, 2), dispatch=dispatch)
    outcome = simulate(fleet, draw_trace(300, 12))
    assert set(outcome.prefill_instance) == {0, 1, 2}
    assert set(outcome.decode_instance) == {3, 4}
    assert not np.isnan(outcome.end_ms).any()


def test_random_dispatch_follows_the_seed() -> None:
    fleet = dataclasses.replace(disaggregated(3, 2), dispatch=DispatchPolicy.RANDOM)
    trace = draw_trace(300, 12)
    first, same, other = (simulate(fleet, trace, seed) for seed in (1, 1, 2))
    assert (first.end_ms == same.end_ms).all()
    assert (first.prefill_instance == same.prefill_instance).all()
    assert (first.prefill_instance != other.prefill_instance).any()
    counts = np.bincount(simulate(fleet, draw_trace(3000, 12)).prefill_instance)
    assert counts.min() > 900


def test_a_late_choice_waits_less_than_round_robin() -> None:
    trace = draw_trace(3000, 25, seed=3)
    fleet = SimulatedFleet((SimulatedPool(PREFILL, 4),), dispatch=DispatchPolicy.ROUND_ROBIN)
    late = dataclasses.replace(fleet, defers_dispatch=True)
    assert measure_latencies(late, trace)[0].mean() < measure_latencies(fleet, trace)[0].mean()


@settings(max_examples=25, deadline=None)
@given(seeds, st.floats(0.5, 0.99))
def test_a_faster_instance_is_never_slower_in_the_mean(seed: int, factor: float) -> None:
    trace = draw_trace(200, 5, seed)
    slow = measure_latencies(lone_prompts(OPT_13B), trace)[0]
    fast = measure_latencies(lone_prompts(scale(OPT_13B, factor)), trace)[0]
    assert (fast <= slow + 1e-9).all()


def scale(timing: EngineTiming, factor: float) -> EngineTiming:
    return dataclasses.replace(
        timing,
        prompt_ms=tuple(ms * factor for ms in timing.prompt_ms),
        prompt_square_ms=timing.prompt_square_ms * factor,
    )


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_an_instance_never_idles_while_a_prompt_waits(seed: int) -> None:
    trace = draw_trace(200, 6, seed)
    outcome = simulate(lone_prompts(OPT_13B), trace)
    free = np.concatenate([[0.0], outcome.prefill_end_ms[:-1]])
    np.testing.assert_allclose(outcome.prefill_start_ms, np.maximum(trace.arrival_ms, free))


@settings(max_examples=20, deadline=None)
@given(seeds, st.sampled_from(list(Batching)), st.sampled_from([1, 2, 4]))
def test_tokens_are_counted_exactly_and_memory_comes_back(seed, batching, stages) -> None:
    timing = dataclasses.replace(OPT_13B, stages=stages)
    engine = SimulatedEngine(timing, 8_000, batching=batching, max_num_seqs=64)
    trace = draw_trace(150, 8, seed)
    outcome = simulate(SimulatedFleet(mixed=(SimulatedPool(engine, 2),)), trace)
    used = outcome.instances
    assert not np.isnan(outcome.end_ms).any()
    assert not used.kv_final_tokens.any()
    recomputed = used.num_preemptions.sum() > 0
    prompts, outputs = trace.prompt_tokens.sum(), trace.output_tokens.sum()
    tokens = used.prompt_tokens.sum() + used.decode_tokens.sum()
    assert tokens >= prompts + outputs - len(trace) if recomputed else True
    if not recomputed:
        assert used.prompt_tokens.sum() == prompts
        assert used.decode_tokens.sum() == outputs - len(trace)
    assert (used.kv_peak_tokens <= 8_000).all()
    assert (used.busy_ms <= used.duration_ms * (1 + 1e-9)).all()
    assert (used.kv_token_ms <= 8_000 * used.duration_ms).all()


def test_mfu_is_work_done_over_work_possible() -> None:
    outcome = simulate(lone_prompts(fixed_timing(prompt_ms=100)), one_request(1000, 1))
    # 1,000 tokens in 0.1 s at 2 FLOPs each, of 40,000 FLOP/s.
    assert outcome.instances.compute_mfu(2.0, 40_000.0)[0] == pytest.approx(0.5)


def one_request(prompt: int, output: int) -> Trace:
    return Trace(np.array([0.0]), np.array([prompt]), np.array([output]))


def test_a_request_that_fits_no_memory_is_left_out_and_the_others_are_served() -> None:
    engine = dataclasses.replace(ENGINE, kv_capacity_tokens=1024)
    trace = Trace(np.array([0.0, 1.0, 2.0]), np.array([100, 2000, 100]), np.array([5, 5, 1000]))
    fleet = SimulatedFleet(mixed=(SimulatedPool(engine, 2),), best_fit=PACKING)
    fleets = [dataclasses.replace(fleet, dispatch=dispatch) for dispatch in DispatchPolicy]
    for each in (*fleets, dataclasses.replace(fleet, defers_dispatch=True)):
        outcome = simulate(each, trace)
        assert list(outcome.outcome) == [
            RequestOutcome.SERVED,
            RequestOutcome.TOO_LONG,
            RequestOutcome.TOO_LONG,
        ]
        assert list(np.isnan(outcome.end_ms)) == [False, True, True]
        assert outcome.compute_attainment(1e9, 1e9) == pytest.approx(1 / 3)


def test_measuring_gives_what_simulating_gives() -> None:
    trace = draw_trace(300, 6)
    prepared = prepare_fleet(disaggregated())
    window = 10_000.0, 30_000.0
    found = measure_latencies(prepared, trace, itl_window=window)
    outcome = simulate(prepared, trace, itl_window=window)
    assert (found.ttft_ms == outcome.ttft_ms).all()
    assert (found.tpot_ms == outcome.tpot_ms).all()
    assert (found.itl.counts == outcome.itl.counts).all()
    assert 0 < found.itl.counts.sum() < trace.output_tokens.sum() - len(trace)
    assert found.num_arrived == len(trace)
    assert not measure_latencies(prepared, trace).itl.counts.any()


def test_a_simulation_ends_when_its_verdict_is_known() -> None:
    trace, counted = draw_trace(300, 6), range(50, 150)
    complete = measure_latencies(disaggregated(), trace)
    # All counted requests have ended.
    verdict = EarlyVerdict(counted, np.inf, np.inf, max_missed=0)
    early = measure_latencies(disaggregated(), trace, verdict=verdict)
    assert (early.tpot_ms[50:150] == complete.tpot_ms[50:150]).all()
    assert early.num_arrived < complete.num_arrived
    assert np.isnan(early.tpot_ms).any()
    # Every request misses: the sixth that counts decides.
    verdict = EarlyVerdict(counted, 0.0, np.inf, max_missed=5)
    early = measure_latencies(disaggregated(), trace, verdict=verdict)
    assert 6 <= np.count_nonzero(~np.isnan(early.tpot_ms[50:150])) < 20


@pytest.mark.parametrize(
    ("trace", "fault"),
    [
        (Trace(np.array([]), np.array([], int), np.array([], int)), "empty"),
        (Trace(np.array([1.0, 0.5]), np.array([1, 1]), np.array([1, 1])), r"arrival_ms\[1\]"),
        (Trace(np.array([math.nan, 1.0]), np.array([1, 1]), np.array([1, 1])), r"arrival_ms\[0\]"),
        (Trace(np.array([1.0, math.inf]), np.array([1, 1]), np.array([1, 1])), r"arrival_ms\[1\]"),
        (Trace(np.array([-1.0]), np.array([1]), np.array([1])), r"arrival_ms\[0\]"),
        (Trace(np.array([0.0]), np.array([0]), np.array([1])), r"prompt_tokens\[0\]"),
        (Trace(np.array([0.0]), np.array([5]), np.array([-3])), r"output_tokens\[0\]"),
        (Trace(np.array([0.0]), np.array([1 << 40]), np.array([1])), r"prompt_tokens\[0\]"),
        (Trace(np.array([0.0, 1.0]), np.array([5]), np.array([3])), "2 arrivals, 1 prompts"),
    ],
)
def test_a_faulty_trace_is_refused_in_one_line(trace: Trace, fault: str) -> None:
    with pytest.raises(SimulationError, match=fault) as caught:
        simulate(disaggregated(), trace)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"kv_block_size": 0}, "kv_block_size is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1"),
        ({"kv_capacity_tokens": 10}, "does not fit"),
        ({"timing": dataclasses.replace(OPT_13B, stages=0)}, "stages"),
        ({"timing": dataclasses.replace(OPT_13B, prompt_ms=(1.0,))}, "two points"),
        ({"timing": dataclasses.replace(OPT_13B, hop_ms=math.nan)}, "finite"),
    ],
)
def test_a_faulty_engine_is_refused_in_one_line(change: dict[str, object], fault: str) -> None:
    with pytest.raises(SimulationError, match=fault):
        prepare_fleet(
            SimulatedFleet(mixed=(SimulatedPool(dataclasses.replace(ENGINE, **change), 1),))
        )


@pytest.mark.parametrize(
    ("fleet", "fault"),
    [
        (SimulatedFleet(), "no instances"),
        (SimulatedFleet(mixed=(SimulatedPool(ENGINE, 0),)), "no instances"),
        (SimulatedFleet(mixed=(SimulatedPool(ENGINE, -1),)), "replicas is -1"),
        (
            SimulatedFleet(mixed=(SimulatedPool(dataclasses.replace(ENGINE, ranks=0), 1),)),
            "ranks is 0",
        ),
        (
            SimulatedFleet(
                mixed=(
                    SimulatedPool(
                        dataclasses.replace(ENGINE, ranks=2, timing=fixed_timing(stages=2)), 1
                    ),
                )
            ),
            "ranks is above 1 with pipeline stages",
        ),
        (
            SimulatedFleet(
                (SimulatedPool(ENGINE, 1),),
                (SimulatedPool(dataclasses.replace(ENGINE, ranks=2), 1),),
                flipping=build_thresholds(100.0),
            ),
            "not of several ranks",
        ),
        (SimulatedFleet(mixed=(SimulatedPool(ENGINE, 1),), dispatch_ms=-1.0), "dispatch_ms is -1"),
        (
            SimulatedFleet(
                mixed=(SimulatedPool(ENGINE, 1),), transfer=SimulatedTransfer(latency_ms=math.nan)
            ),
            "latency_ms",
        ),
    ],
)
def test_a_faulty_fleet_is_refused_in_one_line(fleet: SimulatedFleet, fault: str) -> None:
    with pytest.raises(SimulationError, match=fault):
        prepare_fleet(fleet)


def test_best_fit_uses_as_few_instances_as_keep_the_target() -> None:
    trace = draw_trace(400, 8)
    fleets = {
        dispatch: SimulatedFleet(
            decode=(SimulatedPool(ENGINE, 12),), dispatch=dispatch, best_fit=PACKING
        )
        for dispatch in (DispatchPolicy.PENDING_TOKENS, DispatchPolicy.BEST_FIT)
    }
    used = {
        dispatch: len(set(simulate(fleet, trace).decode_instance))
        for dispatch, fleet in fleets.items()
    }
    assert used[DispatchPolicy.PENDING_TOKENS] == 12
    assert used[DispatchPolicy.BEST_FIT] < 8
    tight = dataclasses.replace(PACKING, tpot_ms=20.0)
    strict = dataclasses.replace(fleets[DispatchPolicy.BEST_FIT], best_fit=tight)
    assert len(set(simulate(strict, trace).decode_instance)) > used[DispatchPolicy.BEST_FIT]


@pytest.mark.parametrize("count", [8, 24])
def test_best_fit_keeps_the_target_when_outputs_outrun_their_predictions(count: int) -> None:
    rng = np.random.default_rng(3)
    outputs = np.maximum(rng.lognormal(4.5, 1.0, 1_500).astype(np.int64), 2)
    predicted = np.full_like(outputs, round(outputs.mean()))
    arrival = np.cumsum(rng.exponential(1000 / 40, outputs.size))
    trace = Trace(arrival, np.full_like(outputs, 200), outputs, predicted)
    timing = EngineTiming(1.0, (18.0, 18.1), 0.0, (15.0, 15.1), (0.0005,))
    fleet = SimulatedFleet(
        decode=(SimulatedPool(SimulatedEngine(timing, 66_144), count),),
        dispatch=DispatchPolicy.BEST_FIT,
        best_fit=dataclasses.replace(PACKING, tpot_ms=21.0),
    )
    assert float(np.mean(simulate(fleet, trace).tpot_ms <= 21.0)) >= 0.99


def test_best_fit_keeps_the_target_where_prompts_run_beside_decoding() -> None:
    rng = np.random.default_rng(3)
    arrival = np.cumsum(rng.exponential(1000 / 24, 1_500))
    trace = Trace(arrival, rng.integers(400, 1_200, 1_500), rng.integers(100, 300, 1_500))
    timing = EngineTiming(1.0, (18.0, 18.1), 0.0, (15.0, 15.1), (0.0005,))
    fleet = SimulatedFleet(
        mixed=(SimulatedPool(SimulatedEngine(timing, 66_144, max_num_batched_tokens=2048), 12),),
        dispatch=DispatchPolicy.BEST_FIT,
        best_fit=PACKING,
    )
    outcome = simulate(fleet, trace)
    assert float(np.mean(outcome.tpot_ms <= PACKING.tpot_ms)) >= 0.99


def test_short_prompts_are_computed_where_they_decode_while_prefill_is_busy() -> None:
    trace = draw_trace(400, 12)
    split = disaggregated(1, 3)
    short = dataclasses.replace(split, short_prompt_tokens=200)
    before, after = simulate(split, trace), simulate(short, trace)
    whole = after.prefill_instance == after.decode_instance
    assert not (before.prefill_instance == before.decode_instance).any()
    assert 0 < whole.sum() < 400
    assert trace.prompt_tokens[whole].max() <= 200
    assert not np.isnan(after.end_ms).any()
    assert after.ttft_ms.mean() < before.ttft_ms.mean()


def test_outputs_count_as_predicted_until_they_end() -> None:
    trace = draw_trace(300, 12)
    same = dataclasses.replace(trace, predicted_tokens=trace.output_tokens)
    wrong = dataclasses.replace(trace, predicted_tokens=trace.output_tokens[::-1].copy())
    fleet = disaggregated(2, 3)
    ends = [simulate(fleet, each).end_ms for each in (trace, same, wrong)]
    assert (ends[0] == ends[1]).all()
    assert (ends[0] != ends[2]).any()


@pytest.mark.parametrize("predicted", [[1, 2], [0]])
def test_predictions_that_are_none_are_refused(predicted: list[int]) -> None:
    trace = dataclasses.replace(one_request(5, 5), predicted_tokens=np.array(predicted))
    with pytest.raises(SimulationError, match="predicted"):
        simulate(disaggregated(), trace)
