from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cleave.api import workload as api
from cleave.simulator.trace import PromptBlocks, Trace
from cleave.traffic import history, workload
from cleave.traffic.characterization import (
    TraceDescription,
    characterize,
    fit_workload,
    list_remarks,
)
from cleave.traffic.workload import (
    Demand,
    DemandError,
    GeneratedRequests,
    IndependentLengths,
    LogNormal,
)

CHAT = IndependentLengths(
    LogNormal.from_mean_and_p90(700, 1400), LogNormal.from_mean_and_p90(200, 420)
)


def drawn(num: int = 5000, rate: float = 5.0, burstiness: float = 1.0, seed: int = 1) -> Trace:
    return Demand(rate, GeneratedRequests(CHAT, burstiness)).draw(num, seed=seed)


def with_gaps(gaps_s: np.ndarray) -> Trace:
    lengths = CHAT.draw(len(gaps_s), 1)
    prompts, outputs = (np.maximum(np.rint(each), 1).astype(np.int64) for each in lengths)
    return Trace(np.cumsum(gaps_s) * 1000, prompts, outputs)


def said(diagnosis: TraceDescription, words: str) -> bool:
    return any(words in warning for warning in diagnosis.warnings)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 2.0])
def test_a_fit_of_drawn_traffic_finds_what_it_was_drawn_from(burstiness) -> None:
    spec = fit_workload(drawn(40_000, 5.0, burstiness))
    assert spec.rate == pytest.approx(5, rel=0.03)
    assert spec.burstiness == pytest.approx(burstiness, rel=0.05)
    assert spec.prompt_tokens is not None
    assert spec.prompt_tokens.mean == pytest.approx(700, rel=0.02)
    assert spec.prompt_tokens.p90 == pytest.approx(1400, rel=0.03)
    assert spec.output_tokens is not None
    assert spec.output_tokens.p90 == pytest.approx(420, rel=0.03)


def test_drawn_traffic_needs_no_replay_and_no_warning() -> None:
    for seed in range(5):
        diagnosis = characterize(drawn(seed=seed))
        assert diagnosis.is_fit_good
        assert diagnosis.warnings == ()
        assert diagnosis.prompt_tokens.fit_distance < 0.05


def test_poisson_arrivals_have_dispersion_one_and_bursty_ones_that_of_their_gaps() -> None:
    poisson, bursty = (
        characterize(drawn(20_000)).arrivals,
        characterize(drawn(20_000, 5, 2.0)).arrivals,
    )
    assert poisson is not None
    assert poisson.dispersion == pytest.approx(1, rel=0.2)
    assert bursty is not None
    assert bursty.dispersion == pytest.approx(4, rel=0.25)


def test_waves_are_reported_though_gaps_alone_look_harmless() -> None:
    rng = np.random.default_rng(3)
    mean_gaps = np.where(np.arange(8000) // 400 % 2, 0.15, 0.3)
    diagnosis = characterize(with_gaps(rng.exponential(mean_gaps)))
    assert diagnosis.arrivals is not None
    assert diagnosis.arrivals.burstiness < 1.2
    assert not diagnosis.is_fit_good
    assert said(diagnosis, "arrivals come in waves")


def test_a_rate_that_drifts_is_reported_with_its_peak() -> None:
    rng = np.random.default_rng(3)
    diagnosis = characterize(with_gaps(rng.exponential(np.linspace(0.5, 0.05, 5000))))
    assert diagnosis.arrivals is not None
    assert diagnosis.arrivals.drift > 1.5
    assert said(diagnosis, "the second half has")
    assert said(diagnosis, "times the mean rate: to hold the SLO there, plan for")


def test_correlated_lengths_are_reported() -> None:
    trace = drawn()
    copied = Trace(trace.arrival_ms, trace.prompt_tokens, trace.prompt_tokens // 4 + 1)
    diagnosis = characterize(copied)
    assert diagnosis.correlation > 0.99
    assert said(diagnosis, "longer prompts have longer outputs (correlation 1.00)")
    assert not diagnosis.is_fit_good


def test_two_kinds_of_requests_are_no_log_normal() -> None:
    trace = drawn()
    mixed = np.where(np.arange(len(trace)) % 2, 50, 4000)
    diagnosis = characterize(Trace(trace.arrival_ms, mixed, trace.output_tokens))
    assert said(diagnosis, "prompt lengths are not log-normal")
    assert not said(diagnosis, "output lengths")
    assert diagnosis.prompts_above == ((512, 0.5), (2048, 0.5), (8192, 0.0), (32768, 0.0))


def test_few_requests_are_reported_with_the_error_of_their_mean() -> None:
    assert said(characterize(drawn(100)), "only 100 requests: the mean prompt is known to +-")
    assert not said(characterize(drawn(1000)), "only")


def test_a_handful_of_requests_is_only_said_to_be_one() -> None:
    for num in (3, 20, 150):
        for seed in range(20):
            (warning,) = characterize(drawn(num, seed=seed)).warnings
            assert warning.startswith(f"only {num} requests")


def test_bursts_alone_are_no_drift() -> None:
    for seed in range(20):
        diagnosis = characterize(drawn(1500, 5.0, 4.0, seed))
        assert not said(diagnosis, "the second half")


def test_requests_without_arrivals_are_described_by_their_lengths() -> None:
    trace = drawn(2000)
    at_once = Trace(np.zeros(2000), trace.prompt_tokens, trace.output_tokens)
    diagnosis = characterize(at_once)
    assert diagnosis.arrivals is None
    assert said(diagnosis, "no arrival times")
    assert fit_workload(at_once, rate=3.0).rate == 3
    with pytest.raises(DemandError, match="rate: the requests have no arrival times"):
        fit_workload(at_once)


def test_a_plan_contains_what_was_cut_and_what_its_recording_lacks() -> None:
    demand = workload.build_from_trace(drawn(200))
    assert len(list_remarks(demand, 100_000)) == 1
    cut, few = list_remarks(demand, 1000)
    assert cut.endswith("of the requests are longer than the model's 1,000 tokens and were cut")
    assert few.startswith("only 200 requests")
    assert list_remarks(workload.build_fixed(10, 10, 1.0), 100) == ()


@pytest.mark.parametrize("rate", [None, 5.0])
def test_a_plan_says_what_was_assumed_about_its_recording(tmp_path, rate) -> None:
    file = tmp_path / "t.csv"
    rows = "".join(f"{1_790_000_000_000 + 500 * at},50,{at % 40}\n" for at in range(400))
    file.write_text(f"timestamp,prompt_tokens,output_tokens\n{rows}")
    spec = api.Workload(rate=rate, trace=api.TraceSource(path=str(file)))
    demand = workload.build_from_spec(spec, tmp_path)
    remarks = list_remarks(demand, 100_000)
    assert demand.rate == (rate or pytest.approx(2, rel=0.03))
    assert remarks[0].startswith("10 of 400 requests failed or generated nothing (10 with output_")
    assert remarks[1].startswith("timestamp is read as milliseconds since 1970")
    assert characterize(history.read_trace(file)).warnings[:2] == remarks[:2]


def test_prompts_that_repeat_are_to_be_replayed() -> None:
    trace = drawn()
    same = PromptBlocks(128, np.arange(5001), np.zeros(5000, np.int64), 1)
    diagnosis = characterize(replace(trace, blocks=same))
    assert said(diagnosis, "prompts repeat (up to ")
    assert not diagnosis.is_fit_good
    assert characterize(trace).is_fit_good


@example(lengths=[1] * 11 + [1_282_464, 4_455_736], gaps=[1.0] * 60)
@given(
    lengths=st.lists(st.integers(1, 10**7), min_size=1, max_size=60),
    gaps=st.lists(st.floats(0, 1e4), min_size=60, max_size=60),
)
def test_any_recording_can_be_described_and_fitted(lengths, gaps) -> None:
    tokens = np.array(lengths)
    trace = Trace(np.cumsum(gaps)[: len(tokens)], tokens, tokens[::-1].copy())
    diagnosis = characterize(trace)
    assert -1.001 <= diagnosis.correlation <= 1.001
    assert 0 <= diagnosis.prompt_tokens.fit_distance <= 1
    spec = fit_workload(trace, rate=1.0)  # validates the rules of the resource
    assert workload.build_from_spec(spec, None).draw(10).rate > 0
