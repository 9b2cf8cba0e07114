"""The producer side of KV transfers: a server through which consumers pull leased blocks.

One thread accepts connections and one serves each connection; the engine never waits for any of
them. `BlockLeases` manages leases; `RefusalReason` lists the reasons of refusals.
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
from cleave_worker.transfer.block_leases import BlockLeases, ConsumerRank
from cleave_worker.transfer.handoff import KvLayout, RefusalReason, RefusedError
from cleave_worker.transfer.memory import LayerRegion, Memory, list_ranges
from cleave_worker.transfer.progress import KvChunk
from cleave_worker.transfer.rank_barrier import BlockRequest, RankBarrier
from cleave_worker.transfer.sharding import ShardSpec, count_layers_before, slice_layers
from cleave_worker.transfer.transport import LinkError, Transport, TwoSidedLink
from cleave_worker.transfer.transports import nixl, nixl_agent, torch_distributed
from cleave_worker.transfer.transports.shared_memory import SharedRegion

_log = logging.getLogger(__name__)
_MESSAGE_TIMEOUT_S = 10.0
_IDLE_TIMEOUT_S = 120.0
"""Idle connections are closed; consumers reconnect when they need to."""
_PREFILL_WAIT_S = 10.0
"""From a handoff in a response to the engine's next step, which leases its blocks."""
_MAX_CONSUMERS = 256
_ACCEPT_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class RegisteredKv:
    """The KV cache of one rank, registered for transfers."""

    boot_id: str
    layout: KvLayout
    memory: Memory
    layers: tuple[LayerRegion, ...]
    host: str
    """Address of this rank that peers can reach."""
    shard: ShardSpec = field(default_factory=ShardSpec)
    """The part of the model's KV that this rank has."""


class KvServer:
    """Serves the KV of one rank until it is closed."""

    def __init__(
        self,
        kv: RegisteredKv,
        leases: BlockLeases,
        shared: Sequence[SharedRegion],
        port: int,
        transfer_s: float,
    ) -> None:
        """Listen on `port`, or on a free port if it is 0. Raises OSError when the port is taken."""
        self._kv = kv
        self._leases = leases
        self._rank_barrier = RankBarrier(leases)
        self._shared = tuple(shared)
        name = nixl.make_agent_name(kv.boot_id, kv.shard.rank)
        self._nixl_regions = (
            nixl.RegisteredRegions(name, kv.memory) if nixl_agent.is_installed() else None
        )
        self._transfer_s = transfer_s
        self._listener = socket.create_server((kv.host, port), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._ranks: Future[protocol.RanksResponse] = Future()
        if kv.shard.shape.num_ranks == 1:
            self.set_rank_addresses(((kv.host, self.port),))
        self._connections: set[protocol.FramedConnection] = set()
        self._closed = False
        threading.Thread(target=self._accept, name="kv-server", daemon=True).start()

    def set_rank_addresses(self, addresses: tuple[tuple[str, int], ...]) -> None:
        """Set the (host, port) of each rank of this engine, for consumers that know only rank 0."""
        if not self._ranks.done():
            self._ranks.set_result(protocol.RanksResponse(self._kv.shard.shape, addresses))

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._closed = True
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        finally:
            self._listener.close()
        for connection in list(self._connections):
            connection.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connected, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    # For instance out of file descriptors: wait until connections close.
                    _log.warning("cannot accept a KV consumer: %s", error)
                    time.sleep(_ACCEPT_RETRY_S)
                continue
            if len(self._connections) >= _MAX_CONSUMERS:
                connected.close()
                continue
            connection = protocol.FramedConnection(connected)
            self._connections.add(connection)
            threading.Thread(
                target=self._serve, args=(connection,), name="kv-serve", daemon=True
            ).start()

    def _serve(self, connection: protocol.FramedConnection) -> None:
        session = _ServerSession(
            self._kv,
            self._nixl_regions,
            self._leases,
            self._rank_barrier,
            connection,
            self._transfer_s,
        )
        try:
            first = connection.receive(_MESSAGE_TIMEOUT_S)
            if isinstance(first, protocol.RanksRequest):
                connection.send(self._resolve_ranks(first), _MESSAGE_TIMEOUT_S)
                return
            session.accept_handshake(first, self._shared)
            while True:
                session.handle(connection.receive(_IDLE_TIMEOUT_S))
        except RefusedError as refused:
            # After a refused handshake the connection is closed.
            _log.info("refused a KV consumer: %s", refused)
        except (protocol.ProtocolError, TimeoutError):
            pass  # The consumer closed the connection, or was idle.
        finally:
            session.close()
            connection.close()
            self._connections.discard(connection)

    def _resolve_ranks(
        self, request: protocol.RanksRequest
    ) -> protocol.RanksResponse | protocol.ErrorResponse:
        if request.boot_id != self._kv.boot_id:
            return protocol.ErrorResponse(RefusalReason.BOOT, f"this is boot {self._kv.boot_id}")
        try:
            # The addresses come with the engine's first step.
            return self._ranks.result(_PREFILL_WAIT_S)
        except TimeoutError:
            return protocol.ErrorResponse(
                RefusalReason.NOT_HELD, "the engine has not run a step since it started"
            )


class _ServerSession:
    """The connection with one consumer rank."""

    def __init__(
        self,
        kv: RegisteredKv,
        nixl_regions: nixl.RegisteredRegions | None,
        leases: BlockLeases,
        rank_barrier: RankBarrier,
        connection: protocol.FramedConnection,
        transfer_s: float,
    ) -> None:
        self._kv = kv
        self._nixl_regions = nixl_regions
        self._leases = leases
        self._rank_barrier = rank_barrier
        self._connection = connection
        self._transfer_s = transfer_s
        self._link: TwoSidedLink | None = None
        self._active_read: tuple[str, int] | None = None
        self._layers: tuple[LayerRegion, ...] = ()
        self._first_layer = 0
        self._consumer = ConsumerRank("", 0, 1)

    def accept_handshake(self, request: protocol.Message, shared: tuple[SharedRegion, ...]) -> None:
        """Compare boot id and layout. Raises RefusedError after the error was sent to the
        consumer."""
        if not isinstance(request, protocol.HandshakeRequest):
            raise protocol.ProtocolError("no handshake")
        try:
            self._layers, self._first_layer = _select_layers(self._kv, request)
        except RefusedError as refused:
            self._send_error(refused)
            raise
        self._consumer = ConsumerRank(
            request.consumer_boot_id, request.consumer_rank, request.source.num_consumers
        )
        has_nixl = self._nixl_regions is not None
        response = protocol.HandshakeResponse(self._layers, shared, self._first_layer, has_nixl)
        self._connection.send(response, _MESSAGE_TIMEOUT_S)

    def handle(self, message: protocol.Message) -> None:
        """Handle one message. Raises ProtocolError when it is invalid at this point."""
        match message:
            case protocol.PullRequest() if message.num_layers:
                self._pull_chunk(message)
            case protocol.PullRequest():
                self._pull(message)
            case protocol.ProgressRequest():
                self._send_progress(message)
            case protocol.ReleaseBlocks():
                self._active_read = None
                leased = self._rank_barrier.release(
                    self._consumer, message.request_id, message.epoch
                )
                self._connection.send(protocol.ReleaseBlocksResponse(leased), _MESSAGE_TIMEOUT_S)
            case protocol.LeaseHeartbeat():
                self._leases.extend(message.request_ids)
            case protocol.RendezvousRequest(Transport.NIXL):
                self._send_nixl_metadata()
            case protocol.RendezvousRequest():
                self._open_two_sided_link(message.transport)
            case _:
                raise protocol.ProtocolError(f"unexpected {type(message).__name__}")

    def close(self) -> None:
        """Close the link and free the blocks of an unfinished read."""
        if self._link:
            self._link.close()
        if self._active_read:
            self._rank_barrier.abandon(*self._active_read)

    def _pull(self, pull: protocol.PullRequest) -> None:
        request = BlockRequest(
            pull.request_id, pull.epoch, pull.prompt_digest, pull.first_block, pull.num_blocks
        )
        try:
            blocks = self._rank_barrier.acquire(self._consumer, request, _PREFILL_WAIT_S)
        except RefusedError as refused:
            self._send_error(refused)
            return
        self._active_read = (pull.request_id, pull.epoch)
        self._send_pull_response(pull, blocks, self._layers)

    def _pull_chunk(self, pull: protocol.PullRequest) -> None:
        """The consumer releases this prefill on another connection, see `_send_progress`."""
        first_layer = self._first_layer + pull.first_layer
        chunk = KvChunk(pull.first_block, pull.num_blocks, first_layer, pull.num_layers)
        try:
            blocks = self._leases.get_chunk_blocks(
                self._consumer, pull.request_id, pull.epoch, pull.prompt_digest, chunk
            )
        except RefusedError as refused:
            self._send_error(refused)
            return
        layers = self._layers[pull.first_layer : pull.first_layer + pull.num_layers]
        self._send_pull_response(pull, blocks, layers)

    def _send_progress(self, request: protocol.ProgressRequest) -> None:
        is_repeat = self._active_read is not None
        try:
            update = self._leases.wait_for_progress(
                self._consumer,
                request.name,
                request.prompt_digest,
                request.previous,
                _PREFILL_WAIT_S,
                is_repeat=is_repeat,
            )
        except RefusedError as refused:
            self._send_error(refused)
            return
        self._active_read = (update.request_id, update.epoch)
        self._connection.send(protocol.ProgressUpdate(*update), _MESSAGE_TIMEOUT_S)

    def _send_pull_response(
        self, pull: protocol.PullRequest, blocks: Sequence[int], layers: Sequence[LayerRegion]
    ) -> None:
        crcs = compute_checksums(self._kv.memory, layers, blocks) if pull.checksums else ()
        self._connection.send(protocol.PullResponse(tuple(blocks), crcs), _MESSAGE_TIMEOUT_S)
        if pull.send:
            self._send_blocks(blocks, layers)

    def _send_blocks(self, blocks: Sequence[int], layers: Sequence[LayerRegion]) -> None:
        if self._link is None:
            raise protocol.ProtocolError("no link to send over")
        try:
            self._link.send(list_ranges(layers, blocks), self._transfer_s)
        except LinkError as error:
            raise protocol.ProtocolError(str(error)) from error

    def _send_nixl_metadata(self) -> None:
        metadata = self._nixl_regions.get_metadata() if self._nixl_regions else None
        self._connection.send(
            protocol.RendezvousResponse(nixl_metadata=metadata), _MESSAGE_TIMEOUT_S
        )

    def _open_two_sided_link(self, transport: Transport) -> None:
        host = self._kv.host
        try:
            rendezvous = torch_distributed.Rendezvous(host, _MESSAGE_TIMEOUT_S)
            self._connection.send(protocol.RendezvousResponse(rendezvous.port), _MESSAGE_TIMEOUT_S)
            self._link = rendezvous.create_link(
                self._kv.memory, transport, host, _MESSAGE_TIMEOUT_S
            )
        except (LinkError, RuntimeError) as error:
            raise protocol.ProtocolError(str(error)) from error

    def _send_error(self, refused: RefusedError) -> None:
        self._connection.send(
            protocol.ErrorResponse(refused.reason, str(refused)), _MESSAGE_TIMEOUT_S
        )


def _select_layers(
    kv: RegisteredKv, request: protocol.HandshakeRequest
) -> tuple[tuple[LayerRegion, ...], int]:
    """Return (layers that a consumer needs, index of the first of them). Raises RefusedError."""
    shard, source = kv.shard, request.source
    if request.boot_id != kv.boot_id:
        raise RefusedError(RefusalReason.BOOT, f"this is boot {kv.boot_id}")
    if difference := request.layout.find_difference(kv.layout):
        raise RefusedError(RefusalReason.LAYOUT, difference)
    if (request.shape, source.rank) != (shard.shape, shard.rank):
        raise RefusedError(RefusalReason.LAYOUT, f"this is rank {shard.rank} of {shard.shape}")
    if source.part is None:
        return (), 0
    try:
        layers = slice_layers(kv.layers, shard, source.part, kv.layout.num_kv_heads)
    except ValueError as error:
        raise RefusedError(RefusalReason.LAYOUT, str(error)) from error
    return layers, count_layers_before(len(kv.layers), shard, source.part)


def compute_checksums(
    memory: Memory, layers: Sequence[LayerRegion], blocks: Sequence[int]
) -> tuple[int, ...]:
    """Return one CRC-32 per block over its bytes in all layers."""
    return tuple(_compute_checksum(memory, layers, block) for block in blocks)


def _compute_checksum(memory: Memory, layers: Sequence[LayerRegion], block: int) -> int:
    value = 0
    for layer in layers:
        value = zlib.crc32(_copy_to_host(memory.view(layer.get_range(block))), value)
    return value


def _copy_to_host(view: torch.Tensor) -> memoryview:
    return memoryview(view.cpu().numpy())
