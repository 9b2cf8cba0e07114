"""Best fit by several gateways, with the routers of the product."""

from types import SimpleNamespace

import numpy as np
import pytest
from goodput import Targets
from several_gateways import Counts, Fleet, measure_attainment

from cleave.api.enums import DispatchPolicy
from cleave.perf.published.aladdin import Coefficients
from cleave.simulator.trace import Trace

WORKER = SimpleNamespace(
    coefficients=Coefficients(0.1, 10.0, 0.001, 0.5, 15.0),
    estimate=SimpleNamespace(kv_capacity_tokens=50_000),
)
TARGETS = Targets(1_000.0, 50.0)


def draw(rate: float, requests: int) -> Trace:
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(1_000 / rate, requests))
    return Trace(arrivals, rng.integers(10, 3_000, requests), rng.integers(1, 200, requests))


@pytest.mark.parametrize("counts", [{"mixed": 3}, {"prefill": 2, "decode": 2}])
@pytest.mark.parametrize("gateways", [1, 4])
def test_every_request_ends_and_leaves_no_load(counts: Counts, gateways: int) -> None:
    fleet = Fleet(WORKER, counts, DispatchPolicy.BEST_FIT, gateways, TARGETS, 1)
    served = fleet.serve(draw(4.0, 400))
    assert all(each.end_ms >= each.first_ms > each.arrival_ms for each in served)
    assert {each.context for each in fleet.instances.values()} == {0}
    for router in fleet.routers:
        loads = [each.in_flight for each in router.registry.instances.values()]
        assert {each.num_requests for each in loads} == {0}
        assert {each.prompt.own for each in loads} == {0.0}


def test_a_request_alone_takes_the_time_of_its_iterations() -> None:
    fleet = Fleet(WORKER, {"mixed": 1}, DispatchPolicy.BEST_FIT, 1, TARGETS, 1)
    (request,) = fleet.serve(Trace(np.array([5.0]), np.array([3_000]), np.array([3])))
    # 2,048 and 952 tokens, each iteration with its own c1; then contexts of 3,001 and 3,002.
    assert request.first_ms == pytest.approx(5.0 + 300.0 + 2 * 10.0)
    assert request.end_ms - request.first_ms == pytest.approx(2 * 15.5 + 3.001 + 3.002)


def test_gateways_see_the_requests_of_others_in_reports() -> None:
    fleet = Fleet(WORKER, {"mixed": 1}, DispatchPolicy.BEST_FIT, 2, TARGETS, 1)
    for _ in range(10):
        fleet._send(100, 500, fleet.routers[0])
    fleet._advance(500.0)
    own, others = (next(iter(r.registry.instances.values())).in_flight for r in fleet.routers)
    assert (own.num_remote_requests, others.num_remote_requests) == (0.0, 10.0)
    assert others.count_others_tokens() >= 10 * 100


def test_an_overloaded_fleet_misses_its_targets() -> None:
    fast, slow = (
        measure_attainment(
            Fleet(WORKER, {"mixed": 2}, DispatchPolicy.PENDING_TOKENS, 1, TARGETS, 1).serve(
                draw(rate, 300)
            ),
            TARGETS,
        )
        for rate in (1.0, 50.0)
    )
    assert fast > 0.9 > slow
