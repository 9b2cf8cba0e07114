import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ENGINE = Path(__file__).parents[4] / "benchmarks" / "fidelity" / "engine"


class Scheduler:
    """vLLM's, as far as it is clocked."""

    def __init__(self, outputs: list[SimpleNamespace]) -> None:
        self.outputs = outputs

    def schedule(self) -> SimpleNamespace:
        return self.outputs.pop(0)

    def update_from_output(self, output: SimpleNamespace) -> str:
        return "tokens"

    def shutdown(self) -> None:
        self.outputs.clear()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    fake = ModuleType("vllm.v1.core.sched.scheduler")
    fake.Scheduler = Scheduler  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setenv("FIDELITY_PASSES", str(tmp_path))
    monkeypatch.syspath_prepend(str(ENGINE))
    yield importlib.import_module("fidelity_clock")
    sys.modules.pop("fidelity_clock")


def output(new: dict[str, int], cached: dict[str, int], counts: dict[str, int], **pulls: object):
    """Computed tokens of new and of other requests, and how many each gets now."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=n) for name, n in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=list(cached.values())
        ),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        kv_connector_metadata=SimpleNamespace(reqs_to_recv=pulls) if pulls else None,
    )


def test_a_pass_is_described_as_the_simulator_counts_it(clock: ModuleType) -> None:
    # A chunk behind 100 tokens, one whole prompt, two that decode, and a pull of three blocks.
    first_output = output({"a": 100, "b": 0}, {"c": 40, "d": 9}, {"a": 50, "b": 20, "c": 1, "d": 1})
    assert clock.describe(first_output) == (70, 150**2 - 100**2 + 400, 2, 41 + 10, 0)
    pulling = output({}, {"c": 40}, {"c": 1}, e=SimpleNamespace(local_block_ids=([4, 5, 9],)))
    assert clock.describe(pulling) == (0, 0, 1, 41, 3)


def test_passes_end_where_the_next_begins_unless_the_engine_idled(
    clock: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times = iter([10.0, 10.005, 10.006, 10.011, 15.0, 15.001, 16.0])
    monkeypatch.setattr(clock.time, "monotonic", lambda: next(times))
    busy = [output({}, {"c": n}, {"c": 1}) for n in range(3)]
    scheduler = clock.ClockedScheduler([*busy, output({}, {}, {})])
    for _ in range(3):
        assert scheduler.update_from_output(scheduler.schedule()) == "tokens"
    scheduler.schedule()
    scheduler.shutdown()
    (file,) = tmp_path.glob("*.csv")
    spans = [
        [float(field) for field in line.split(",")[:2]] for line in file.read_text().splitlines()
    ]
    assert spans == [[10.0, 10.006], [10.006, 10.011], [15.0, 15.001]]
