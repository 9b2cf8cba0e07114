"""What vLLM's ranks on CPU lack: collective operations between real processes, own experts."""

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from cleave.shm.load_page import ENV
from cleave_worker.vllm.cpu_ranks import add_rows, collect_rows, complete_ranks

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
    dist.destroy_process_group()
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
def patched(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM's communicator and experts, restored afterwards."""
    communicators: ModuleType = pytest.importorskip(
        "vllm.distributed.device_communicators.cpu_communicator"
    )
    experts: ModuleType = pytest.importorskip(
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
    )
    classes = communicators.CpuCommunicator, experts.CPUUnquantizedExperts
    for owner, names in zip(classes, (("all_gatherv", "reduce_scatterv"), ("apply",)), strict=True):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    return SimpleNamespace(communicator=classes[0], experts=classes[1])


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_vllm_on_cpu_has_them_where_an_agent_started_it(
    patched: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV, raising=False)
    before = patched.communicator.all_gatherv
    complete_ranks()
    assert patched.communicator.all_gatherv is before
    monkeypatch.setenv(ENV, "/dev/null")
    complete_ranks()
    assert patched.communicator.all_gatherv is collect_rows
    assert patched.communicator.reduce_scatterv is add_rows


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_two_halves_of_the_experts_give_what_all_give(
    patched: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from vllm._custom_ops import cpu_prepack_moe_weight

    monkeypatch.setenv(ENV, "/dev/null")
    complete_ranks()
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(5, 64, generator=generator)
    up = torch.randn(4, 2 * 64, 64, generator=generator) / 8
    down = torch.randn(4, 64, 64, generator=generator) / 8
    ids = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0], [0, 2]], dtype=torch.int32)
    weights = torch.rand(5, 2, generator=generator)

    def compute(numbers: list[int], expert_map: torch.Tensor | None) -> torch.Tensor:
        output = torch.empty_like(rows)
        own = SimpleNamespace(_use_zentorch=False, w1_bias=None, w2_bias=None, isa="vec")
        packed = [cpu_prepack_moe_weight(each[numbers], "vec") for each in (up, down)]
        patched.experts.apply(
            own, output, rows, *packed, weights, ids, SimpleNamespace(value="silu"), 4, expert_map,
            *[None] * 5, apply_router_weight_on_input=False,
        )  # fmt: skip
        return output

    halves = compute([0, 1], torch.tensor([0, 1, -1, -1])) + compute(
        [2, 3], torch.tensor([-1, -1, 0, 1])
    )
    torch.testing.assert_close(halves, compute([0, 1, 2, 3], None))
