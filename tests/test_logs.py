"""Lines of logs, and who waits for whom."""

import argparse
import json
import logging
import threading

import pytest

from cleave import logs


def make_record(message: str = "a\nb %s", **extra: object) -> logging.LogRecord:
    record = logging.LogRecord("cleave", logging.INFO, "f", 1, message, ("c",), None)
    vars(record).update(extra)
    return record


def test_a_line_of_json_is_one_object() -> None:
    line = logs.JsonFormatter().format(make_record())
    assert "\n" not in line
    said = json.loads(line)
    assert (said["message"], said["level"], said["logger"]) == ("a\nb c", "info", "cleave")


def test_fields_stand_beside_the_message_in_both_forms() -> None:
    record = make_record("took %s", fields={"request_id": "r1", "ttft_ms": 1.5})
    said = json.loads(logs.JsonFormatter({"instance": "p0"}).format(record))
    assert (said["request_id"], said["ttft_ms"], said["instance"]) == ("r1", 1.5, "p0")
    assert logs.TextFormatter("%(message)s").format(record) == "took c request_id=r1 ttft_ms=1.5"


def test_only_fields_that_were_meant_for_the_log_are_in_it() -> None:
    record = make_record(settings=object(), prompt="secret")
    assert set(json.loads(logs.JsonFormatter().format(record))) == {
        "time",
        "level",
        "logger",
        "message",
    }


def test_an_error_is_part_of_its_line() -> None:
    try:
        raise ValueError("wrong")
    except ValueError as error:
        record = make_record()
        record.exc_info = (ValueError, error, error.__traceback__)
    line = logs.JsonFormatter().format(record)
    assert "\n" not in line
    assert "ValueError: wrong" in json.loads(line)["error"]


@pytest.mark.parametrize(
    ("argv", "env", "chosen"),
    [
        ([], {}, "text"),
        ([], {logs.ENV: "json"}, "json"),
        (["--log-format", "text"], {logs.ENV: "json"}, "text"),
    ],
)
def test_the_option_comes_before_the_environment(argv, env, chosen) -> None:
    parser = argparse.ArgumentParser()
    logs.add_option(parser, env=env)
    assert parser.parse_args(argv).log_format == chosen


class Sink(logging.Handler):
    """Where the root's lines go; takes none before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.open.wait(10)
        self.messages.append(record.getMessage())


@pytest.fixture
def sink():
    root, sink = logging.getLogger(), Sink()
    root.addHandler(sink)
    yield sink
    sink.open.set()
    root.removeHandler(sink)


def test_lines_written_aside_come_in_order_and_before_the_end(sink) -> None:
    sink.open.set()
    log = logging.getLogger("cleave.test")
    log.setLevel(logging.INFO)
    with logs.write_in_background("cleave.test"):
        for number in range(100):
            log.info("%d", number)
    assert sink.messages == [str(number) for number in range(100)]
    log.info("after")
    assert sink.messages[-1] == "after"


def test_a_stopped_reader_delays_no_other(sink, monkeypatch) -> None:
    monkeypatch.setattr(logs, "STOP_TIMEOUT_S", 0.01)
    log = logging.getLogger("cleave.test")
    log.setLevel(logging.INFO)
    with logs.write_in_background("cleave.test", lines=4):
        for number in range(100):
            log.info("%d", number)
        # The last word of all is about what was lost, and waits for the reader, too.
        threading.Timer(0.1, sink.open.set).start()
    lost = int(sink.messages[-1].split()[0]) if "lost" in sink.messages[-1] else None
    assert lost is None or 94 <= lost <= 96
    assert len([m for m in sink.messages if m.isdigit()]) <= 6
