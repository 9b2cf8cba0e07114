"""How long callbacks block the event loop of a gateway: CPU time of each, and where it went.

CPU time, because tests and benchmarks share a machine that stalls for seconds. `MeasuredLoop` is
the production loop, uvloop: what it calls in Python is measured, which is everything but copying
to and from sockets and encryption. Collections of the garbage collector are part of the callback
in which they happen, and named.
"""

import asyncio
import contextlib
import gc
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import uvloop

from cleave.gateway.app.client_connection import ClientConnection
from cleave.gateway.app.tls_connection import TlsConnection
from cleave.gateway.upstream.connection_pool import EngineConnection

LIMIT_S = 0.005
"""No callback may take longer."""
SAMPLE_S = 0.001
"""CPU time between two looks at the stack; the kernel rounds it up to a tick."""
MAX_KEPT = 1_000
_PROTOCOLS = ClientConnection, EngineConnection, TlsConnection
_METHODS = (
    "buffer_updated", "connection_made", "connection_lost", "data_received", "eof_received",
    "pause_writing", "resume_writing",
)  # fmt: skip


@dataclass(slots=True)
class Block:
    """One callback."""

    cpu_s: float
    callback: str
    gc_s: float = 0.0
    """Part of it that was garbage collection."""
    places: list[str] = field(default_factory=list)
    """Innermost functions of Cleave when the stack was looked at."""

    def __str__(self) -> str:
        where = ", ".join(dict.fromkeys(self.places)) or self.callback
        collected = f", {self.gc_s * 1e3:.1f} ms of it garbage collection" if self.gc_s else ""
        return f"{self.cpu_s * 1e3:.1f} ms in {where}{collected}"


class BlockRecorder:
    """The longest callback since `forget`, and all above the limit."""

    def __init__(self) -> None:
        self._gc_s = self._gc_began = 0.0
        self._places: list[str] = []
        self._is_inside = False
        self.forget()

    def forget(self) -> None:
        """Begin again."""
        self.worst = Block(0.0, "none")
        self.above: list[Block] = []
        self.worst_gc_s = 0.0

    def run(self, callback: Callable[..., Any], *args: Any) -> Any:
        """Call, and measure unless it is called by what is measured."""
        if self._is_inside:
            return callback(*args)
        self._is_inside, self._gc_s = True, 0.0
        self._places.clear()
        began = time.thread_time()
        try:
            return callback(*args)
        finally:
            cpu_s = time.thread_time() - began
            self._is_inside = False
            if cpu_s > self.worst.cpu_s or cpu_s > LIMIT_S:
                self._record(cpu_s, callback)

    def _record(self, cpu_s: float, callback: Callable[..., Any]) -> None:
        block = Block(cpu_s, repr(callback)[:120], self._gc_s, list(self._places))
        if cpu_s > self.worst.cpu_s:
            self.worst = block
        if cpu_s > LIMIT_S and len(self.above) < MAX_KEPT:
            self.above.append(block)

    def on_gc(self, phase: str, _: dict[str, int]) -> None:
        """Called by the garbage collector."""
        if phase == "start":
            self._gc_began = time.thread_time()
        else:
            took_s = time.thread_time() - self._gc_began
            self._gc_s += took_s
            self.worst_gc_s = max(self.worst_gc_s, took_s)

    def on_sample(self, _: int, frame: FrameType | None) -> None:
        """Called by the timer's signal."""
        while frame is not None and "/cleave/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None and self._is_inside:
            file = frame.f_code.co_filename.rpartition("/")[2]
            self._places.append(f"{frame.f_code.co_qualname} ({file}:{frame.f_lineno})")


class MeasuredLoop(uvloop.Loop):
    """Every callback goes through a recorder."""

    def __init__(self, recorder: BlockRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def call_soon(self, callback, *args, context=None):
        return super().call_soon(self._recorder.run, callback, *args, context=context)

    def call_soon_threadsafe(self, callback, *args, context=None):
        return super().call_soon_threadsafe(self._recorder.run, callback, *args, context=context)

    def call_later(self, delay, callback, *args, context=None):
        return super().call_later(delay, self._recorder.run, callback, *args, context=context)

    def call_at(self, when, callback, *args, context=None):
        return super().call_at(when, self._recorder.run, callback, *args, context=context)

    def add_reader(self, fd, callback, *args):
        return super().add_reader(fd, self._recorder.run, callback, *args)


@contextlib.contextmanager
def recorded_blocks() -> Iterator[BlockRecorder]:
    """A recorder of each callback of the event loops that are made with it."""
    recorder = BlockRecorder()
    gc.callbacks.append(recorder.on_gc)
    previous = signal.signal(signal.SIGPROF, recorder.on_sample)
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)
    try:
        with measured_protocols(recorder):
            yield recorder
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, previous)
        gc.callbacks.remove(recorder.on_gc)


@contextlib.contextmanager
def measured_blocks() -> Iterator[tuple[BlockRecorder, asyncio.Runner]]:
    """A recorder, and a runner whose event loop it measures."""
    with (
        recorded_blocks() as recorder,
        asyncio.Runner(loop_factory=lambda: MeasuredLoop(recorder)) as runner,
    ):
        yield recorder, runner


@contextlib.contextmanager
def measured_protocols(recorder: BlockRecorder) -> Iterator[None]:
    """uvloop calls protocols directly, not through handles."""
    with contextlib.ExitStack() as stack:
        for protocol in _PROTOCOLS:
            for name in _METHODS:
                if name in vars(protocol):
                    stack.callback(setattr, protocol, name, vars(protocol)[name])
                    setattr(protocol, name, measure(recorder, vars(protocol)[name]))
        yield


def measure(recorder: BlockRecorder, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, measured."""

    def run(*args: Any) -> Any:
        return recorder.run(method, *args)

    return run
