"""Log formats of all programs: lines of text for people, of JSON for log collectors.

Called once by the gateway, the operator and the agent at start. Log records may name requests,
models and instances as `extra={"fields": {...}}`; prompts, keys and bodies are never logged.
What is hard: writing to a full pipe blocks, which must not happen in an event loop. So log lines
for each request go through a bounded queue and a thread (`write_in_background`).
"""

import json
import logging
import os
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler
from queue import Full, Queue
from threading import Thread

FORMATS = ("text", "json")
ENV = "CLEAVE_LOG_FORMAT"
"""Environment variable with the default format; Cleave's container images set it."""
QUEUE_LINES = 8_192
STOP_TIMEOUT_S = 1.0

Fields = Mapping[str, object]


class JsonFormatter(logging.Formatter):
    """One JSON object per line, for log collectors."""

    def __init__(self, always: Fields | None = None) -> None:
        """`always`: fields of every line."""
        super().__init__()
        self._always = dict(always or {})

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, including its traceback if it has one."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._always,
            **_get_fields(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextFormatter(logging.Formatter):
    """Lines of text for people: `TIME LEVEL LOGGER: MESSAGE key=value ...`."""

    def __init__(self, pattern: str = "%(asctime)s %(levelname)s %(name)s: %(message)s") -> None:
        super().__init__(pattern)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own
        """The line without a traceback."""
        fields = (f" {name}={value}" for name, value in _get_fields(record).items())
        return super().formatMessage(record) + "".join(fields)


def add_option(
    parser: ArgumentParser, default: str = "text", env: Mapping[str, str] = os.environ
) -> None:
    """Add `--log-format`, which is the same in all programs."""
    chosen = env.get(ENV, default)
    text = f"format of the log's lines (default: ${ENV}, or {default})"
    parser.add_argument("--log-format", choices=FORMATS, default=chosen, help=text)


def configure(
    log_format: str,
    *,
    level: int | str = logging.INFO,
    text: logging.Formatter | None = None,
    always: Fields | None = None,
) -> None:
    """Log to stderr. `text`: formatter of the text format; `always`: fields of every JSON line."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(always) if log_format == "json" else text or TextFormatter())
    logging.basicConfig(level=level, handlers=[handler])


@contextmanager
def write_in_background(name: str, lines: int = QUEUE_LINES) -> Iterator[None]:
    """Inside the context, a thread writes the lines of logger `name` to the root's handlers."""
    aside, log = _BackgroundHandler(lines), logging.getLogger(name)
    log.addHandler(aside)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(aside)
        log.propagate = True
        aside.stop()


class _BackgroundHandler(QueueHandler):
    """Puts records into a queue that a thread empties; a full queue drops and counts records."""

    def __init__(self, lines: int) -> None:
        self._records: Queue[logging.LogRecord | None] = Queue(lines)
        super().__init__(self._records)
        self._num_lost = 0
        self._writer = Thread(target=self._write, name="log", daemon=True)
        self._writer.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a record without waiting."""
        try:
            self._records.put_nowait(record)
        except Full:
            self._num_lost += 1

    def stop(self) -> None:
        """Write the queued records, for at most `STOP_TIMEOUT_S`, and stop the thread."""
        with suppress(Full):
            self._records.put(None, timeout=STOP_TIMEOUT_S)
        self._writer.join(STOP_TIMEOUT_S)
        if self._num_lost:
            logging.getLogger(__name__).warning("%d lines were lost", self._num_lost)

    def _write(self) -> None:
        while (record := self._records.get()) is not None:
            for handler in logging.getLogger().handlers:
                handler.handle(record)


def _get_fields(record: logging.LogRecord) -> Fields:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, Mapping) else {}
