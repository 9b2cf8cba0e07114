"""Which stage of a phase a lost request belongs to."""

import numpy as np
import pytest


def test_losses_fall_into_the_stages_of_their_phase(module) -> None:
    slo_violations, replanning = module("slo_violations"), module("replanning")
    virtual_fleet = module("virtual_fleet")
    arrival_s = np.arange(0.5, 20.0)
    served = np.ones(20, bool)
    oracle = virtual_fleet.Score(arrival_s, served, served, 0)
    met = served.copy()
    # One each while unseen, undecided, starting, changing again, and in the end.
    met[[10, 12, 14, 16, 19]] = False
    steps = [replanning.Step(12.0, 13.0, 15.0, None), replanning.Step(16.0, 16.5, 18.0, None)]
    found = slo_violations.find_losses(
        virtual_fleet.Score(arrival_s, met, served, 0), oracle, steps, [0.0, 10.0, 20.0]
    )
    assert found == dict.fromkeys(slo_violations.STAGES, pytest.approx(0.05))


def test_what_the_oracle_misses_and_others_serve_counts_against_losses(module) -> None:
    slo_violations, virtual_fleet = module("slo_violations"), module("virtual_fleet")
    arrival_s, all_met = np.arange(4.0), np.ones(4, bool)
    few = np.array([True, True, False, True])
    oracle = virtual_fleet.Score(arrival_s, few, all_met, 0)
    found = slo_violations.find_losses(
        virtual_fleet.Score(arrival_s, all_met, np.array([True, True, True, False]), 0),
        oracle,
        [],
        [0.0, 4.0],
    )
    assert found["settled"] == pytest.approx(0.0)
    assert set(found.values()) == {0.0}
