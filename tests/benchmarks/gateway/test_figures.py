from types import ModuleType

import pytest


def build_run(figures: ModuleType, tokens: int, us_per_request: float, **others: float) -> object:
    values = {
        "requests": 100,
        "tokens": 100 * tokens,
        "seconds": 1.0,
        "ttft_p50_us": 0.0,
        "ttft_p99_us": 0.0,
        "cpu_us": 100 * us_per_request,
        "user_ticks": 1,
        "system_ticks": 1,
    }
    return figures.Run(**{**values, **others})


def test_the_fit_finds_the_cost_of_a_request_and_of_a_token(figures: ModuleType) -> None:
    runs = [build_run(figures, n, 30 + 12 * n) for n in (1, 16, 256)]
    cost = figures.fit_cost(runs, idle_share=0.0)
    assert cost.request_us == pytest.approx(30)
    assert cost.token_us == pytest.approx(12)


def test_what_the_process_spends_without_requests_is_left_out(figures: ModuleType) -> None:
    # 1 % of a core over 2 s is 20,000 us, 200 for each of the 100 requests.
    runs = [build_run(figures, n, 200 + 30 + 12 * n, seconds=2.0) for n in (1, 16, 256)]
    cost = figures.fit_cost(runs, idle_share=0.01)
    assert cost.request_us == pytest.approx(30)
    assert cost.token_us == pytest.approx(12)


def test_noise_in_the_longest_run_does_not_drown_the_cost_of_a_request(figures: ModuleType) -> None:
    spent = {1: 42.0, 16: 222.0, 64: 798.0, 256: 3102.0 * 1.05}
    cost = figures.fit_cost([build_run(figures, n, us) for n, us in spent.items()], 0.0)
    assert cost.request_us == pytest.approx(30, rel=0.1)


def test_a_spread_is_median_least_and_most(figures: ModuleType) -> None:
    assert figures.spread([3.0, 1.0, 9.0]) == figures.Spread(3.0, 1.0, 9.0)


def test_the_kernel_s_share_weighs_runs_by_their_time(figures: ModuleType) -> None:
    short = build_run(figures, 1, 1.0, user_ticks=1, system_ticks=1)
    long = build_run(figures, 1, 1.0, user_ticks=2, system_ticks=6)
    assert figures.system_share([short, long]) == 0.7
