"""What a kind of fleet has to offer to be compared with its twin in the simulator."""

from pathlib import Path
from typing import Any, Protocol

from compare import Slo
from deployments import Case, Stage
from iteration_times import PassScale

from cleave.perf.timing import EngineTiming
from cleave.simulator.fleet import SimulatedEngine, SimulatedFleet, SimulatedPool, SimulatedTransfer


class Subject(Protocol):
    """One fleet and its twin."""

    case: Case
    kind: str
    model: str
    """As it is served."""
    length_scale: float
    """Of Azure's lengths, and of what conversations have in common."""
    block_size: int
    """Tokens of a KV block of its engines, a power of two."""
    max_model_len: int
    time_scale: float
    """Milliseconds of this machine for one of the trace."""

    @property
    def targets(self) -> Slo | None:
        """By which attainment is compared; None: by percentiles of the simulation."""

    def spec(self, folder: Path) -> dict[str, Any]:
        """Of the LLMDeployment, without its placement; engines may write to `folder`."""

    def prepare(self, stage: Stage, folder: Path) -> None:
        """Measure on the idle fleet what the twin needs, unless `folder` has it."""

    def timing(self, folder: Path) -> EngineTiming:
        """Passes of an engine by itself, from what `prepare` left in `folder`.

        Raises FileNotFoundError before `prepare` has run.
        """

    def twin(self, folder: Path, pass_scale: PassScale) -> SimulatedFleet:
        """The fleet for the simulator, its passes at `pass_scale`. Raises as `timing` does."""


def make_fleet(
    case: Case, engine: SimulatedEngine, transfer: SimulatedTransfer, dispatch_ms: float
) -> SimulatedFleet:
    """Like engines in the roles of `case`."""

    def pools(replicas: int) -> tuple[SimulatedPool, ...]:
        return (SimulatedPool(engine, replicas),) if replicas else ()

    return SimulatedFleet(
        prefill=pools(case.prefill),
        decode=pools(case.decode),
        mixed=pools(case.mixed),
        transfer=transfer,
        dispatch_ms=dispatch_ms,
    )
