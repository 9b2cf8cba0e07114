"""Blocks of KV in files: nothing is read that is not what was written."""

import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleave_worker.transfer.checkpoints import CheckpointStore, open_folder
from cleave_worker.transfer.handoff import RefusalReason, RefusedError

KEY, OTHER = "ab" * 32, "cd" * 32
LAYOUT = bytes(32)
BODY = bytes(range(256)) * 4
ROOM = 1 << 20


@pytest.fixture
def folder(checkpoint_folder: Path) -> Path:
    return checkpoint_folder


def opened(
    folder: Path, rank: int = 0, layout: bytes = LAYOUT, most: int = ROOM
) -> CheckpointStore:
    return CheckpointStore(folder, rank, layout, most)


def reason(store: CheckpointStore, key: str = KEY, num_bytes: int = len(BODY)) -> RefusalReason:
    with pytest.raises(RefusedError) as refused:
        store.load(key, num_bytes)
    return refused.value.reason


def test_another_engine_reads_what_a_dead_one_wrote(folder: Path) -> None:
    assert opened(folder).save(KEY, BODY)
    assert opened(folder).contains(KEY)
    assert bytes(opened(folder).load(KEY, len(BODY))) == BODY


def test_each_rank_has_its_own(folder: Path) -> None:
    opened(folder, rank=0).save(KEY, BODY)
    assert not opened(folder, rank=1).contains(KEY)


def test_missing_checkpoints_are_not_held(folder: Path) -> None:
    assert reason(opened(folder)) is RefusalReason.NOT_HELD


def test_another_layout_other_tokens_and_another_size_are_refused(folder: Path) -> None:
    store = opened(folder)
    store.save(KEY, BODY)
    assert reason(opened(folder, layout=b"x" * 32)) is RefusalReason.LAYOUT
    assert reason(store, num_bytes=len(BODY) + 1) is RefusalReason.CHECKSUM
    (folder / f"{KEY}-0").rename(folder / f"{OTHER}-0")
    assert reason(store, OTHER) is RefusalReason.PROMPT


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_no_changed_or_missing_byte_goes_unnoticed(folder: Path, data: st.DataObject) -> None:
    store = opened(folder)
    store.save(KEY, BODY)
    path = folder / f"{KEY}-0"
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        whole[at] ^= data.draw(st.integers(1, 255))
    else:
        del whole[at:]
    path.write_bytes(whole)
    reason(store)
    store.drop([KEY])


def test_a_truncated_write_is_never_read_and_is_removed(folder: Path) -> None:
    store = opened(folder)
    part = folder / f"{KEY}-0.1.part"
    part.write_bytes(b"half")
    assert not store.contains(KEY)
    store.collect_garbage(60)
    assert part.exists()
    os.utime(part, (0, 0))
    store.collect_garbage(60)
    assert not part.exists()


def test_no_more_is_written_than_allowed_and_dropping_makes_room(folder: Path) -> None:
    store = opened(folder, most=2 * len(BODY))
    assert store.save(KEY, BODY)
    assert not store.save(OTHER, BODY)
    store.drop([KEY])
    assert store.num_bytes == 0
    assert store.save(OTHER, BODY)


def test_no_more_is_written_than_the_file_system_can_spare(folder: Path, monkeypatch) -> None:
    store = opened(folder)
    filesystem = os.statvfs(folder)
    full = type(filesystem)((*filesystem[:2], 1000, 200, 120, *filesystem[5:10]))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    assert store.save(KEY, b"") is (120 * filesystem.f_frsize > 125 * filesystem.f_frsize)


@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_block_stays_until_the_last_engine_that_uses_it_drops_it(folder: Path, last: int) -> None:
    engines = [opened(folder) for _ in range(3)]
    for each in engines:
        assert each.save(KEY, BODY)
    for each in engines[:last] + engines[last + 1 :]:
        each.drop([KEY, KEY])
        assert bytes(engines[last].load(KEY, len(BODY))) == BODY
    engines[last].drop([KEY])
    assert not list(folder.iterdir())


def test_two_that_write_at_once_use_one_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = opened(folder), opened(folder)
    monkeypatch.setattr(slow, "_has_room", lambda _: fast.save(KEY, BODY))
    assert slow.save(KEY, BODY)
    fast.drop([KEY])
    assert bytes(slow.load(KEY, len(BODY))) == BODY
    slow.drop([KEY])
    assert not list(folder.iterdir())


def test_dropping_what_one_does_not_use_takes_nothing_from_others(folder: Path) -> None:
    writer, other = opened(folder), opened(folder)
    writer.save(KEY, BODY)
    other.drop([KEY])
    assert writer.contains(KEY)


def test_files_of_others_are_limited_as_well(folder: Path) -> None:
    writer, small = opened(folder), opened(folder, most=len(BODY))
    writer.save(KEY, BODY)
    assert small.save(KEY, BODY), "it is there"
    assert small.num_bytes == 0
    writer.drop([KEY])
    assert not small.contains(KEY)


def test_unused_files_are_removed(folder: Path) -> None:
    living, dead = opened(folder), opened(folder)
    living.save(KEY, BODY)
    dead.save(OTHER, BODY)
    (folder / "letter.txt").write_text("of somebody")
    long_ago = time.time() - 1000
    for path in folder.iterdir():
        os.utime(path, (long_ago, long_ago))
    living.collect_garbage(500)
    assert living.contains(KEY)
    assert not living.contains(OTHER)
    assert (folder / "letter.txt").exists()


def test_what_a_dead_engine_left_stays_for_as_long_as_another_goes_on_with_it(folder: Path) -> None:
    dead, living = opened(folder), opened(folder)
    dead.save(KEY, BODY)
    living.save(KEY, BODY)
    os.utime(folder / f"{KEY}-0", (0, 0))
    living.collect_garbage(500)
    assert living.contains(KEY)
    living.drop([KEY])
    os.utime(folder / f"{KEY}-0", (0, 0))
    living.collect_garbage(500)
    assert not list(folder.iterdir())


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "open")
    for name in ("open", "file", "link"):
        with pytest.raises(ValueError, match=rf"checkpoints.folder .*{name}"):
            open_folder(tmp_path / name)
