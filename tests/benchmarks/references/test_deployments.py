"""Published deployments in a closed loop."""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from cleave.perf.timing import EngineTiming
from cleave.simulator.fleet import SimulatedEngine, SimulatedFleet, SimulatedPool

Import = Callable[[str], ModuleType]


def test_a_client_sends_when_its_request_has_ended(module: Import) -> None:
    timing = EngineTiming(1.0, (0.0, 0.01), 0.0, (2.0, 2.0), (0.0,))
    fleet = SimulatedFleet(mixed=(SimulatedPool(SimulatedEngine(timing, 1 << 20), 2),))
    deployments = module("deployments")
    outcome = deployments.simulate_closed_loop(deployments.LLM_D, fleet, 2)
    # Two instances, so that no client meets another: 50 ms of prompt, 249 tokens of 2 ms.
    assert np.diff(outcome.arrival_ms[::2]) == pytest.approx(50 + 2 * 249)


def test_a_split_deployment_moves_kv_within_its_node(module: Import) -> None:
    deployments = module("deployments")
    packed = deployments.build_fleet(deployments.DEPLOYMENTS[-1])
    spread = deployments.build_fleet(deployments.LLM_D)
    assert packed.transfer.token_ms < spread.transfer.token_ms
    assert [pool.replicas for pool in (*spread.prefill, *spread.decode)] == [8, 2]
    assert spread.prefill[0].engine.timing.schedules_ahead
