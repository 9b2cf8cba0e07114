"""The engine as a child process under a subreaper.

Used by the supervisor, one object per boot. The engine's output must neither block it nor grow
without bound, so it is copied to the agent's stderr as it comes, and only the lines that explain
why the engine ended are kept.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable
from pathlib import Path
from typing import Self

from cleave_worker.agent import subreaper
from cleave_worker.agent.engine_output import ExitReason, StartStage
from cleave_worker.agent.launch import Launch

_engine_log = logging.getLogger("engine")
_PREFIX = b"[engine] "
_CHUNK_BYTES = 65536
_BAR_BYTES = 1024
_REAP_SECONDS = 5.0
Sink = Callable[[bytes], object]


def choose_sink(log_format: str) -> Callable[[bytes], None]:
    """Return where an engine's lines go: to log records if logs are JSON, else to stderr."""
    return _write_to_log if log_format == "json" else _write_to_stderr


def _write_to_log(text: bytes) -> None:
    for line in text.splitlines():
        _engine_log.info("%s", line.removeprefix(_PREFIX).decode(errors="replace"))


def _write_to_stderr(text: bytes) -> None:
    # When stderr is closed the output is dropped, as an engine must not block on it.
    with contextlib.suppress(OSError):
        sys.stderr.buffer.write(text)
        sys.stderr.buffer.flush()


class EngineProcess:
    """A running engine."""

    def __init__(
        self, process: Process, stop_seconds: float, sink: Sink, exit_reason: ExitReason
    ) -> None:
        self._process = process
        self._stop_seconds = stop_seconds
        self._exit_reason = exit_reason
        self._start_stage = StartStage()
        self._output = asyncio.create_task(self._copy(sink))

    @classmethod
    async def start(
        cls,
        launch: Launch,
        *,
        cores: tuple[int, ...],
        scratch: Path,
        stop_grace: float,
        sink: Sink = _write_to_stderr,
    ) -> Self:
        """Start it in a separate session: Ctrl-C or a group kill reaches the agent only."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", subreaper.__file__,
            "--agent", str(os.getpid()),
            "--grace", str(stop_grace),
            "--cores", ",".join(map(str, cores)),
            "--scratch", str(scratch),
            "--",
            *launch.argv,
            env=launch.env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        return cls(process, stop_grace, sink, ExitReason(launch.env, launch.argv))

    @property
    def exit_reason(self) -> str:
        """Why it ended, from its own output; empty when there was none."""
        return self._exit_reason.describe()

    @property
    def fault(self) -> str:
        """The error in its output that probably ends it; empty: none was written recently."""
        return self._exit_reason.fault

    @property
    def start_stage(self) -> str:
        """What it does while it starts, such as `loads weights, 40 %`; empty: not known."""
        return self._start_stage.text

    async def wait(self) -> int:
        """Wait until it and all its descendants have ended; return its exit status."""
        status = await self._process.wait()
        # The subreaper does this, unless it was killed; then orphans become our children.
        await asyncio.to_thread(subreaper.kill_descendants, _REAP_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.shield(self._output)
        return status

    async def stop(self) -> None:
        """End it and all its descendants, with SIGTERM first."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._stop_seconds + _REAP_SECONDS):
                await self.wait()
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self.wait()
        finally:
            self._output.cancel()

    def kill(self) -> None:
        """Kill it and all its descendants; returns before they have ended."""
        self._signal(signal.SIGHUP)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _copy(self, sink: Sink) -> None:
        stream = self._process.stdout
        assert stream is not None
        partial = b""
        while chunk := await stream.read(_CHUNK_BYTES):
            *lines, partial = (partial + chunk).split(b"\n")
            if len(partial) > _CHUNK_BYTES:
                lines, partial = [*lines, partial], b""
            self._handle_lines(lines, sink)
            if partial:
                # A progress bar is one line for minutes.
                self._start_stage.feed(partial[-_BAR_BYTES:].decode(errors="replace"))
        if partial:
            self._handle_lines([partial], sink)

    def _handle_lines(self, lines: list[bytes], sink: Sink) -> None:
        if not lines:
            return
        sink(b"".join(_PREFIX + line + b"\n" for line in lines))
        for line in lines:
            text = line.decode(errors="replace")
            self._exit_reason.feed(text)
            self._start_stage.feed(text)
