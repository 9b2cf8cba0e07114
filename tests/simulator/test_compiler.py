"""Compiled clones of plain functions, and where their machine code is kept."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from cleave.perf import timing
from cleave.policy import admission, dispatch
from cleave.policy.admission import may_join
from cleave.simulator import batching, compiler, events, records
from cleave.simulator.records import State


def join(state: State, kind: int, free: float) -> None:
    """Calls a policy; compiled."""
    state.events += 1 if may_join(kind, free, 60.0, 40.0, 3, 5.0) else 2


def load() -> Callable[..., None]:
    return compiler.load_function(join, dict, int, float)


def count_joined(function: Callable[..., None], kind: int, free: float) -> int:
    state = np.zeros(1, records.STATE)
    function(state, kind, free)
    return int(state["events"][0])


def test_all_files_that_take_part_name_the_folder_of_the_machine_code() -> None:
    sources = compiler.find_sources(events.run_events)
    for module in (timing, dispatch, admission, batching, events):
        assert Path(str(module.__file__)) in sources


def test_compiled_policy_gives_what_the_plain_function_gives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    for _ in ("compiled", "from the cache"):
        compiled = load()
        for kind in admission.Admission:
            for free in (59.0, 60.0, 80.0, 200.0):
                joins = may_join(int(kind), free, 60.0, 40.0, 3, 5.0)
                assert count_joined(compiled, int(kind), free) == (1 if joins else 2)
    assert [path.suffix for path in tmp_path.rglob("*.*")] == [".o"]


def test_processes_that_need_the_same_code_wait_for_the_one_that_compiles_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    load()
    (file,) = tmp_path.rglob("*.o")
    code = file.read_bytes()
    file.unlink()
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("it is compiled twice"))
    with ThreadPoolExecutor(1) as other, compiler._lock_folder(file.parent):
        loaded = other.submit(load)
        with pytest.raises(TimeoutError):
            loaded.result(0.3)
        file.write_bytes(code)
    assert count_joined(loaded.result(), 0, 200.0) == 1


def test_a_process_that_compiles_for_too_long_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_COMPILE_TIMEOUT_S", 0.2)
    with compiler._lock_folder(compiler._list_files(join)[-1].parent):
        assert count_joined(load(), 0, 200.0) == 1


def test_code_for_another_cpu_lies_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    load()
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert count_joined(load(), 0, 200.0) == count_joined(load(), 0, 200.0)
    assert len(list(tmp_path.rglob("*.o"))) == 2


def test_without_a_writable_folder_the_code_is_cached_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(blocked))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert count_joined(load(), 0, 200.0) == 1
    assert list(tmp_path.rglob("*.o"))


def test_what_an_image_ships_is_used_where_it_lies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "image" / "share"))
    load()
    (shipped,) = tmp_path.rglob("*.o")
    assert shipped.stat().st_mode & 0o777 == 0o644, "the image's user is not its builder"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "home"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "image"))
    assert compiler.is_compiled(join)
    assert count_joined(load(), 0, 200.0) == 1
    assert not list((tmp_path / "home").rglob("*.o"))


def test_another_checkout_of_the_same_version_uses_the_code_without_numba(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    script = (
        "import sys; from cleave.simulator import completion, run;"
        f"assert ('other' in completion.__file__) == ({str(tmp_path)!r} in completion.__file__);"
        "run.compile_loop(completion._count_outcome, int); print('numba' in sys.modules)"
    )
    shutil.copytree(Path(timing.__file__).parents[1], tmp_path / "other" / "cleave")
    seen = []
    for path in ("", str(tmp_path / "other")):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        seen.append(done.stdout)
    assert seen == ["True\n", "False\n"]


def test_importing_the_simulator_does_not_import_numba() -> None:
    script = "import sys, cleave.simulator.run; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_what_is_compiled_is_known_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert not compiler.is_compiled(join)
    load()
    assert compiler.is_compiled(join)


@pytest.mark.parametrize("length", [0, 100, -1])
def test_damaged_code_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, length: int
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    load()
    (file,) = tmp_path.rglob("*.o")
    file.write_bytes(file.read_bytes()[:length])
    assert not compiler.is_compiled(join)
    assert count_joined(load(), 0, 200.0) == 1
    assert compiler.is_compiled(join)


def test_the_code_that_was_used_longest_ago_makes_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    load()
    cache = tmp_path / "cleave-simulator"
    (used,) = cache.iterdir()
    os.utime(used, (1.0, 1.0))
    most = compiler._MAX_VERSIONS
    for age in range(most + 1):
        (cache / f"version-{age}").mkdir(parents=True)
        os.utime(cache / f"version-{age}", (2.0 + age, 2.0 + age))
        (tmp_path / f"of-others-{age}").mkdir()
    load()
    assert not compiler.is_compiled(batching.form_batch)
    left = {each.name for each in cache.iterdir()}
    assert {used.name, f"version-{most}", "version-3"} < left
    assert len(left) == most
    assert len(list(tmp_path.iterdir())) == most + 2
