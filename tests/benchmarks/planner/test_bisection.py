import importlib

import numpy as np

from cleave.simulator.trace import Trace

DATASET = Trace(np.zeros(50), np.arange(100, 150), np.arange(50, 100))


def test_a_configuration_without_coefficients_has_no_rate() -> None:
    bisection = importlib.import_module("bisection")
    grid = importlib.import_module("other_planners").Grid("a", nodes=4, gpus_per_node=8, high=True)
    assert bisection.find_rate(grid, (1, 5, 1, 1, 1), DATASET) is None


def test_rates_are_the_steps_of_the_bisection() -> None:
    bisection = importlib.import_module("bisection")
    other_planners = importlib.import_module("other_planners")
    grid = other_planners.Grid("a", nodes=1, gpus_per_node=2, high=True, num_requests=50)
    rate = bisection.find_rate(grid, (1, 1, 1, 1, 1), DATASET)
    step = 5 / 2**5
    assert rate is not None
    assert rate > 0
    assert rate / step == round(rate / step)
