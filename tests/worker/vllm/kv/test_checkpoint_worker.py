"""Blocks go to checkpoints and come back, with real memory."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch comes with the engine")

from cleave_worker.transfer.checkpoints import CheckpointStore  # noqa: E402
from cleave_worker.transfer.memory import register_tensors  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    # vLLM and what it imports warn of their own future.
    pytest.mark.filterwarnings("ignore"),
]
BOUND_S = 60.0
KEYS = ("ab" * 32, "cd" * 32)
LAYERS, BLOCKS = 3, 6


def caches(start: int) -> list[Any]:
    return [
        (torch.arange(BLOCKS * 8, dtype=torch.float32) + start + 100 * layer).reshape(BLOCKS, 2, 4)
        for layer in range(LAYERS)
    ]


@pytest.fixture
def saver_of(checkpoint_folder: Path) -> Iterator[Callable[[list[Any]], Any]]:
    pytest.importorskip("vllm", reason="needs the group worker-cpu")
    from cleave_worker.vllm.kv.checkpoint_worker import CheckpointWorker

    workers: list[CheckpointWorker] = []

    def make(tensors: list[Any]) -> CheckpointWorker:
        memory, planes = register_tensors(tensors, BLOCKS)
        store = CheckpointStore(checkpoint_folder, 0, bytes(32), 1 << 20)
        workers.append(CheckpointWorker(memory, planes, store))
        return workers[-1]

    yield make
    for each in workers:
        each.close()


def orders(**options: Any) -> Any:
    from cleave_worker.vllm.kv.checkpoint_scheduler import CheckpointMetadata

    return CheckpointMetadata(**options)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def restored(saver: Any, *keys: str, block: int = 4) -> tuple[set[str], set[str]]:
    from cleave_worker.vllm.kv.checkpoint_scheduler import BlockRestore

    blocks = tuple(range(block, block + len(keys)))
    saver.start_step(orders(restore={"r": BlockRestore(keys, blocks)}))
    found: list[tuple[set[str], set[str]]] = []
    until(lambda: found.append(saver.take_restored()) or found[-1][0])
    return found[-1]


def test_what_one_engine_saved_another_has_in_other_blocks(
    saver_of, checkpoint_folder: Path
) -> None:
    theirs, ours = caches(1000), caches(0)
    writer, reader = saver_of(theirs), saver_of(ours)
    writer.start_step(orders(save={KEYS[0]: 1, KEYS[1]: 3}))
    theirs[0].zero_()  # The blocks are somebody else's with the step.
    until(lambda: len(list(checkpoint_folder.glob("*-0"))) == 2)
    assert restored(reader, *KEYS) == ({"r"}, set())
    for layer, expected in enumerate(caches(1000)):
        assert torch.equal(ours[layer][4], expected[1])
        assert torch.equal(ours[layer][5], expected[3])
        assert torch.equal(ours[layer][:4], caches(0)[layer][:4]), "nothing else is touched"


def test_what_is_gone_or_changed_is_refused_and_counted(saver_of, checkpoint_folder: Path) -> None:
    saver = saver_of(caches(0))
    assert restored(saver, KEYS[0]) == ({"r"}, {"r"})
    saver.start_step(orders(save={KEYS[0]: 1}))
    path = checkpoint_folder / f"{KEYS[0]}-0"
    until(path.exists)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert restored(saver, KEYS[0]) == ({"r"}, {"r"})
    assert saver.take_stats().data["ended"] == {"not_held": 1, "checksum": 1}


def test_what_ends_does_not_take_along_what_begins_alike(saver_of, checkpoint_folder: Path) -> None:
    saver = saver_of(caches(0))
    saver.start_step(orders(save={KEYS[0]: 1}))
    saver.start_step(orders(drop=[KEYS[0]], save={KEYS[0]: 1}))
    saver.start_step(orders(save={KEYS[1]: 1}))
    until((checkpoint_folder / f"{KEYS[1]}-0").exists)
    assert (checkpoint_folder / f"{KEYS[0]}-0").exists()


def test_an_unexpected_error_is_no_success(saver_of) -> None:
    saver = saver_of(caches(0))
    saver.start_step(orders(save={KEYS[0]: 1}))
    until(lambda: restored(saver, KEYS[0]) == ({"r"}, set()))
    assert restored(saver, KEYS[0], block=99) == ({"r"}, {"r"})
    assert saver.take_stats().data["ended"]["peer_lost"] == 1


def test_the_end_of_a_stream_removes_its_files_even_those_not_written_yet(
    saver_of, checkpoint_folder: Path
) -> None:
    saver = saver_of(caches(0))
    saver.start_step(orders(save={KEYS[0]: 1}))
    saver.start_step(orders(drop=[KEYS[0]], save={KEYS[1]: 1}))
    until((checkpoint_folder / f"{KEYS[1]}-0").exists)
    assert not (checkpoint_folder / f"{KEYS[0]}-0").exists()


def test_settings_have_defaults_and_faults_are_named() -> None:
    pytest.importorskip("vllm", reason="needs the group worker-cpu")
    from cleave_worker.vllm.kv.checkpoint_connector import read_settings

    folder, most = read_settings({})
    assert (folder, most) == (Path("/dev/shm/cleave-checkpoints"), 4 << 30)
    assert read_settings({"folder": "/x", "most_gib": 0.5}) == (Path("/x"), 1 << 29)
    for wrong in ([], "yes", {"size": 1}, {"folder": "x"}, {"most_gib": 0}, {"most_gib": "4"}):
        with pytest.raises(ValueError, match="checkpoints"):
            read_settings(wrong)


def test_models_that_give_blocks_of_running_requests_away_are_refused() -> None:
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    from cleave_worker.vllm.kv.checkpoint_connector import check_attention

    sizes = {"block_size": 4, "num_kv_heads": 1, "head_size": 4, "dtype": torch.float32}
    full = interface.FullAttentionSpec(**sizes)
    sliding = interface.SlidingWindowSpec(**sizes, sliding_window=8)
    check_attention(full)
    for wrong in (sliding, SimpleNamespace(kv_cache_specs={"0": full, "1": sliding})):
        with pytest.raises(ValueError, match=r"SlidingWindowSpec.*leave checkpoints out"):
            check_attention(wrong)
