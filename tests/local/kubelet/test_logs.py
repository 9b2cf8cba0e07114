from datetime import UTC, datetime, timedelta
from pathlib import Path

from cleave.local.kubelet import logs


def test_a_log_that_grew_too_long_is_moved_aside_while_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "p.log"
    with log.open("a") as writer:
        writer.write("old\n")
        writer.flush()
        logs.rotate(log, max_bytes=100)
        assert log.read_text() == "old\n"
        logs.rotate(log, max_bytes=3)
        writer.write("new\n")
    assert log.read_text() == "new\n"
    assert (tmp_path / "p.log.1").read_text() == "old\n"


def test_the_tail_is_the_last_lines_that_say_something(tmp_path: Path) -> None:
    log = tmp_path / "p.log"
    assert logs.tail(log, 5) == []
    log.write_text("a\n\nb\n   \nc")
    assert logs.tail(log, 2) == ["b", "c"]


def test_the_tail_has_the_requested_length_and_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "p.log"
    lines = [f"{number} {'x' * 50}" for number in range(5000)]
    log.write_text("\n".join(lines) + "\n")
    for count in (0, 1, 2, 1500, 4999, 5000, 6000):
        assert logs.tail(log, count) == lines[max(0, 5000 - count) :]


def test_a_log_that_cannot_be_moved_aside_is_cut_all_the_same(tmp_path: Path) -> None:
    log = tmp_path / "p.log"
    log.write_text("old\n")
    (tmp_path / "p.log.1").symlink_to(tmp_path / "absent" / "file")
    logs.rotate(log, max_bytes=3)
    assert log.read_text() == ""


def test_lines_since_a_time_are_those_of_both_files(tmp_path: Path) -> None:
    now = datetime(2026, 11, 27, 12, tzinfo=UTC)
    log, rotated = tmp_path / "p.log", tmp_path / "p.log.1"
    assert logs.read_since(log, now, now) == []
    rotated.write_text(
        '{"time": "2026-11-27T10:00:00.000Z", "n": 1}\n{"time": "2026-11-27T11:30:00.000Z"}\n'
    )
    log.write_text("no time\n\nlast")
    recent = logs.read_since(log, now - timedelta(hours=1), now)
    assert recent == ['{"time": "2026-11-27T11:30:00.000Z"}', "no time", "last"]
