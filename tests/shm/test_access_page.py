"""The page on which the agent opens its engine."""

from pathlib import Path

from cleave.shm.access_page import AccessPage


def test_an_engine_is_closed_until_its_agent_says_otherwise(tmp_path: Path) -> None:
    with AccessPage(tmp_path / "access") as agent, AccessPage(tmp_path / "access") as engine:
        assert not engine.is_open()
        agent.write(is_open=True)
        assert engine.is_open()
        agent.write(is_open=False)
        assert not engine.is_open()
