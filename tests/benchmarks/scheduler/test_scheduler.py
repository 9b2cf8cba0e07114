"""What the benchmark of scheduling compares is the same on both sides."""

from dataclasses import replace

import gains_measured
import numpy as np
import overload
import pytest
import virtual_engine
from one_engine import ENGINE, burst, stream

from cleave.simulator.fleet import Admission, PrefillOrder, SimulatedFleet, SimulatedPool
from cleave.simulator.run import simulate


@pytest.mark.parametrize("order", gains_measured.ORDERS)
@pytest.mark.parametrize("is_burst", [True, False])
def test_prompts_run_in_the_order_that_is_simulated(order: PrefillOrder, is_burst: bool) -> None:
    trace = burst("sharegpt", 80) if is_burst else stream("chat-1m", 0.9, 150)
    engine = replace(ENGINE, order=order)
    simulated = simulate(SimulatedFleet(prefill=(SimulatedPool(engine, 1),)), trace)
    run = virtual_engine.run(trace, engine, decodes=False)
    np.testing.assert_allclose(simulated.prefill_start_ms, run.start_ms, atol=1e-6)
    np.testing.assert_allclose(simulated.first_token_ms, run.first_ms, atol=1e-6)


def test_the_shortest_first_wait_less_than_the_longest_first() -> None:
    waits = {row["order"]: row["wait_ms"] for row in gains_measured.orders(quick=True)}
    assert waits["SJF"] < waits["FCFS"] < waits["LJF"]


def test_who_knows_the_outputs_preempts_less() -> None:
    trace = gains_measured.make_lengths_distinct(burst("sharegpt", 100))
    preemptions = {}
    for admission in gains_measured.ADMISSIONS:
        engine = replace(ENGINE, admission=admission, max_num_batched_tokens=2_048)
        run = virtual_engine.run(trace, engine, decodes=True)
        preemptions[admission] = run.preemptions
    assert preemptions[Admission.GREEDY] > preemptions[Admission.RESERVE_DYNAMIC]


def test_under_overload_only_both_settings_together_serve_in_time() -> None:
    rows = list(overload.overload(quick=True))
    for fleet in overload.FLEETS:
        shares = {r["setting"]: r["overload_share"] for r in rows if r["fleet"] == fleet}
        assert shares.pop("both") > 0.4
        assert max(shares.values()) < 0.1


def test_targets_cost_no_goodput_where_there_is_no_overload() -> None:
    for row in overload.goodput(quick=True):
        assert row["both"] >= row["default"]


def test_ranges_have_the_declared_accuracy() -> None:
    outputs = np.arange(0, 2_000, dtype=np.int64)
    low, half = (
        gains_measured.predict(outputs, 1.0, 0.0),
        gains_measured.predict(outputs, 0.75, 0.0),
    )
    assert (low <= np.maximum(outputs, 1)).all()
    assert (outputs - low < gains_measured.RANGE).all()
    assert np.mean(low == half) == pytest.approx(0.75, abs=0.03)
