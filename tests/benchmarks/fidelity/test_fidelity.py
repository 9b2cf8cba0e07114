import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import astuple, replace
from itertools import combinations
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from cleave.api.enums import DispatchPolicy
from cleave.perf.published.aladdin import Coefficients
from cleave.profiling.client import OpenAIClient
from cleave.simulator.inter_token_latency import NUM_BINS, compute_middles
from cleave.simulator.outcome import InterTokenLatencies
from cleave.simulator.run import simulate
from cleave.simulator.trace import PromptBlocks, Trace

Import = Callable[[str], ModuleType]


def trace(num: int = 4) -> Trace:
    return Trace(
        np.arange(num) * 100.0, np.full(num, 50, dtype=np.int64), np.full(num, 5, dtype=np.int64)
    )


class Said:
    """An outcome as far as it is compared."""

    def __init__(self, ttft_ms: list[float], tpot_ms: list[float]) -> None:
        self.ttft_ms = np.array(ttft_ms)
        self.tpot_ms = np.array(tpot_ms)
        self.arrival_ms, self.output_tokens = np.zeros(len(ttft_ms)), 5
        self.end_ms = self.ttft_ms + 4 * self.tpot_ms
        self.cached_tokens = np.full(len(ttft_ms), 10)
        self.fetched_tokens = np.full(len(ttft_ms), 5)
        counts = np.zeros(NUM_BINS, np.int64)
        for gap_ms in self.tpot_ms:
            counts[np.searchsorted(compute_middles(), gap_ms)] += 4
        self.itl = InterTokenLatencies(counts)


def seen(load: ModuleType, ttft_ms: list[float], tpot_ms: list[float], *faults: str) -> object:
    first = np.array(ttft_ms)
    lag_ms, gaps_ms = np.zeros(len(first)), np.repeat(tpot_ms, 4)
    return load.Seen(first, first + 4 * np.array(tpot_ms), lag_ms, gaps_ms, faults, 0.5)


def test_equal_sides_differ_in_nothing(module: Import) -> None:
    compare, load = module("compare"), module("load")
    times = [100.0, 200.0, 300.0, 400.0], [10.0, 20.0, 30.0, 40.0]
    found = compare.compare(
        0.5,
        trace(),
        seen(load, *times),
        [Said(*times)],
        compare.Slo(250.0, 100.0),
        module("iteration_times").PassScale(),
    )
    assert found.attainment == (0.5, 0.5)
    assert (found.points, found.worst_points, found.failed) == (0.0, 0.0, 0)
    assert found.error("ttft_ms", 50) == found.error("normalised_ms", 95) == pytest.approx(0.0)
    assert found.cached == (0.0, 0.3)


def test_errors_are_the_simulators(module: Import) -> None:
    compare, load = module("compare"), module("load")
    found = compare.compare(
        0.5,
        trace(),
        seen(load, [100.0] * 4, [10.0] * 4),
        [Said([110.0] * 4, [9.0] * 4)],
        compare.Slo(105.0, 100.0),
        module("iteration_times").PassScale(),
    )
    assert found.attainment == (1.0, 0.0)
    assert found.points == -100
    assert found.error("ttft_ms", 50) == pytest.approx(0.1)
    assert found.error("tpot_ms", 95) == pytest.approx(-0.1)
    assert found.error("itl_ms", 99) == pytest.approx(-0.1, abs=0.01)


def test_attainment_is_the_mean_of_draws_and_latencies_those_of_the_first(module: Import) -> None:
    compare, load = module("compare"), module("load")
    found = compare.compare(
        0.5,
        trace(),
        seen(load, [100.0] * 4, [10.0] * 4),
        [Said([100.0] * 4, [10.0] * 4), Said([100.0, 100.0, 100.0, 200.0], [10.0] * 4)],
        compare.Slo(150.0, 100.0),
        module("iteration_times").PassScale(),
    )
    assert found.attainment == (1.0, 0.875)
    assert found.chance_points == pytest.approx(12.5)
    assert found.error("ttft_ms", 95) == 0.0


def test_draws_move_arrivals_little_and_keep_requests(module: Import) -> None:
    arrivals = module("arrivals")
    first, second = arrivals.dither(trace(), 2, seed=1)
    assert not np.array_equal(first.arrival_ms, second.arrival_ms)
    for draw in (first, second):
        late_ms = draw.arrival_ms - trace().arrival_ms
        assert ((late_ms >= 0) & (late_ms <= arrivals.DITHER_MS)).all()
        assert np.array_equal(draw.prompt_tokens, trace().prompt_tokens)


def test_a_failed_request_meets_no_target_and_spoils_no_percentile(module: Import) -> None:
    compare, load = module("compare"), module("load")
    nan = float("nan")
    found = compare.compare(
        0.5,
        trace(),
        seen(load, [100.0, nan, 100.0, 100.0], [10.0] * 4, "request 1: gone"),
        [Said([100.0] * 4, [10.0] * 4)],
        compare.Slo(1000.0, 1000.0),
        module("iteration_times").PassScale(),
    )
    assert found.attainment == (0.75, 1.0)
    assert found.failed == 1
    assert found.percentiles["ttft_ms"]["p50"] == (100.0, 100.0)


def test_lengths_are_scaled_and_what_is_too_long_is_left_out(
    module: Import, tmp_path: Path
) -> None:
    arrivals = module("arrivals")
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    rows += [
        f"2023-11-16 18:15:{i:02d}.0000000,{tokens},40" for i, tokens in enumerate((1, 400, 4000))
    ]
    (tmp_path / arrivals.FILE).write_text("\n".join(rows) + "\n")
    lengths = arrivals.read_lengths(tmp_path, 0.25, 500)
    assert lengths.prompt_tokens.tolist() == [1, 100]
    assert lengths.output_tokens.tolist() == [10, 10]


def test_arrivals_are_read_as_sent(module: Import) -> None:
    load = module("load")
    planned = Trace(np.array([0.0, 10.0]), np.array([5, 6]), np.array([7, 8]))
    late = load.Seen(
        np.array([130.0, 40.0]),
        np.array([230.0, 50.0]),
        np.array([30.0, 0.0]),
        np.array([10.0]),
        (),
        0.5,
    )
    sent, seen = load.as_sent(planned, late)
    assert sent.arrival_ms.tolist() == [10.0, 30.0]
    assert sent.prompt_tokens.tolist() == [6, 5]
    assert seen.first_token_ms.tolist() == [40.0, 100.0]
    assert seen.end_ms.tolist() == [50.0, 200.0]


def test_another_rate_is_the_same_requests_stretched(module: Import) -> None:
    arrivals = module("arrivals")
    lengths = arrivals.Lengths(np.arange(1, 50), np.arange(51, 100))
    slow, fast = (arrivals.draw_trace(lengths, rate, 30, seed=3) for rate in (1.0, 4.0))
    assert slow.prompt_tokens.tolist() == fast.prompt_tokens.tolist()
    assert slow.arrival_ms == pytest.approx(4 * fast.arrival_ms)
    assert fast.arrival_ms[0] == 0


def test_dispatch_predicts_the_mean_of_such_prompts_or_the_requested_length(module: Import) -> None:
    arrivals = module("arrivals")
    lengths = arrivals.Lengths(np.tile([40, 500], 200), np.tile([10, 200], 200))
    sent_trace = Trace(np.zeros(3), np.array([40, 500, 500]), np.array([90, 90, 900]))
    foreseen = arrivals.foresee(sent_trace, lengths)
    assert foreseen.output_tokens.tolist() == [90, 90, 900]
    assert foreseen.predicted_tokens == pytest.approx([10, 90, 200], abs=8)


def test_turns_of_conversations_begin_with_the_same_tokens(module: Import) -> None:
    arrivals, load = module("arrivals"), module("load")
    lengths = arrivals.Lengths(np.arange(600, 1600, 10), np.arange(100), arrivals.CONVERSATIONS)
    drawn = arrivals.draw_trace(lengths, 4.0, 30, seed=3)
    assert drawn.prompt_tokens.max() < 1600
    prompts = [load.build_prompt(drawn, index, "x", random.Random(1)) for index in range(30)]
    assert [len(each) for each in prompts] == drawn.prompt_tokens.tolist()
    size, starts, numbers = drawn.blocks.block_tokens, drawn.blocks.starts, drawn.blocks.numbers
    for first, second in combinations(range(30), 2):
        blocks = [numbers[starts[each] : starts[each + 1]] for each in (first, second)]
        equal = 0
        while equal < min(map(len, blocks)) and blocks[0][equal] == blocks[1][equal]:
            equal += 1
        tokens = equal * size
        assert tokens >= 512
        assert prompts[first][:tokens] == prompts[second][:tokens]
        assert prompts[first][tokens : tokens + 16] != prompts[second][tokens : tokens + 16]


def test_a_saved_load_is_restored_unchanged(module: Import, tmp_path: Path) -> None:
    recordings, load = module("recordings"), module("load")
    file = tmp_path / "load.npz"
    before = seen(load, [1.0, float("nan")], [2.0, 3.0], "request 1: gone")
    recordings.keep(file, trace(2), before, np.ones((3, 7)))
    came, after, passes = recordings.recall(file)
    assert passes.shape == (3, 7)
    assert came.prompt_tokens.tolist() == [50, 50]
    np.testing.assert_equal(after.end_ms, before.end_ms)
    assert after.faults == ("request 1: gone",)
    assert list(tmp_path.iterdir()) == [file]
    blocks = PromptBlocks(16, np.array([0, 1, 3]), np.array([0, 0, 1]), 2)
    tokens = 70.0, 20.0, 10.0
    recordings.keep(
        file, replace(trace(2), blocks=blocks), replace(before, prompt_tokens=tokens), passes
    )
    came, after, _ = recordings.recall(file)
    assert (came.blocks.block_tokens, came.blocks.count) == (16, 2)
    assert came.blocks.numbers.tolist() == [0, 0, 1]
    assert after.prompt_tokens == tokens


def test_the_way_is_shared_by_the_ways_and_pulls_lie_on_a_line(module: Import) -> None:
    idle = module("idle")
    alone = [idle.Alone(n, front_ms=5.0, pull_ms=3.0 + 0.01 * n) for n in (16, 512, 2000)]
    assert idle.find_dispatch(alone, ways=2) == 2.5
    found = idle.fit_transfer(alone)
    assert found.latency_ms == pytest.approx(3.0)
    assert found.token_ms == pytest.approx(0.01)
    assert not found.is_shared


async def test_load_is_sent_on_schedule_despite_failures(module: Import) -> None:
    load = module("load")
    heads: list[float] = []
    loop = asyncio.get_running_loop()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(loop.time())
        head = await reader.readuntil(b"\r\n\r\n")
        (size,) = (int(x.split(b":")[1]) for x in head.split(b"\r\n") if b"Content-Length" in x)
        body = json.loads(await reader.readexactly(size))
        if len(heads) == 2:
            writer.close()
            return
        event = b'data: {"choices":[{"text":"x"}]}\n\n'
        usage = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n' % body["max_tokens"]
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + event * body["max_tokens"] + usage)
        writer.write(b"data: [DONE]\n\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    offered = await load.offer(OpenAIClient(f"http://{host}:{port}", "m"), trace(), 0.5, seed=1)
    server.close()
    await server.wait_closed()
    assert len(heads) == 4
    assert len(offered.faults) == 1
    assert np.isfinite(offered.end_ms).tolist() == [True, False, True, True]
    assert (offered.lag_ms[[0, 2, 3]] >= 0).all()
    assert 0 <= offered.busy_share <= 1


def test_only_the_requested_cases_are_run(module: Import) -> None:
    run = module("run")
    options = run.parse_arguments(["emulated", "--cases", "1P1D,2M"])
    assert [each.case.name for each in run.choose_subjects(options)] == ["1P1D", "2M"]
    assert len(run.choose_subjects(run.parse_arguments(["vllm"]))) == 2


@pytest.mark.parametrize("policy", list(DispatchPolicy))
def test_deployment_and_simulation_have_the_same_policy(
    module: Import, tmp_path: Path, policy: DispatchPolicy
) -> None:
    run = module("run")
    options = run.parse_arguments(["emulated", "--cases", "2P2D", "--policy", policy.value])
    (subject,) = run.choose_subjects(options)
    alone = [{"tokens": tokens, "front_ms": 5.0, "pull_ms": 3.0} for tokens in (16, 512)]
    (tmp_path / "idle.json").write_text(json.dumps(alone))
    fleet = subject.twin(tmp_path, module("iteration_times").PassScale())
    assert subject.spec(tmp_path)["routing"] == {"policy": policy.value}
    assert fleet.dispatch is policy
    assert (fleet.best_fit is not None) == (policy is DispatchPolicy.BEST_FIT)
    assert np.isfinite(simulate(fleet, trace()).end_ms).all()


def test_the_targets_of_a_deployment_are_on_its_own_clock(module: Import, tmp_path: Path) -> None:
    run = module("run")
    options = run.parse_arguments(["emulated", "--cases", "2P2D", "--time-scale", "0.5"])
    (subject,) = run.choose_subjects(options)
    assert subject.spec(tmp_path)["slo"] == {"ttftMs": 500.0, "tpotMs": 30.0}


def test_best_fit_is_simulated_with_the_iteration_times_of_the_engines(module: Import) -> None:
    emulated = module("emulated")
    timing = Coefficients(0.1, 10.0, 0.001, 0.5, 15.0).to_timing()
    found = emulated.fit_best_fit(timing).coefficients
    assert astuple(found) == pytest.approx((0.1, 10.0, 0.001, 0.5, 15.0))


@pytest.mark.parametrize(("prompt", "lines"), [(1.0, 0), (1.2, 1)])
def test_a_report_names_passes_that_are_not_those_of_the_profile(
    module: Import, prompt: float, lines: int
) -> None:
    compare, load, report = module("compare"), module("load"), module("report")
    times = [100.0, 200.0, 300.0, 400.0], [10.0, 20.0, 30.0, 40.0]
    scale = module("iteration_times").PassScale(prompt=prompt)
    targets = compare.Slo(250.0, 100.0)
    found = compare.compare(0.5, trace(), seen(load, *times), [Said(*times)], targets, scale)
    whole = report.Report("emulated", "a machine", 1.0, {"1P1D": [found]})
    assert len(list(report.report_pass_scales(whole))) == lines
    report.print_report(whole)
