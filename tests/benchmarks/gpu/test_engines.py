"""Engines of the benchmark: the simulator's times beside them, and what a kill must not end."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import httpx
import pytest

pytest.importorskip("torch", reason="torch comes with the engine")

Import = Callable[[str], ModuleType]


def build_setup(engines: ModuleType, folder: Path) -> object:
    return engines.Setup(folder, (), folder, (200,), 3, 60.0)


def test_the_simulator_answers_from_the_profile_of_the_engine(
    module: Import, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engines = module("engines")
    setup = build_setup(engines, tmp_path)
    (row,) = engines.simulate(setup, "pair")
    assert "profile was not written" in row.note
    (tmp_path / "profile.yaml").touch()
    output = json.dumps([{"ttftMs": {"p50": 23.5}, "tpotMs": {"p50": 2.5}}])
    done = subprocess.CompletedProcess([], 0, output, "")
    monkeypatch.setattr(engines.subprocess, "run", lambda *_, **__: done)
    assert [row.value for row in engines.simulate(setup, "pair")] == [23.5, 2.5]
    failed = subprocess.CompletedProcess([], 2, "", "error: spec.workload.rate: unknown field")
    monkeypatch.setattr(engines.subprocess, "run", lambda *_, **__: failed)
    (row,) = engines.simulate(setup, "pair")
    assert "unknown field" in row.note


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
