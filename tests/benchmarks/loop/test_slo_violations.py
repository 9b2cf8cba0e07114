"""Which stage of a phase a lost request belongs to."""

import numpy as np
import pytest


def test_losses_fall_into_the_stages_of_their_phase(module) -> None:
    losses, following, world = module("losses"), module("following"), module("world")
    arrival_s = np.arange(0.5, 20.0)
    served = np.ones(20, bool)
    oracle = world.Score(arrival_s, served, served, 0)
    met = served.copy()
    # One each while unseen, undecided, starting, changing again, and in the end.
    met[[10, 12, 14, 16, 19]] = False
    steps = [following.Step(12.0, 13.0, 15.0, None), following.Step(16.0, 16.5, 18.0, None)]
    found = losses.find_losses(
        world.Score(arrival_s, met, served, 0), oracle, steps, [0.0, 10.0, 20.0]
    )
    assert found == dict.fromkeys(losses.STAGES, pytest.approx(0.05))


def test_what_the_oracle_misses_and_others_serve_counts_against_losses(module) -> None:
    losses, world = module("losses"), module("world")
    arrival_s, all_met = np.arange(4.0), np.ones(4, bool)
    few = np.array([True, True, False, True])
    oracle = world.Score(arrival_s, few, all_met, 0)
    found = losses.find_losses(
        world.Score(arrival_s, all_met, np.array([True, True, True, False]), 0),
        oracle,
        [],
        [0.0, 4.0],
    )
    assert found["settled"] == pytest.approx(0.0)
    assert set(found.values()) == {0.0}
