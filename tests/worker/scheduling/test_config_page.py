"""The scheduling page between an agent and its engine."""

from pathlib import Path

from cleave.policy.admission import Admission
from cleave.policy.prompt_order import PrefillOrder
from cleave_worker.scheduling.config import RoleSchedulingConfig
from cleave_worker.scheduling.config_page import SchedulingPage

TERMS = RoleSchedulingConfig(PrefillOrder.LJF, 8, 64, 512, 128, Admission.RESERVE_STATIC, 2)


def test_an_engine_hears_of_each_change_once(tmp_path: Path) -> None:
    with (
        SchedulingPage(tmp_path / "scheduling") as agent,
        SchedulingPage(tmp_path / "scheduling") as engine,
    ):
        assert engine.read_if_changed() is None
        agent.write(TERMS)
        assert engine.read_if_changed() == TERMS
        assert engine.read_if_changed() is None
        agent.write(RoleSchedulingConfig())
        assert engine.read_if_changed() == RoleSchedulingConfig()


def test_an_engine_that_starts_later_hears_of_the_newest(tmp_path: Path) -> None:
    with SchedulingPage(tmp_path / "scheduling") as agent:
        agent.write(RoleSchedulingConfig())
        agent.write(TERMS)
        with SchedulingPage(tmp_path / "scheduling") as engine:
            assert engine.read_if_changed() == TERMS
