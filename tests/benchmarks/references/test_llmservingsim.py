"""LLMServingSim's recordings, from small files of the same form."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np

Import = Callable[[str], ModuleType]


def test_arrivals_are_moved_to_the_clock_of_the_tokens(module: Import, tmp_path: Path) -> None:
    recorded = module("llmservingsim")
    folder = tmp_path / "bench/examples/a/vllm"
    folder.mkdir(parents=True)
    rows = [
        {
            "arrival_time": 1000.0 + at,
            "queued_ts": 5.0 + at + late,
            "first_token_ts": 5.5 + at,
            "last_token_ts": 6.5 + at,
            "output_toks": 11,
        }
        for at, late in ((0.0, 0.2), (1.0, 0.0))
    ]
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, rows)))
    measured = recorded.read_measured(tmp_path, recorded.Run("a", "", ""))
    assert np.allclose(measured["TTFT"], 500)
    assert np.allclose(measured["TPOT"], 100)
