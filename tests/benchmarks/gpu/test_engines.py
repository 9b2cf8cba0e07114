"""Engines of the benchmark: the simulator's times beside them, and what a kill must not end."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import httpx
import numpy as np
import pytest

from cleave.perf.profile.profile import write_profile
from cleave.simulator.trace import Trace

from tests.support import measured_profiles

pytest.importorskip("torch", reason="torch comes with the engine")

Import = Callable[[str], ModuleType]


def build_setup(engines: ModuleType, folder: Path) -> object:
    return engines.Setup(folder, (), folder, engines.ON_CPU, 3, 60.0)


def test_the_simulator_answers_from_the_profile_of_the_engine(
    module: Import, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engines = module("engines")
    setup = build_setup(engines, tmp_path)
    (row,) = engines.measure_simulated(setup)
    assert "profile.yaml was not written" in row.note
    profile, limits = tmp_path / "profile.yaml", engines.Limits((200,), 64, 2_048, 128)
    output = json.dumps([{"ttftMs": {"p50": 23.5}, "tpotMs": {"p50": 2.5}}])
    done = subprocess.CompletedProcess([], 0, output, "")
    monkeypatch.setattr(engines.subprocess, "run", lambda *_, **__: done)
    assert [row.value for row in engines.simulate_requests(setup, profile, limits)] == [23.5, 2.5]
    failed = subprocess.CompletedProcess([], 2, "", "error: spec.workload.rate: unknown field")
    monkeypatch.setattr(engines.subprocess, "run", lambda *_, **__: failed)
    (row,) = engines.simulate_requests(setup, profile, limits)
    assert "unknown field" in row.note


def test_a_recorded_load_is_simulated_beside_what_clients_saw(
    module: Import, tmp_path: Path
) -> None:
    engines = module("engines")
    trace = Trace(np.arange(20.0) * 5_000, np.full(20, 500), np.full(20, 11))
    profile = tmp_path / "profile.yaml"
    write_profile(measured_profiles.from_fit(dispatch_ms=2.0), profile)
    first_ms = np.full(20, 200.0)
    seen = module("load").Seen(
        first_ms, first_ms + 10 * 30.0, np.zeros(20), np.full(200, 30.0), (), 0.5
    )
    load = tmp_path / "load-0.2.npz"
    engines.keep(load, trace, seen, np.zeros(0))
    rows = {row.what: row for row in engines.simulate_load(load, profile, engines.ON_CPU)}
    alone_ms = measured_profiles.TRUTH.predict_prefill_ms([500]) + 2.0
    first, further = (
        rows[f"{name}, load-0.2/s, p50"] for name in ("first token", "time per token")
    )
    assert first.value == pytest.approx(alone_ms, rel=0.05)
    assert first.note == f"measured 200.0, {first.value / 200 - 1:+.1%}"
    assert further.value == pytest.approx(
        measured_profiles.TRUTH.predict_decode_ms(1, 505), rel=0.05
    )
    assert further.note.startswith("measured 30.0, ")


@pytest.mark.parametrize(("after", "lives"), [("boot-1", 1.0), ("boot-2", 0.0)])
def test_an_engine_that_was_started_again_did_not_live(
    module: Import, monkeypatch: pytest.MonkeyPatch, after: str, lives: float
) -> None:
    engines = module("engines")
    boots = iter(["boot-1", after])
    killed: list[str] = []
    pair = SimpleNamespace(
        gateway="http://gateway",
        get_boot_id=lambda _: next(boots),
        find_engine=lambda role: SimpleNamespace(kill=lambda: killed.append(role)),
    )

    def fail(*_: object) -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(engines, "complete", fail)
    (row,) = engines.kill_one(pair, "pair", "decode", "prefill")
    assert killed == ["decode"]
    assert (row.value, row.note) == (lives, "3 of 3 requests failed meanwhile")
