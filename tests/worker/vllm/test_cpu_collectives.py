"""Collective operations of vLLM's ranks on CPU, over gloo between real processes."""

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from cleave.shm.load_page import ENV
from cleave_worker.vllm.cpu_collectives import add_collectives, add_rows, collect_rows

ROWS = (1, 3)
"""Of each rank."""


def run_rank(rank: int, store: str) -> None:
    """One of two processes: what it sends, and what it must get."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=len(ROWS))
    communicator = SimpleNamespace(
        world_size=len(ROWS), rank_in_group=rank, device_group=dist.group.WORLD
    )

    def rows_of(number: int) -> torch.Tensor:
        return torch.full((ROWS[number], 2), float(number + 1))

    everything = torch.cat([rows_of(number) for number in range(len(ROWS))])
    ids = torch.arange(ROWS[rank])
    gathered, gathered_ids = collect_rows(communicator, [rows_of(rank), ids], sizes=[*ROWS])
    own = everything * (rank + 1)
    scattered = add_rows(communicator, own, dim=0, sizes=[*ROWS])
    equal = collect_rows(communicator, torch.tensor([rank, rank]))
    equal_part = add_rows(communicator, torch.ones(6, 2), dim=0)
    assert gathered.equal(everything)
    assert gathered_ids.tolist() == [0, 0, 1, 2]
    assert scattered.equal(3 * rows_of(rank))
    assert own.equal(everything * (rank + 1)), "the input is not changed"
    assert equal.tolist() == [0, 0, 1, 1]
    assert equal_part.equal(torch.full((3, 2), 2.0))


def test_ranks_gather_and_add_up_different_numbers_of_rows(tmp_path: Path) -> None:
    multiprocessing = pytest.importorskip("torch.multiprocessing")
    multiprocessing.spawn(run_rank, (str(tmp_path / "store"),), nprocs=len(ROWS))


def test_other_dimensions_are_refused() -> None:
    torch = pytest.importorskip("torch")
    nothing = SimpleNamespace(world_size=1)
    with pytest.raises(NotImplementedError, match="along dim 0, not 1"):
        collect_rows(nothing, torch.ones(2, 2), dim=1)
    with pytest.raises(NotImplementedError, match="along dim 0, not -1"):
        add_rows(nothing, torch.ones(2, 2), dim=-1)


@pytest.fixture
def communicator(monkeypatch: pytest.MonkeyPatch) -> type:
    """vLLM's communicator, restored afterwards."""
    module: ModuleType = pytest.importorskip(
        "vllm.distributed.device_communicators.cpu_communicator"
    )
    found: type = module.CpuCommunicator
    for name in ("all_gatherv", "reduce_scatterv"):
        monkeypatch.setattr(found, name, getattr(found, name))
    return found


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_vllm_on_cpu_has_them_where_an_agent_started_it(
    communicator: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV, raising=False)
    before = communicator.all_gatherv
    add_collectives()
    assert communicator.all_gatherv is before
    monkeypatch.setenv(ENV, "/dev/null")
    add_collectives()
    assert communicator.all_gatherv is collect_rows
    assert communicator.reduce_scatterv is add_rows
