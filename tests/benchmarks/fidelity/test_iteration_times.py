from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from cleave.perf.timing import EngineTiming, PromptChunk

Import = Callable[[str], ModuleType]

TIMING = EngineTiming(16.0, (2.0, 4.0, 7.0), 1e-4, (1.0, 1.5, 1.8), (0.001,))


def row(begin_s: float, ms: float, prompts: list[int], batch: int, contexts: int, pulled: int = 0):
    tokens, squares = sum(prompts), sum(tokens**2 for tokens in prompts)
    return [begin_s, begin_s + ms / 1e3, tokens, squares, batch, contexts, pulled]


def served(prompt: float, decode: float, pull_ms: float) -> list[list[float]]:
    """Passes of an engine whose prompts, decoding and pulls take so much."""
    rows = []
    for turn in range(20):
        decode_ms = TIMING.predict_decode_ms(turn + 1, 50 * turn) * decode
        whole_ms = TIMING.predict_iteration_ms([PromptChunk(0, 10 + turn)], turn + 1, 50 * turn)
        grown_ms = (whole_ms - TIMING.predict_decode_ms(turn + 1, 50 * turn)) * prompt
        alone_ms = TIMING.predict_prefill_ms([10 + turn]) * prompt
        rows += [
            row(turn, decode_ms, [], turn + 1, 50 * turn),
            row(turn + 0.2, decode_ms + grown_ms, [10 + turn], turn + 1, 50 * turn),
            row(turn + 0.4, alone_ms, [10 + turn], 0, 0),
            row(turn + 0.6, decode_ms + pull_ms + turn % 3, [], turn + 1, 50 * turn, 1 + turn % 3),
            row(turn + 0.8, decode_ms, [], turn + 1, 50 * turn),
        ]
    return rows


def test_the_pass_scale_is_fitted(module: Import) -> None:
    found = module("iteration_times").fit_pass_scale(np.array(served(1.1, 1.3, 4.0)), TIMING)
    assert found.prompt == pytest.approx(1.1)
    assert found.decode == pytest.approx(1.3)
    assert found.pull_ms == pytest.approx(3.0)
    assert found.pull_block_ms == pytest.approx(1.0)


def test_passes_that_never_occurred_take_what_was_profiled(module: Import) -> None:
    iteration_times = module("iteration_times")
    assert iteration_times.fit_pass_scale(np.empty((0, 7)), TIMING) == iteration_times.PassScale()
    prompts = np.array([each for each in served(1.1, 1.0, 0.0) if each[iteration_times.BATCH] == 0])
    assert iteration_times.fit_pass_scale(prompts, TIMING).decode == 1.0
    assert iteration_times.fit_pass_scale(prompts, TIMING).prompt == pytest.approx(1.1)


def test_a_scaled_timing_takes_as_long_as_the_passes_did(module: Import) -> None:
    slow = module("iteration_times").PassScale(prompt=1.1, decode=1.3).apply(TIMING)
    assert slow.predict_prefill_ms([40, 9]) == pytest.approx(
        TIMING.predict_prefill_ms([40, 9]) * 1.1
    )
    assert slow.predict_decode_ms(5, 400) == pytest.approx(TIMING.predict_decode_ms(5, 400) * 1.3)


def test_only_whole_passes_within_the_requested_time_are_read(
    module: Import, tmp_path: Path
) -> None:
    one, late = (",".join(map(str, row(begin, 5.0, [], 1, 9))) for begin in (10.0, 30.0))
    (tmp_path / "17.csv").write_text(f"{one}\n{late}\n12.0,12.0")
    (tmp_path / "18.csv").write_text(f"{one}\n")
    found = module("iteration_times").read_passes(tmp_path, 9.0, 20.0)
    assert found[:, 0].tolist() == [10.0, 10.0]
