"""The connection between the agent of a data-parallel rank and the launcher of all ranks.

`agent.cell` makes a pair of sockets for each rank and gives one of them to the rank's agent. Over
it go lines of JSON: reports of the agent, orders of the launcher (`gang`). A closed
connection means that the other side has ended.
"""

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Callable, Sequence

from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.gang.gang import Gang, GangOrder, Order, Report

_log = logging.getLogger(__name__)
_LINE_BYTES = 4096
"""Limit of a line; they have about 50 bytes."""


class GangLost(ConnectionError):  # noqa: N818
    """The launcher has ended, and with it the other ranks."""


class GangMember:
    """The agent's side."""

    def __init__(self, descriptor: int, on_drain: Callable[[], None]) -> None:
        """`descriptor`: of the socket; `on_drain`: called when the rank has to drain."""
        self._socket = socket.socket(fileno=descriptor)
        # Engines must not hold it open.
        self._socket.set_inheritable(False)
        self._on_drain = on_drain
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._start = 0
        self._rpc_port = 0
        self._is_stopped = self._has_ended = self._is_lost = False
        self._changed = asyncio.Event()

    async def open(self) -> None:
        """Begin to read orders."""
        reader, self._writer = await asyncio.open_unix_connection(
            sock=self._socket, limit=_LINE_BYTES
        )
        self._reading = asyncio.create_task(self._read(reader))

    def close(self) -> None:
        """Stop reading, and close the connection."""
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()

    async def wait_for_start(self) -> int:
        """Wait until the engines of all ranks may start; return the port of rank 0's vLLM for the
        other ranks. Bounded by the launcher's life. Raises GangLost."""
        before = self._start
        self._report(Report.READY)
        await self._wait_until(lambda: self._start > before)
        return self._rpc_port

    async def wait_for_stop(self) -> None:
        """Return when the engine of the present start has to stop. Raises GangLost."""
        await self._wait_until(lambda: self._is_stopped)

    def report_lost(self) -> None:
        """Report that the engine of the present start has ended, or has to."""
        self._report(Report.LOST)

    def report_drain(self) -> None:
        """Report that the rank drains: the others do so as well."""
        self._report(Report.DRAINS)

    async def finish_drain(self, seconds: float) -> None:
        """Report that the rank is drained, and wait until all are, at most `seconds`."""
        self._report(Report.DRAINED)
        with contextlib.suppress(TimeoutError, GangLost):
            async with asyncio.timeout(seconds):
                await self._wait_until(lambda: self._has_ended)

    def _report(self, report: Report) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(_encode({"report": report, "start": self._start}))

    async def _wait_until(self, is_met: Callable[[], bool]) -> None:
        while not is_met():
            if self._is_lost:
                raise GangLost("the launcher of the data-parallel ranks has ended")
            await self._changed.wait()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                message = json.loads(line)
                self._apply(GangOrder(Order(message["order"]), message["start"]), message)
        finally:
            self._is_lost = True
            self._notify()

    def _apply(self, order: GangOrder, message: dict[str, int]) -> None:
        match order.kind:
            case Order.START:
                self._start, self._rpc_port = order.start, message["rpc_port"]
                self._is_stopped = False
            case Order.STOP:
                self._is_stopped = order.start == self._start
            case Order.DRAIN:
                self._on_drain()
            case Order.END:
                self._has_ended = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def make_member(config: AgentConfig, on_drain: Callable[[], None]) -> GangMember | None:
    """Return the connection of an agent to the launcher of all ranks; None: there are no others."""
    return GangMember(config.gang_fd, on_drain) if config.gang_fd >= 0 else None


class GangServer:
    """The launcher's side: applies the reports of all ranks, and sends the orders."""

    def __init__(self, size: int, find_port: Callable[[], int]) -> None:
        """`find_port`: returns a free port, for each start another one."""
        self._gang = Gang(size)
        self._find_port = find_port
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Begin to hear the ranks, by number."""
        for rank, own in enumerate(sockets):
            reader, writer = await asyncio.open_unix_connection(sock=own, limit=_LINE_BYTES)
            self._writers.append(writer)
            self._tasks.append(asyncio.create_task(self._receive(rank, reader)))

    def close(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.close()

    async def _receive(self, rank: int, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                message = json.loads(line)
                order = self._gang.apply(rank, Report(message["report"]), message["start"])
                if order is not None:
                    _log.info("data-parallel ranks: %s %d, after rank %d", *_describe(order), rank)
                    self._send(order)

    def _send(self, order: GangOrder) -> None:
        message: dict[str, object] = {"order": order.kind, "start": order.start}
        if order.kind is Order.START:
            message["rpc_port"] = self._find_port()
        for writer in self._writers:
            if not writer.is_closing():
                writer.write(_encode(message))


def _describe(order: GangOrder) -> tuple[str, int]:
    return order.kind.value, order.start


def _encode(message: dict[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"
