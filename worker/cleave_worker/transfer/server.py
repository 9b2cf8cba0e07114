"""The producer side of KV transfers: a server through which consumers pull leased blocks.

One thread accepts connections and one serves each connection; the engine never waits for any of
them. `BlockLeases` manages the leases of prefills. Those of cached prefixes are the scheduler's
(`PrefixServer`), whose signature shows a rank which blocks it may send. `RefusalReason` lists the
reasons of refusals.
"""

import hmac
import logging
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from cleave_worker.transfer import authentication, protocol
from cleave_worker.transfer.block_leases import BlockLeases, BlockRequest, ConsumerRank
from cleave_worker.transfer.copy_stream import select_copy_stream, select_device
from cleave_worker.transfer.handoff import KvLayout, RefusalReason, RefusedError, refuse_on
from cleave_worker.transfer.listener import Listener
from cleave_worker.transfer.memory import LayerRegion, Memory, list_ranges
from cleave_worker.transfer.progress import KvChunk
from cleave_worker.transfer.rank_barrier import RankBarrier
from cleave_worker.transfer.sharding import ShardPart, ShardSpec, slice_layers
from cleave_worker.transfer.transport import LinkError, Transport
from cleave_worker.transfer.transports import cuda_ipc, nixl, nixl_agent, two_sided
from cleave_worker.transfer.transports.shared_memory import SharedRegion

_log = logging.getLogger(__name__)
_MESSAGE_TIMEOUT_S = 10.0
_IDLE_TIMEOUT_S = 120.0
"""Idle connections are closed; consumers reconnect when they need to."""
_PREFILL_WAIT_S = 10.0
"""From a handoff in a response to the engine's next step, which leases its blocks."""


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
    key: str = field(default="", repr=False)
    """What consumers must prove to have, from `Handoff.key`; empty: all are accepted."""

    def select_layers(self, part: ShardPart | None) -> tuple[LayerRegion, ...]:
        """Return where a part of the model's KV lies. Raises RefusedError when it is not here."""
        if part is None:
            return ()
        with refuse_on(ValueError, RefusalReason.LAYOUT):
            return slice_layers(self.layers, self.shard, part, self.layout.num_kv_heads)


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
        self.kv = kv
        self.leases = leases
        self.rank_barrier = RankBarrier(leases)
        self.shared = tuple(shared)
        name = nixl.make_agent_name(kv.boot_id, kv.shard.rank)
        has_nixl = nixl_agent.is_installed()
        self.nixl_regions = nixl.RegisteredRegions(name, kv.memory) if has_nixl else None
        calls = cuda_ipc.find_calls(kv.memory.device)
        # Who opens a handle can write KV, so without a key nobody gets one.
        self.export = cuda_ipc.MemoryExport(kv.memory, calls) if calls and kv.key else None
        self.transfer_s = transfer_s
        self._listener = Listener(kv.host, port, self._serve)
        self.port = self._listener.port
        self._ranks: Future[protocol.RanksResponse] = Future()
        self.prefix_secret = ""
        """Of this boot: signs the blocks that its scheduler leases; empty: none yet."""
        if kv.shard.shape.num_ranks == 1:
            self.set_rank_addresses(((kv.host, self.port),))
        self._listener.start()

    def set_rank_addresses(self, addresses: tuple[tuple[str, int], ...]) -> None:
        """Set the (host, port) of each rank of this engine, for consumers that know only rank 0."""
        if not self._ranks.done():
            self._ranks.set_result(protocol.RanksResponse(self.kv.shard.shape, addresses))

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._listener.close()

    def _serve(self, connection: protocol.FramedConnection) -> None:
        session = _ServerSession(self, connection)
        try:
            if self.kv.key:
                authentication.authenticate_consumer(connection, self.kv.key)
            select_device(self.kv.memory.device)
            first = connection.receive(_MESSAGE_TIMEOUT_S)
            if isinstance(first, protocol.RanksRequest):
                session.send(self._resolve_ranks(first))
                return
            session.accept_handshake(first)
            self._listener.mark_known(connection)
            while True:
                session.handle(connection.receive(_IDLE_TIMEOUT_S))
        except RefusedError as refused:
            # After a refused handshake the connection is closed.
            _log.info("refused a KV consumer: %s", refused)
        except (protocol.ProtocolError, TimeoutError):
            pass  # The consumer closed the connection, or was idle.
        finally:
            session.close()

    def _resolve_ranks(self, request: protocol.RanksRequest) -> protocol.Message:
        if request.boot_id != self.kv.boot_id:
            return protocol.ErrorResponse(RefusalReason.BOOT, f"this is boot {self.kv.boot_id}")
        try:
            # The addresses come with the engine's first step.
            return self._ranks.result(_PREFILL_WAIT_S)
        except TimeoutError:
            fault = "the engine has not run a step since it started"
            return protocol.ErrorResponse(RefusalReason.NOT_HELD, fault)


class _ServerSession:
    """The connection with one consumer rank."""

    def __init__(self, server: KvServer, connection: protocol.FramedConnection) -> None:
        self._server = server
        self._kv = server.kv
        self._connection = connection
        self._link: two_sided.TwoSidedLink | None = None
        self._active_read: tuple[str, int] | None = None
        self._layers: tuple[LayerRegion, ...] = ()
        self._first_layer = 0
        self._consumer = ConsumerRank("", 0, 1)

    def send(self, message: protocol.Message) -> None:
        """Send a message. Raises ProtocolError."""
        self._connection.send(message, _MESSAGE_TIMEOUT_S)

    def accept_handshake(self, request: protocol.Message) -> None:
        """Compare boot id and layout. Raises RefusedError after sending it to the consumer."""
        if not isinstance(request, protocol.HandshakeRequest):
            raise protocol.ProtocolError("no handshake")
        try:
            self._select_layers(request)
        except RefusedError as refused:
            self._send_error(refused)
            raise
        self._consumer = ConsumerRank(
            request.consumer_boot_id, request.consumer_rank, request.source.num_consumers
        )
        server = self._server
        response = protocol.HandshakeResponse(
            self._layers,
            server.shared,
            self._first_layer,
            supports_nixl=server.nixl_regions is not None,
            place=cuda_ipc.find_place() if server.export else "",
        )
        self.send(response)

    def handle(self, message: protocol.Message) -> None:
        """Handle one message. Raises ProtocolError when it is invalid at this point."""
        try:
            self._handle(message)
        except RefusedError as refused:
            self._send_error(refused)

    def _handle(self, message: protocol.Message) -> None:
        match message:
            case protocol.PullRequest() if message.blocks:
                self._pull_prefix(message)
            case protocol.PullRequest() if message.num_layers:
                self._pull_chunk(message)
            case protocol.PullRequest():
                self._pull(message)
            case protocol.ProgressRequest():
                self._send_progress(message)
            case protocol.ReleaseBlocks():
                self._active_read = None
                barrier = self._server.rank_barrier
                leased = barrier.release(self._consumer, message.request_id, message.epoch)
                self.send(protocol.ReleaseBlocksResponse(leased))
            case protocol.LeaseHeartbeat():
                self._server.leases.extend(message.request_ids)
            case protocol.RendezvousRequest(Transport.NIXL):
                regions = self._server.nixl_regions
                metadata = regions.get_metadata() if regions else None
                self.send(protocol.RendezvousResponse(nixl_metadata=metadata))
            case protocol.RendezvousRequest(Transport.CUDA_IPC):
                export = self._server.export
                self.send(protocol.RendezvousResponse(exported=export.get() if export else None))
            case protocol.RendezvousRequest():
                self._open_two_sided_link(message.transport)
            case protocol.StoreEntry():
                pass  # Of a link that this end has given up.
            case _:
                raise protocol.ProtocolError(f"unexpected {type(message).__name__}")

    def close(self) -> None:
        """Close the link and free the blocks of an unfinished read."""
        self._close_link()
        if self._active_read:
            self._server.rank_barrier.abandon(*self._active_read)

    def _close_link(self) -> None:
        link, self._link = self._link, None
        if link:
            link.close()

    def _pull(self, pull: protocol.PullRequest) -> None:
        identity = (pull.request_id, pull.epoch, pull.prompt_digest)
        request = BlockRequest(*identity, pull.first_block, pull.num_blocks)
        blocks = self._server.rank_barrier.acquire(self._consumer, request, _PREFILL_WAIT_S)
        self._active_read = (pull.request_id, pull.epoch)
        self._send_pull_response(pull, blocks, self._layers)

    def _pull_prefix(self, pull: protocol.PullRequest) -> None:
        """The scheduler holds the lease; the consumer asks it whether the lease lasted."""
        secret = self._server.prefix_secret
        expected = authentication.compute_blocks_mac(secret, pull.blocks)
        if not secret or not hmac.compare_digest(pull.blocks_mac, expected):
            fault = "this engine's scheduler has not leased these blocks"
            raise RefusedError(RefusalReason.NOT_HELD, fault)
        blocks = pull.blocks[pull.first_block : pull.first_block + pull.num_blocks]
        self._send_pull_response(pull, blocks, self._layers)

    def _pull_chunk(self, pull: protocol.PullRequest) -> None:
        """The consumer releases this prefill on another connection, see `_send_progress`."""
        first_layer = self._first_layer + pull.first_layer
        chunk = KvChunk(pull.first_block, pull.num_blocks, first_layer, pull.num_layers)
        blocks = self._server.leases.get_chunk_blocks(
            self._consumer, pull.request_id, pull.epoch, pull.prompt_digest, chunk
        )
        layers = self._layers[pull.first_layer : pull.first_layer + pull.num_layers]
        self._send_pull_response(pull, blocks, layers)

    def _send_progress(self, request: protocol.ProgressRequest) -> None:
        update = self._server.leases.wait_for_progress(
            self._consumer,
            request.name,
            request.prompt_digest,
            request.previous,
            _PREFILL_WAIT_S,
            is_repeat=self._active_read is not None,
        )
        self._active_read = (update.request_id, update.epoch)
        self.send(update)

    def _send_pull_response(
        self, pull: protocol.PullRequest, blocks: Sequence[int], layers: Sequence[LayerRegion]
    ) -> None:
        crcs: tuple[int, ...] = ()
        if pull.checksums:
            select_copy_stream(self._kv.memory.device)
            crcs = compute_checksums(self._kv.memory, layers, blocks)
        self.send(protocol.PullResponse(tuple(blocks), crcs))
        if not pull.send:
            return
        if self._link is None:
            raise protocol.ProtocolError("no link to send over")
        try:
            self._link.send(list_ranges(layers, blocks), self._server.transfer_s)
        except LinkError as error:
            raise protocol.ProtocolError(str(error)) from error

    def _open_two_sided_link(self, transport: Transport) -> None:
        """Replace the link. Without one the connection stays, for the consumer's next transport."""
        self._close_link()
        select_copy_stream(self._kv.memory.device)
        nonce = authentication.make_nonce()
        self.send(protocol.RendezvousResponse(nonce))
        rendezvous = two_sided.Rendezvous(self._connection, nonce, self._kv.key, _MESSAGE_TIMEOUT_S)
        try:
            self._link = rendezvous.create_producer_link(self._kv.memory, transport, self._kv.host)
        except LinkError as error:
            _log.info("no link over %s: %s", transport, error)

    def _send_error(self, refused: RefusedError) -> None:
        self.send(protocol.ErrorResponse(refused.reason, str(refused)))

    def _select_layers(self, request: protocol.HandshakeRequest) -> None:
        """Select the layers that the consumer needs. Raises RefusedError."""
        kv, shard, source = self._kv, self._kv.shard, request.source
        if request.boot_id != kv.boot_id:
            raise RefusedError(RefusalReason.BOOT, f"this is boot {kv.boot_id}")
        if difference := request.layout.find_difference(kv.layout):
            raise RefusedError(RefusalReason.LAYOUT, difference)
        if (request.shape, source.rank) != (shard.shape, shard.rank):
            raise RefusedError(RefusalReason.LAYOUT, f"this is rank {shard.rank} of {shard.shape}")
        self._layers = kv.select_layers(source.part)
        if source.part:
            self._first_layer = shard.count_layers_before(source.part.first_layer, len(kv.layers))


def compute_checksums(
    memory: Memory, layers: Sequence[LayerRegion], blocks: Sequence[int]
) -> tuple[int, ...]:
    """Return one CRC-32 per block over its bytes in all layers."""
    checksums = []
    for block in blocks:
        value = 0
        for layer in layers:
            value = zlib.crc32(memory.copy_to_host(layer.get_range(block)), value)
        checksums.append(value)
    return tuple(checksums)
