"""Every part of the benchmark of one GPU runs on a CPU, too; wrong bytes end it with code 1."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

Import = Callable[[str], ModuleType]


@pytest.fixture
def tiny(module: Import, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    copies = module("copies")
    sizes = replace(
        copies.ON_CPU, num_layers=2, kv_heads=1, tokens=64, rounds=1, register_bytes=1 << 20
    )
    sizes = replace(sizes, matrix=64, prompts=(16,))
    monkeypatch.setattr(copies, "ON_CPU", sizes)
    monkeypatch.setattr(copies, "ON_GPU", sizes)
    monkeypatch.setenv("UCX_TLS", "tcp")
    return copies


def run(
    module: Import, monkeypatch: pytest.MonkeyPatch, *args: str, code: int = 0
) -> list[dict[str, object]]:
    output = Path(args[-1])
    monkeypatch.setattr(sys, "argv", ["one_gpu.py", "--cpu", *args])
    with pytest.raises(SystemExit) as ended:
        module("one_gpu").main()
    assert ended.value.code == code
    rows: list[dict[str, object]] = json.loads(output.read_text())["rows"]
    return rows


def test_all_parts_without_engines_run_on_a_cpu_or_give_the_reason(
    module: Import, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = run(module, monkeypatch, "-O", str(tmp_path / "rows.json"))
    assert not [row for row in rows if row["what"] in ("failed", "WRONG BYTES")], rows
    assert {row["part"] for row in rows} == {"a", "b", "c", "d", "e", "f", "g"}
    for row in rows:
        assert row["value"] is not None or row["note"], row
    rates = {row["what"]: row["value"] for row in rows if row["unit"] == "GB/s"}
    for way in ("shared memory", "gloo"):
        assert rates[f"{way}: pull a prompt"] > 0
    assert rates["shared memory, same cpu: pull 64 tokens"] > 0
    notes = {row["what"]: row["note"] for row in rows}
    assert notes["shared memory, same cpu: next pull"] == "refused: peer_lost"
    reasons = {row["what"]: row["note"] for row in rows if row["value"] is None}
    assert "two GPUs" in str(reasons["nccl"])
    assert "need a GPU" in str(reasons["waiting for an event"])


def test_a_part_that_takes_too_long_is_a_row_and_the_next_one_runs(
    module: Import, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tiny, "measure_gil", lambda *_: time.sleep(60))
    limit = ("--parts", "a", "c", "--part-seconds", "0.2")
    late, other = run(module, monkeypatch, *limit, "-O", str(tmp_path / "rows.json"))
    assert (late["part"], late["what"]) == ("a", "failed")
    assert "longer than --part-seconds" in str(late["note"])
    assert other["part"] == "c"


def test_other_bytes_than_were_sent_end_the_run_with_code_1(
    module: Import, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tiny, "copy_rows", lambda *_: None)
    scramble = tiny.Prompt.move_by_copies

    def move(prompt: object) -> None:
        scramble(prompt)
        prompt.memory.regions[0].add_(1)  # type: ignore[attr-defined]

    monkeypatch.setattr(tiny.Prompt, "move_by_copies", move)
    output = str(tmp_path / "rows.json")
    rows = run(module, monkeypatch, "--parts", "a", "-O", output, code=1)
    assert rows[-1]["what"] == "WRONG BYTES"


def test_a_part_that_fails_is_a_row_and_the_others_run(
    module: Import, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(tiny, "measure_gil", fail)
    rows = run(module, monkeypatch, "--parts", "a", "c", "-O", str(tmp_path / "rows.json"))
    assert [row["part"] for row in rows] == ["a", "c"]
    assert "out of memory" in str(rows[0]["note"])


def test_help_explains_every_part(module: Import, capsys: pytest.CaptureFixture[str]) -> None:
    one_gpu = module("one_gpu")
    with pytest.raises(SystemExit):
        one_gpu.build_parser().parse_args(["--help"])
    text = capsys.readouterr().out
    for part, meaning in (one_gpu.KERNELS | one_gpu.ENGINES).items():
        assert f"  {part:8}{meaning}" in text


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
    module: Import, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output = tmp_path / "absent" / "rows.json"
    monkeypatch.setattr(sys, "argv", ["one_gpu.py", "--cpu", "-O", str(output)])
    with pytest.raises(SystemExit, match="its folder does not exist or cannot be written"):
        module("one_gpu").main()
