"""Compiled clones of plain functions, and where their machine code is kept."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cleave.perf import timing
from cleave.policy import admission, dispatch
from cleave.simulator import batching, compiler, events


def test_all_files_that_take_part_name_the_folder_of_the_machine_code() -> None:
    sources = compiler.find_sources(events.run_events)
    for module in (timing, dispatch, admission, batching, events):
        assert Path(str(module.__file__)) in sources


def test_compiled_policy_gives_what_the_plain_function_gives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    compiled = compiler.compile_function(admission.may_join, {})
    for kind in admission.Admission:
        for free in (59.0, 60.0, 80.0, 200.0):
            arguments = (int(kind), free, 60.0, 40.0, 3, 5.0)
            assert compiled(*arguments) == admission.may_join(*arguments)
    assert [path.suffix for path in tmp_path.rglob("*.nbi")] == [".nbi"]


def test_without_a_writable_folder_the_code_is_cached_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(blocked))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    compiled = compiler.compile_function(timing.interpolate_table, {})
    assert compiled(1.0, (0.0, 2.0), 0.5) == 1.0
    assert list(tmp_path.rglob("*.nbi"))


def test_what_an_image_brings_is_used_where_it_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "image" / "share"))
    compiler.compile_function(timing.interpolate_table, {})(1.0, (0.0, 2.0), 0.5)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "image"))
    assert compiler.is_compiled(timing.interpolate_table)
    compiled = compiler.compile_function(timing.interpolate_table, {})
    assert compiled(1.0, (0.0, 2.0), 0.5) == 1.0
    assert sum(compiled.stats.cache_hits.values()) == 1
    assert len(list((tmp_path / "home" / "cleave-simulator").iterdir())) == 1


def test_another_checkout_of_the_same_version_uses_the_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    compiler.compile_function(timing.interpolate_table, {})(1.0, (0.0, 2.0), 0.5)
    package = Path(timing.__file__).parents[1]
    shutil.copytree(package, tmp_path / "other" / "cleave")
    script = (
        "from cleave.perf import timing; from cleave.simulator import compiler;"
        f"assert timing.__file__.startswith({str(tmp_path)!r});"
        "compiled = compiler.compile_function(timing.interpolate_table, {});"
        "compiled(1.0, (0.0, 2.0), 0.5); print(sum(compiled.stats.cache_hits.values()))"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "other")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"


def test_importing_the_simulator_does_not_import_numba() -> None:
    script = "import sys, cleave.simulator.run; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_what_is_compiled_is_known_without_importing_numba(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert not compiler.is_compiled(timing.interpolate_table)
    compiler.compile_function(timing.interpolate_table, {})(1.0, (0.0, 2.0), 0.5)
    assert compiler.is_compiled(timing.interpolate_table)


def test_the_code_of_old_versions_makes_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    for age in range(9):
        (tmp_path / "cleave-simulator" / f"version-{age}").mkdir(parents=True)
        (tmp_path / f"of-others-{age}").mkdir()
    assert not compiler.is_compiled(timing.interpolate_table)
    assert len(list((tmp_path / "cleave-simulator").iterdir())) == 4
    assert len(list(tmp_path.iterdir())) == 10
