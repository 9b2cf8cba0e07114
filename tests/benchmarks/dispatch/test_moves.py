"""Aladdin's Algorithm 2 beside no moves."""

from types import SimpleNamespace

import moves
import pytest

from cleave.perf.published.aladdin import Coefficients

WORKER = SimpleNamespace(
    coefficients=Coefficients(0.1, 10.0, 0.001, 0.5, 15.0),
    estimate=SimpleNamespace(kv_capacity_tokens=50_000),
)


@pytest.mark.parametrize("way", moves.WAYS.values(), ids=moves.WAYS)
def test_every_request_ends_and_frees_its_memory(way: tuple[bool, bool, bool]) -> None:
    requests = moves.draw(20.0, 200)
    fleet = moves.Fleet(WORKER, 8, 40.0, *way)
    fleet.serve(requests)
    assert all(each.end_ms > each.joined_ms >= each.arrival_ms for each in requests)
    assert {each.context for each in fleet.workers} == {0}


def test_a_placed_request_moves_to_where_requests_ended_early() -> None:
    fleet = moves.Fleet(WORKER, 2, 40.0, True, False, True)
    late, early = fleet.workers
    outrun = moves.Request(0.0, 100, 900, 50.0, first_step=0)
    late.running[outrun], late.step, late.context = None, 200, 300
    early.early.append((500.0, 400.0))
    placed = moves.Request(0.0, 100, 100, 100.0)
    late.placed.append(placed)
    fleet._rebalance()
    assert (late.placed, early.placed) == ([], [placed])
    fleet._rebalance()
    assert early.placed == [placed], "nothing is gained by moving it back"


def test_a_fleet_that_misses_too_often_is_given_up() -> None:
    requests = moves.draw(20.0, 200)
    fleet = moves.Fleet(WORKER, 1, 40.0, True, True, False)
    fleet.serve(requests, 3)
    assert fleet.missed > 3
    assert not all(each.end_ms for each in requests)


def test_requests_of_the_warm_up_do_not_count_as_missed() -> None:
    requests = moves.draw(20.0, 200)
    fleet = moves.Fleet(WORKER, 1, 40.0, True, True, False)
    fleet.serve(requests)
    assert 100 < fleet.missed <= 160


@pytest.mark.parametrize(("least", "holding"), [(1, 1), (1, 7), (3, 3), (3, 8)])
def test_the_fewest_workers_are_found(least: int, holding: int) -> None:
    def holds(way: str, share: float, count: int) -> bool:
        return count >= holding

    assert moves._find_fewest("by tokens held", 1.0, holds, least) == holding


def test_a_target_that_no_number_of_workers_keeps_gives_0() -> None:
    assert moves._find_fewest("by tokens held", 1.0, lambda *_: False, 1) == 0


def test_fewer_workers_than_the_least_do_not_keep_the_target() -> None:
    drawn = moves.draw(20.0, 1000)
    least = moves._count_least(WORKER.coefficients, 40.0, 20.0, drawn)
    assert least > 1
    fleet = moves.Fleet(WORKER, least - 1, 40.0, True, True, False)
    fleet.serve(drawn)
    assert fleet.missed > 100


@pytest.mark.parametrize(
    ("way", "counts"), [("by tokens held", [4, 0]), ("pending tokens", [2, 2])]
)
def test_best_fit_packs_and_pending_tokens_spread(way: str, counts: list[int]) -> None:
    fleet = moves.Fleet(WORKER, 2, 40.0, *moves.WAYS[way])
    for _ in range(4):
        fleet._place(moves.Request(0.0, 100, 100, 100.0))
    assert [len(each.placed) for each in fleet.workers] == counts
