"""The load page between an engine and its agent."""

import struct
import threading
from dataclasses import replace
from pathlib import Path

from cleave.shm.load_page import LoadPage, LoadSnapshot

LOAD = LoadSnapshot(
    num_running=3,
    num_waiting=2,
    pending_prompt_tokens=4096,
    kv_blocks_free=10,
    kv_blocks_total=100,
    num_preemptions=7,
    prefix_cache_queries=2_000,
    prefix_cache_hits=1_024,
    kv_cache_usage=0.9,
)


def test_a_reader_sees_what_the_writer_stored(tmp_path: Path) -> None:
    with LoadPage(tmp_path / "load") as writer, LoadPage(tmp_path / "load") as reader:
        writer.write(LOAD)
        seen = reader.read()
    assert seen.sampled_ns > 0
    assert replace(seen, sampled_ns=0) == LOAD


def test_another_process_adds_the_oldest_use(tmp_path: Path) -> None:
    path = tmp_path / "load"
    with LoadPage(path) as engine, LoadPage(path) as scheduler, LoadPage(path) as reader:
        scheduler.write_oldest_kv(5)
        engine.write(LOAD)
        assert (reader.read().oldest_kv_ns, reader.read().num_running) == (5, LOAD.num_running)
        scheduler.write_oldest_kv(0)
        assert reader.read().oldest_kv_ns == 0


def test_an_unwritten_page_reads_as_no_load(tmp_path: Path) -> None:
    with LoadPage(tmp_path / "load") as reader:
        assert reader.read() == LoadSnapshot()


def test_a_writer_that_died_half_way_is_not_believed_and_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "load"
    with LoadPage(path) as writer:
        writer.write(LOAD)
    page = bytearray(path.read_bytes())
    struct.pack_into("<Q", page, 0, 3)
    path.write_bytes(page)
    with LoadPage(path) as reader:
        assert reader.read() == LoadSnapshot()
        with LoadPage(path) as successor:
            successor.write(LOAD)
        assert reader.read().num_running == LOAD.num_running


def test_a_reader_never_sees_two_snapshots_mixed(tmp_path: Path) -> None:
    stop = threading.Event()

    def write_forever() -> None:
        with LoadPage(tmp_path / "load") as writer:
            figure = 0
            while not stop.is_set():
                figure += 1
                writer.write(LoadSnapshot(figure, figure, figure, figure, figure, figure, figure))

    thread = threading.Thread(target=write_forever)
    thread.start()
    try:
        with LoadPage(tmp_path / "load") as reader:
            for _ in range(5_000):
                seen = reader.read()
                assert len({seen.num_running, seen.kv_blocks_total, int(seen.kv_cache_usage)}) == 1
    finally:
        stop.set()
        thread.join(timeout=10)


def test_a_new_page_has_its_room_on_the_disk(tmp_path: Path) -> None:
    """A mapped file without it ends its writer with SIGBUS once the disk is full."""
    with LoadPage(tmp_path / "load"):
        stat = (tmp_path / "load").stat()
    assert stat.st_blocks * 512 >= stat.st_size > 0
