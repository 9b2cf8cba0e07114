"""The producer side of KV transfers: a server through which consumers pull leased blocks.

One thread accepts connections and one serves each connection; the engine never waits for any of
them. `Holds` decides about leases, `Reason` lists what is refused and why.
"""

import logging
import socket
import threading
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from cleave_worker.transfer import protocol
from cleave_worker.transfer.block_leases import Holds, Visitor
from cleave_worker.transfer.handoff import Layout, Reason, RefusedError
from cleave_worker.transfer.memory import Memory, Plane, spans_of
from cleave_worker.transfer.progress import Piece
from cleave_worker.transfer.rank_barrier import Ask, Turns
from cleave_worker.transfer.sharding import Share, count_before, cut
from cleave_worker.transfer.transport import LinkError, TwoSided, Way
from cleave_worker.transfer.transports import nixl, nixl_agent, torch_distributed
from cleave_worker.transfer.transports.shared_memory import SharedRegion

_log = logging.getLogger(__name__)
_ANSWER_S = 10.0
_IDLE_S = 120.0
"""Consumers reconnect when they need to."""
_APPEAR_S = 10.0
"""From a handoff in a response to the engine's next step, which leases its blocks."""
_MAX_READERS = 256
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Kept:
    """The KV cache of one rank, registered for transfers."""

    boot_id: str
    layout: Layout
    memory: Memory
    planes: tuple[Plane, ...]
    host: str
    """Address of this rank that peers can reach."""
    share: Share = field(default_factory=Share)
    """The part of the model's KV that this rank has."""


class Owner:
    """Serves the KV of one rank until it is closed."""

    def __init__(
        self,
        kv: Kept,
        leases: Holds,
        shared: Sequence[SharedRegion],
        port: int,
        transfer_s: float,
    ) -> None:
        """Listen on `port`, or on a free port if it is 0. Raises OSError when the port is taken."""
        self._kept = kv
        self._holds = leases
        self._turns = Turns(leases)
        self._shared = tuple(shared)
        name = nixl.agent_name(kv.boot_id, kv.share.rank)
        self._served = nixl.Served(name, kv.memory) if nixl_agent.installed() else None
        self._transfer_s = transfer_s
        self._listening = socket.create_server((kv.host, port), backlog=128)
        self.port: int = self._listening.getsockname()[1]
        self._located: Future[protocol.Located] = Future()
        if kv.share.shape.num_ranks == 1:
            self.locate(((kv.host, self.port),))
        self._wires: set[protocol.Wire] = set()
        self._closed = False
        threading.Thread(target=self._accept, name="kv-server", daemon=True).start()

    def locate(self, addresses: tuple[tuple[str, int], ...]) -> None:
        """Set the (host, port) of each rank of this engine, for consumers that know only rank 0."""
        if not self._located.done():
            self._located.set_result(protocol.Located(self._kept.share.shape, addresses))

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._closed = True
        try:
            self._listening.shutdown(socket.SHUT_RDWR)
        finally:
            self._listening.close()
        for connection in list(self._wires):
            connection.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connected, _ = self._listening.accept()
            except OSError as error:
                if not self._closed:
                    # For instance out of file descriptors: wait until connections close.
                    _log.warning("cannot accept a KV consumer: %s", error)
                    time.sleep(_PAUSE_S)
                continue
            if len(self._wires) >= _MAX_READERS:
                connected.close()
                continue
            connection = protocol.Wire(connected)
            self._wires.add(connection)
            threading.Thread(
                target=self._serve, args=(connection,), name="kv-serve", daemon=True
            ).start()

    def _serve(self, connection: protocol.Wire) -> None:
        session = _Session(
            self._kept, self._served, self._holds, self._turns, connection, self._transfer_s
        )
        try:
            first = connection.receive(_ANSWER_S)
            if isinstance(first, protocol.Locate):
                connection.send(self._tell(first), _ANSWER_S)
                return
            session.greet(first, self._shared)
            while True:
                session.answer(connection.receive(_IDLE_S))
        except RefusedError as refused:
            # After a refused handshake the connection is closed.
            _log.info("refused a KV consumer: %s", refused)
        except (protocol.WireError, TimeoutError):
            pass  # The consumer closed the connection, or was idle.
        finally:
            session.close()
            connection.close()
            self._wires.discard(connection)

    def _tell(self, request: protocol.Locate) -> protocol.Located | protocol.Refusal:
        if request.boot_id != self._kept.boot_id:
            return protocol.Refusal(Reason.BOOT, f"this is boot {self._kept.boot_id}")
        try:
            # The addresses come with the engine's first step.
            return self._located.result(_APPEAR_S)
        except TimeoutError:
            return protocol.Refusal(
                Reason.NOT_HELD, "the engine has not run a step since it started"
            )


class _Session:
    """The connection with one consumer rank."""

    def __init__(
        self,
        kv: Kept,
        nixl_regions: nixl.Served | None,
        leases: Holds,
        rank_barrier: Turns,
        connection: protocol.Wire,
        transfer_s: float,
    ) -> None:
        self._kept = kv
        self._served = nixl_regions
        self._holds = leases
        self._turns = rank_barrier
        self._wire = connection
        self._transfer_s = transfer_s
        self._link: TwoSided | None = None
        self._read: tuple[str, int] | None = None
        self._planes: tuple[Plane, ...] = ()
        self._first_plane = 0
        self._visitor = Visitor("", 0, 1)

    def greet(self, request: protocol.Message, shared: tuple[SharedRegion, ...]) -> None:
        """Compare boot id and layout. Raises RefusedError after the error was sent to the
        consumer."""
        if not isinstance(request, protocol.Hello):
            raise protocol.WireError("no handshake")
        try:
            self._planes, self._first_plane = _asked(self._kept, request)
        except RefusedError as refused:
            self._refuse(refused)
            raise
        self._visitor = Visitor(request.reader, request.rank, request.source.num_readers)
        has_nixl = self._served is not None
        response = protocol.Welcome(self._planes, shared, self._first_plane, has_nixl)
        self._wire.send(response, _ANSWER_S)

    def answer(self, message: protocol.Message) -> None:
        """Handle one message. Raises WireError when it is invalid at this point."""
        match message:
            case protocol.Pull() if message.num_planes:
                self._pull_piece(message)
            case protocol.Pull():
                self._pull(message)
            case protocol.Follow():
                self._follow(message)
            case protocol.Release():
                self._read = None
                leased = self._turns.release(self._visitor, message.request_id, message.epoch)
                self._wire.send(protocol.Released(leased), _ANSWER_S)
            case protocol.Beat():
                self._holds.extend(message.request_ids)
            case protocol.Meet(Way.NIXL):
                self._tell_reach()
            case protocol.Meet():
                self._meet(message.way)
            case _:
                raise protocol.WireError(f"unexpected {type(message).__name__}")

    def close(self) -> None:
        """Close the link and free the blocks of an unfinished read."""
        if self._link:
            self._link.close()
        if self._read:
            self._turns.abandon(*self._read)

    def _pull(self, pull: protocol.Pull) -> None:
        request = Ask(
            pull.request_id, pull.epoch, pull.prompt_digest, pull.first_block, pull.num_blocks
        )
        try:
            blocks = self._turns.take(self._visitor, request, _APPEAR_S)
        except RefusedError as refused:
            self._refuse(refused)
            return
        self._read = (pull.request_id, pull.epoch)
        self._give(pull, blocks, self._planes)

    def _pull_piece(self, pull: protocol.Pull) -> None:
        """The consumer announces and releases this prefill on another connection, see `_follow`."""
        first_layer = self._first_plane + pull.first_plane
        chunk = Piece(pull.first_block, pull.num_blocks, first_layer, pull.num_planes)
        try:
            blocks = self._holds.look(
                self._visitor, pull.request_id, pull.epoch, pull.prompt_digest, chunk
            )
        except RefusedError as refused:
            self._refuse(refused)
            return
        layers = self._planes[pull.first_plane : pull.first_plane + pull.num_planes]
        self._give(pull, blocks, layers)

    def _follow(self, request: protocol.Follow) -> None:
        is_repeat = self._read is not None
        try:
            update = self._holds.follow(
                self._visitor,
                request.name,
                request.prompt_digest,
                request.seen,
                _APPEAR_S,
                again=is_repeat,
            )
        except RefusedError as refused:
            self._refuse(refused)
            return
        self._read = (update.request_id, update.epoch)
        self._wire.send(protocol.News(*update), _ANSWER_S)

    def _give(self, pull: protocol.Pull, blocks: Sequence[int], layers: Sequence[Plane]) -> None:
        crcs = checksums(self._kept.memory, layers, blocks) if pull.checksums else ()
        self._wire.send(protocol.Grant(tuple(blocks), crcs), _ANSWER_S)
        if pull.send:
            self._send(blocks, layers)

    def _send(self, blocks: Sequence[int], layers: Sequence[Plane]) -> None:
        if self._link is None:
            raise protocol.WireError("no link to send over")
        try:
            self._link.send(spans_of(layers, blocks), self._transfer_s)
        except LinkError as error:
            raise protocol.WireError(str(error)) from error

    def _tell_reach(self) -> None:
        metadata = self._served.reach() if self._served else None
        self._wire.send(protocol.Met(reach=metadata), _ANSWER_S)

    def _meet(self, transport: Way) -> None:
        host = self._kept.host
        try:
            rendezvous = torch_distributed.Meeting(host, _ANSWER_S)
            self._wire.send(protocol.Met(rendezvous.port), _ANSWER_S)
            self._link = rendezvous.enter(self._kept.memory, transport, host, _ANSWER_S)
        except (LinkError, RuntimeError) as error:
            raise protocol.WireError(str(error)) from error

    def _refuse(self, refused: RefusedError) -> None:
        self._wire.send(protocol.Refusal(refused.reason, str(refused)), _ANSWER_S)


def _asked(kv: Kept, request: protocol.Hello) -> tuple[tuple[Plane, ...], int]:
    """Return (layers that a consumer needs, index of the first of them). Raises RefusedError."""
    shard, source = kv.share, request.source
    if request.boot_id != kv.boot_id:
        raise RefusedError(Reason.BOOT, f"this is boot {kv.boot_id}")
    if difference := request.layout.difference(kv.layout):
        raise RefusedError(Reason.LAYOUT, difference)
    if (request.shape, source.rank) != (shard.shape, shard.rank):
        raise RefusedError(Reason.LAYOUT, f"this is rank {shard.rank} of {shard.shape}")
    if source.part is None:
        return (), 0
    try:
        layers = cut(kv.planes, shard, source.part, kv.layout.num_kv_heads)
    except ValueError as error:
        raise RefusedError(Reason.LAYOUT, str(error)) from error
    return layers, count_before(len(kv.planes), shard, source.part)


def checksums(memory: Memory, layers: Sequence[Plane], blocks: Sequence[int]) -> tuple[int, ...]:
    """Return one CRC-32 per block over its bytes in all layers."""
    return tuple(_checksum(memory, layers, block) for block in blocks)


def _checksum(memory: Memory, layers: Sequence[Plane], block: int) -> int:
    value = 0
    for layer in layers:
        value = zlib.crc32(_host_bytes(memory.view(layer.span(block))), value)
    return value


def _host_bytes(view: torch.Tensor) -> memoryview:
    return memoryview(view.cpu().numpy())
