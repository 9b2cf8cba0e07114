"""The terms page between an agent and its engine."""

from pathlib import Path

from cleave.policy.admission import Admission
from cleave.policy.prompt_order import Order
from cleave_worker.scheduling.config import Terms
from cleave_worker.scheduling.config_page import TermsPage

TERMS = Terms(Order.LJF, 8, 64, 512, 128, Admission.RESERVE_STATIC, 2)


def test_an_engine_hears_of_each_change_once(tmp_path: Path) -> None:
    with TermsPage(tmp_path / "terms") as agent, TermsPage(tmp_path / "terms") as engine:
        assert engine.news() is None
        agent.write(TERMS)
        assert engine.news() == TERMS
        assert engine.news() is None
        agent.write(Terms())
        assert engine.news() == Terms()


def test_an_engine_that_starts_later_hears_of_the_newest(tmp_path: Path) -> None:
    with TermsPage(tmp_path / "terms") as agent:
        agent.write(Terms())
        agent.write(TERMS)
        with TermsPage(tmp_path / "terms") as engine:
            assert engine.news() == TERMS
