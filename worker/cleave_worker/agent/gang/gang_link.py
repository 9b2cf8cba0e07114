"""The connection between the agents of data-parallel ranks and the launcher that keeps them.

Each agent has one stream of the service `Gang` with the launcher of the instance's first pod
(`agent.cell`), which may be on another node: reports of the agent, orders of the launcher (`gang`).
A stream that has ended means that the other side has, or cannot be reached: gRPC's pings find that
out within 15 seconds. A rank whose stream has ended is lost, and an agent without one
ends; its container starts again, and joins again.
"""

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Callable

import grpc

from cleave.rpc.agent_discovery import AgentSourceUnreachable, find_agent
from cleave.rpc.channel import dial
from cleave.rpc.credentials import (
    METADATA_KEY,
    SCHEME,
    AgentEndpoint,
    Metadata,
    find_credentials,
)
from cleave.rpc.v1 import gang_pb2, gang_pb2_grpc
from cleave_worker.agent.authentication import AgentMethod, Authenticator
from cleave_worker.agent.config import AgentConfig
from cleave_worker.agent.gang.gang import Gang, GangOrder, Order, Report
from cleave_worker.agent.launch import MeetingPoint

_log = logging.getLogger(__name__)

_PINGS = (
    ("grpc.keepalive_time_ms", 5_000),
    # gRPC 1.85 waits a minute where only the first of both is set.
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # Nothing else is sent for hours; gRPC would send two pings only.
    ("grpc.http2.max_pings_without_data", 0),
)
_CLIENT_OPTIONS = (
    *_PINGS,
    # The launcher may start later, and its name may resolve later.
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)
SERVER_OPTIONS = (
    *_PINGS,
    # A server closes connections that ping more often than every five minutes.
    ("grpc.http2.max_ping_strikes", 0),
)
"""Options of the server with the service `Gang`."""

_SEARCH_S = 1.0
"""Between two searches for a launcher whose pod is not listed yet."""

_Context = grpc.aio.ServicerContext[gang_pb2.RankReport, gang_pb2.RankOrder]
_Orders = asyncio.Queue[gang_pb2.RankOrder | None]
"""What goes to one rank; None: its stream is over."""


class GangLost(ConnectionError):  # noqa: N818
    """The launcher has ended or is out of reach, and with it the other ranks."""


class StartRefused(RuntimeError):  # noqa: N818
    """The ranks would load different weights; the message says which."""


class GangMember:
    """The agent's side."""

    def __init__(self, config: AgentConfig, on_drain: Callable[[], None]) -> None:
        """`on_drain`: called when the rank has to drain."""
        self._config = config
        self._on_drain = on_drain
        self._reports: asyncio.Queue[gang_pb2.RankReport] = asyncio.Queue()
        self._following: asyncio.Task[None] | None = None
        self._start = 0
        self._meeting_point = MeetingPoint("", 0)
        self._is_connected = self._is_stopped = self._has_ended = False
        self._fault = self._refusal = ""
        self._changed = asyncio.Event()

    def open(self) -> None:
        """Begin to join, and to follow orders."""
        self._following = asyncio.create_task(self._receive_orders())

    def close(self) -> None:
        """Leave."""
        if self._following is not None:
            self._following.cancel()

    async def wait_for_start(self, weights: str) -> MeetingPoint:
        """Wait until the engines of all ranks may start; return where they meet. `weights`: what
        this one will load. Bounded by the launcher's life. Raises GangLost, StartRefused."""
        before, self._refusal = self._start, ""
        self._report(Report.READY, weights)
        await self._wait_until(lambda: self._start > before or bool(self._refusal))
        if self._refusal:
            raise StartRefused(self._refusal)
        return self._meeting_point

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
        """Report that the rank is drained, and wait until all are, at most `seconds`. One that has
        never joined has no engine that others need."""
        self._report(Report.DRAINED)
        if not self._is_connected:
            return
        with contextlib.suppress(TimeoutError, GangLost):
            async with asyncio.timeout(seconds):
                await self._wait_until(lambda: self._has_ended)

    def _report(self, report: Report, weights: str = "") -> None:
        rank, start = self._config.data_parallel_rank, self._start
        message = gang_pb2.RankReport(rank=rank, event=report.value, start=start, weights=weights)
        self._reports.put_nowait(message)

    async def _wait_until(self, is_met: Callable[[], bool]) -> None:
        while not is_met():
            if self._fault:
                raise GangLost(self._fault)
            await self._changed.wait()

    async def _receive_orders(self) -> None:
        launcher, seconds = self._config.gang, self._config.timing.start_timeout
        try:
            async with asyncio.timeout(seconds):
                found = await self._find_launcher()
            async with dial(found.address, _CLIENT_OPTIONS) as channel:
                async with asyncio.timeout(seconds):
                    await channel.channel_ready()
                self._is_connected = True
                stub = gang_pb2_grpc.GangStub(channel)
                metadata = await self._build_metadata(found)
                orders = stub.Join(self._list_reports(), metadata=metadata)
                async for order in orders:
                    self._apply(order)
            self._fault = "the launcher of the data-parallel ranks has ended"
        except ValueError as error:
            self._fault = f"the launcher of the data-parallel ranks is of another version: {error}"
        except TimeoutError:
            self._fault = (
                f"no launcher of the data-parallel ranks at {launcher} within {seconds:g} s"
            )
        except grpc.aio.AioRpcError as error:
            self._fault = f"the launcher of the data-parallel ranks is lost: {error.details()}"
        finally:
            self._notify()

    async def _list_reports(self) -> AsyncIterator[gang_pb2.RankReport]:
        while True:
            yield await self._reports.get()

    async def _find_launcher(self) -> AgentEndpoint:
        """Wait until it is known; the one that has started this agent always is."""
        config = self._config
        while not config.gang_key:
            with contextlib.suppress(AgentSourceUnreachable):
                return await find_agent(config.peers, config.gang)
            await asyncio.sleep(_SEARCH_S)
        return AgentEndpoint(config.gang)

    async def _build_metadata(self, launcher: AgentEndpoint) -> Metadata:
        key = self._config.gang_key
        if key:
            return ((METADATA_KEY, f"{SCHEME}{key}"),)
        return await find_credentials().build_metadata(launcher)

    def _apply(self, order: gang_pb2.RankOrder) -> None:
        match Order(order.command):
            case Order.START:
                self._start, self._is_stopped = order.start, False
                self._meeting_point = MeetingPoint(order.host, order.port)
            case Order.STOP:
                self._is_stopped = order.start == self._start
            case Order.DRAIN:
                self._on_drain()
            case Order.END:
                self._has_ended = True
            case Order.REFUSE:
                self._refusal = order.reason
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def make_member(config: AgentConfig, on_drain: Callable[[], None]) -> GangMember | None:
    """Return the connection of an agent to the launcher of all ranks; None: there are no others."""
    return GangMember(config, on_drain) if config.gang else None


class GangAuthenticator:
    """Accepts the launcher's own agents by the key that it has given them, which needs no API
    server, and those of the instance's other pods as its agents accept callers."""

    def __init__(self, key: str, others: Authenticator) -> None:
        self._key = key
        self._others = others

    async def verify(self, credential: str, method: AgentMethod) -> None:
        """Raises AuthenticationError, AccessDeniedError."""
        if not hmac.compare_digest(credential.encode(), self._key.encode()):
            await self._others.verify(credential, method)


class GangServer(gang_pb2_grpc.GangServicer):
    """The launcher's side: applies the reports of all ranks, and sends the orders."""

    def __init__(self, size: int, choose_meeting_point: Callable[[], MeetingPoint]) -> None:
        """`choose_meeting_point`: called for each start; returns another port each time."""
        self._gang = Gang(size)
        self._choose_meeting_point = choose_meeting_point
        self._orders: dict[int, _Orders] = {}

    async def Join(  # noqa: N802
        self, requests: AsyncIterator[gang_pb2.RankReport], context: _Context
    ) -> AsyncIterator[gang_pb2.RankOrder]:
        """Follow one rank until its agent, or a newer one of the rank, ends this."""
        reports = aiter(requests)
        first = await anext(reports, None)
        if first is None:
            return
        rank, size = first.rank, self._gang.size
        if rank >= size:
            fault = f"rank {rank} is not one of the instance's {size} data-parallel ranks"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault)
        orders = self._join(rank)
        receiving = asyncio.create_task(self._receive_reports(first, reports, orders))
        try:
            while (order := await orders.get()) is not None:
                yield order
        finally:
            receiving.cancel()
            if self._orders.get(rank) is orders:
                del self._orders[rank]
                self._remove(rank)

    def _join(self, rank: int) -> _Orders:
        if previous := self._orders.pop(rank, None):
            previous.put_nowait(None)
            self._remove(rank)
        orders = self._orders[rank] = asyncio.Queue()
        _log.info(
            "data-parallel rank %d has joined: %d of %d", rank, len(self._orders), self._gang.size
        )
        if order := self._gang.join():
            orders.put_nowait(self._build_message(order))
        return orders

    def _remove(self, rank: int) -> None:
        self._send(self._gang.remove(rank), f"rank {rank} has left")

    async def _receive_reports(
        self,
        first: gang_pb2.RankReport,
        reports: AsyncIterator[gang_pb2.RankReport],
        orders: _Orders,
    ) -> None:
        rank = first.rank
        try:
            self._apply(rank, first)
            async for report in reports:
                self._apply(rank, report)
        except ValueError as error:
            _log.warning("data-parallel rank %d is of another version: %s", rank, error)
        finally:
            orders.put_nowait(None)

    def _apply(self, rank: int, report: gang_pb2.RankReport) -> None:
        event = Report(report.event)
        order = self._gang.apply(rank, event, report.start, report.weights)
        self._send(order, f"rank {rank} reports {event.name.lower()}")

    def _send(self, order: GangOrder | None, reason: str) -> None:
        if order is None:
            return
        _log.info("data-parallel ranks: %s %d, as %s", order.kind.name.lower(), order.start, reason)
        message = self._build_message(order)
        for orders in self._orders.values():
            orders.put_nowait(message)

    def _build_message(self, order: GangOrder) -> gang_pb2.RankOrder:
        message = gang_pb2.RankOrder(
            command=order.kind.value, start=order.start, reason=order.reason
        )
        if order.kind is Order.START:
            point = self._choose_meeting_point()
            message.host, message.port = point.host, point.port
        return message
