"""The most that flips alone could gain."""

import numpy as np

from cleave.simulator.trace import Trace


def build_fleet(module):
    days, run = module("days"), module("run")
    problem = days.ask(days.Phase("code", "azure-code", 2.0))
    return problem, run.to_fleet(problem, run.plan(problem))


def test_every_split_of_the_same_instances_is_tried(module) -> None:
    _, fleet = build_fleet(module)
    count = sum(pool.replicas for pool in (*fleet.prefill, *fleet.decode))
    splits = list(module("best_split").list_splits(fleet))
    counts = {
        tuple(sum(pool.replicas for pool in pools) for pools in (s.prefill, s.mixed, s.decode))
        for s in splits
    }
    assert len(counts) == len(splits)
    assert all(sum(each) == count for each in counts)
    assert (0, count, 0) in counts
    assert all(mixed or (prefill and decode) for prefill, mixed, decode in counts)


def test_the_best_split_serves_no_fewer_than_the_plan(module) -> None:
    problem, fleet = build_fleet(module)
    best_split, days = module("best_split"), module("days")
    trace = best_split.cut(days.draw((days.Phase("t", "azure-code", 2.0),), 120.0), 10.0, 100.0)
    assert trace.arrival_ms[0] >= 10_000
    best = best_split.choose_split(fleet, trace, problem.slo)
    simulate = best_split.simulate

    def attain(each) -> float:
        return simulate(each, trace).compute_attainment(problem.slo.ttft_ms, problem.slo.tpot_ms)

    assert attain(best) >= attain(fleet)


def test_a_cut_keeps_the_requests_of_its_time(module) -> None:
    times = np.arange(0.0, 10_000.0, 1_000.0)
    tokens = np.arange(1, 11)
    cut = module("best_split").cut(Trace(times, tokens, tokens), 2.0, 4.0)
    assert cut.prompt_tokens.tolist() == [3, 4]
