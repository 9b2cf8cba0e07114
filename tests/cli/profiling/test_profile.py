"""`cleave profile` against an emulated engine in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from cleave.cli.main import app
from cleave.perf import named_profiles
from cleave.perf.profile import profile
from cleave.profiling import measurement_plan
from cleave.profiling.measurement_plan import SamplesByCase
from cleave.profiling.measurements import (
    DecodeCase,
    MeasuredCase,
    OverheadCase,
    PrefillCase,
    Sample,
)

# Two points of one stream: on a busy machine those of two streams may be left out.
FEW = measurement_plan.ProfilingSettings(
    repeats=1,
    batches=(1, 2),
    contexts=(32, 64),
    steps_per_octave=1,
    max_prompt_tokens=64,
    max_spread=1e9,
)


@pytest.fixture
def engine(port: str) -> Iterator[str]:
    command = [sys.executable, "-m", "cleave_worker.emulator.main", "--model", "opt-13b"]
    command += ["--served-model-name", "m", "--port", port, "--time-scale", "0.2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "http://" in process.stderr.readline()
        yield f"http://127.0.0.1:{port}"
        process.terminate()


def test_a_profile_is_written_shown_and_can_be_run(
    cli: CliRunner, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement_plan, "QUICK", FEW)
    file = tmp_path / "m.yaml"
    words = ["profile", engine, "--quick", "-O", str(file), "--device", "A100-SXM-80GB"]
    shown = cli.invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "prefill 1 x 64" in shown.output
    assert f"written to {file}" in shown.output
    found = profile.read_profile(file)
    assert (found.model, found.device, found.engine) == ("opt-13b", "A100-SXM-80GB", "emulated")
    assert named_profiles.load_profile(str(file)).kv_capacity_tokens == found.kv_capacity_tokens

    words += ["-o", "json", "--tensor-parallel-size", "2"]
    output = json.loads(cli.invoke(app, words).stdout)
    assert output["file"] == str(file)
    assert output["profile"]["tensorParallelSize"] == 2


async def measure_scattered(*_: object) -> tuple[SamplesByCase, list[str]]:
    """What `measure` returns: a batch is left out, and one point scatters on any machine."""
    times_ms: dict[MeasuredCase, list[float]] = {
        PrefillCase(1, 16): [5.0, 5.0, 5.0],
        PrefillCase(1, 64): [10.0, 20.0, 30.0],
        DecodeCase(1, 32): [5.0, 5.0, 5.0],
        DecodeCase(2, 32): [6.0, 6.0, 6.0],
        OverheadCase(64): [0.1, 0.5, 2.0],
    }
    samples = {case: [Sample(case, ms, 64) for ms in times] for case, times in times_ms.items()}
    return samples, ["decode 256 x 64: its streams ended early"]


def test_points_that_scatter_are_named_and_nothing_is_written_unless_forced(
    cli: CliRunner, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement_plan, "measure", measure_scattered)
    file = tmp_path / "m.yaml"
    words = ["profile", engine, "--quick", "-O", str(file), "--device", "x"]
    refused = cli.invoke(app, words)
    assert refused.exit_code == 1
    assert "error: scatters: prefill of 1 x 64 tokens" in refused.stderr
    assert refused.stderr.splitlines()[-1].endswith("--force")
    assert not file.exists()
    forced = cli.invoke(app, [*words, "--force"])
    assert forced.exit_code == 0
    assert "left out: decode 256 x 64: its streams ended early" in forced.stdout
    assert file.exists()


@pytest.mark.parametrize(
    ("words", "code", "fault"),
    [
        (["http://127.0.0.1:9"], 1, "cannot be reached"),
        (["nonsense", "--device", "x"], 1, "'nonsense' is no URL"),
        (["http://example.invalid:1"], 2, "another machine: name its GPU with --device"),
        (["http://127.0.0.1:9", "-O", "/nowhere/x.yaml"], 2, "/nowhere is not an existing folder"),
    ],
)
def test_a_fault_is_one_line(cli: CliRunner, words: list[str], code: int, fault: str) -> None:
    result = cli.invoke(app, ["profile", *words])
    (line,) = result.stderr.splitlines()
    assert (result.exit_code, line.startswith("error: ")) == (code, True)
    assert fault in line


def test_ctrl_c_leaves_nothing_running_on_the_engine(engine: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cleave.cli.main", "profile", engine, "--device", "x"]
    file = tmp_path / "m.yaml"
    with subprocess.Popen(
        [*command, "-O", str(file)], stderr=subprocess.PIPE, env=os.environ
    ) as run:
        until(lambda: load(engine) > 0)
        run.send_signal(signal.SIGINT)
        assert run.wait(20) == 130
    until(lambda: load(engine) == 0)
    assert not list(tmp_path.glob("*.yaml*"))


def load(engine: str) -> float:
    lines = httpx.get(f"{engine}/metrics", timeout=5).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_r"))


def until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
