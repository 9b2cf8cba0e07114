"""What a kind of fleet has to offer to be compared with its twin in the simulator."""

from pathlib import Path
from typing import Any, Protocol

from stage import Case, Stage

from cleave.simulator.fleet import Engine, Fleet, Pool, Transfer


class Subject(Protocol):
    """One fleet and its twin."""

    case: Case
    kind: str
    model: str
    """As it is served."""
    length_scale: float
    """Of Azure's lengths."""
    max_model_len: int
    time_scale: float
    """Milliseconds of this machine for one of the trace."""

    def spec(self) -> dict[str, Any]:
        """Of the LLMDeployment, without its placement."""

    def prepare(self, stage: Stage, folder: Path) -> None:
        """Measure on the idle fleet what the twin needs, unless `folder` has it."""

    def twin(self, folder: Path) -> Fleet:
        """The fleet for the simulator, from what `prepare` left in `folder`.

        Raises FileNotFoundError before `prepare` has run.
        """


def make_fleet(case: Case, engine: Engine, transfer: Transfer, dispatch_ms: float) -> Fleet:
    """Like engines in the roles of `case`."""

    def pools(replicas: int) -> tuple[Pool, ...]:
        return (Pool(engine, replicas),) if replicas else ()

    return Fleet(
        prefill=pools(case.prefill),
        decode=pools(case.decode),
        mixed=pools(case.mixed),
        transfer=transfer,
        dispatch_ms=dispatch_ms,
    )
