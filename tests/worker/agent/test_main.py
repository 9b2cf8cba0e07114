"""Entry of the worker: what it does before the agent runs."""

import logging
from pathlib import Path

import pytest

from cleave_worker.agent import main as agent_main
from cleave_worker.agent.config import AgentConfig


def test_a_cache_that_cannot_be_written_does_not_end_the_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async def run(config: AgentConfig, cores: tuple[int, ...], gpu: bool) -> int:
        seen.update(agent_main.os.environ)
        return 0

    seen: dict[str, str] = {}
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "file" / "vllm"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    for name, value in (("has_gpu", lambda: True), ("_run", run)):
        monkeypatch.setattr(agent_main, name, value)
    monkeypatch.setattr(agent_main.subreaper, "become_subreaper", lambda: None)
    monkeypatch.setattr(agent_main.logs, "configure", lambda *_, **__: None)
    arguments = ["--engine", "vllm", "--model", "m", "--name", "n", "--host", "127.0.0.1"]
    arguments += ["--deployment", "d", "--role", "mixed", "--cores", "none"]
    with caplog.at_level(logging.WARNING):
        assert agent_main.main(arguments) == 0
    assert "VLLM_CACHE_ROOT" not in seen
    assert seen["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    assert "VLLM_CACHE_ROOT: Not a directory" in caplog.text
