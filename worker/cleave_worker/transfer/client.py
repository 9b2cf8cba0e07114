"""The consumer side of KV transfers: pulls leased blocks into blocks of this engine.

Called from worker threads: concurrently for different producers, serially for one producer rank.
When a pull returns, the local blocks contain exactly the KV that the handoff or the lease of a
prefix names. Otherwise it raises RefusedError with a reason, and the engine must not use the local
blocks.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress

import msgspec

from cleave_worker.transfer import protocol
from cleave_worker.transfer.authentication import connect_authenticated
from cleave_worker.transfer.handoff import Handoff, RefusalReason, RefusedError, refuse_on
from cleave_worker.transfer.memory import list_ranges, plan_copies
from cleave_worker.transfer.prefix_client import PrefixRead, check_lease
from cleave_worker.transfer.progress import KvChunk
from cleave_worker.transfer.rank_resolver import RankResolver, RemoteRank, find_remote_ranks
from cleave_worker.transfer.server import RegisteredKv, compute_checksums
from cleave_worker.transfer.transport import BandwidthMeter, LinkError, OneSidedLink, Transport
from cleave_worker.transfer.transports import cuda_ipc, nixl, two_sided
from cleave_worker.transfer.transports.nixl_buffers import StagingBuffers
from cleave_worker.transfer.transports.shared_memory import SharedMemoryLink

_log = logging.getLogger(__name__)
_CONNECT_TIMEOUT_S = 10.0
_HEARTBEAT_TIMEOUT_S = 2.0
"""For one producer; a dead one must not delay heartbeats to the others."""
_MAX_CONNECTIONS = 64
_BROKEN_CONNECTION_REASONS = (
    *(RefusalReason.PEER_LOST, RefusalReason.TIME_OUT),
    *(RefusalReason.LAYOUT, RefusalReason.MALFORMED),
)
"""After these the state of the producer is unknown; closing the connection frees its blocks."""
_ALL_LAYERS = slice(0, None)


class KvClient:
    """Pulls KV from any producer."""

    def __init__(
        self,
        kv: RegisteredKv,
        transports: Sequence[Transport],
        transfer_s: float,
        *,
        check_bytes: bool = False,
    ) -> None:
        """`transports`: in order of preference; the first that works with a producer is used."""
        self.kv = kv
        self.transports = tuple(transports)
        self.transfer_s = transfer_s
        self.check_bytes = check_bytes
        self._rank_resolver = RankResolver()
        self.staging_buffers = StagingBuffers(
            f"{nixl.make_agent_name(kv.boot_id, kv.shard.rank)}/reader", kv.memory.device
        )
        """Shared by all links over NIXL."""
        self._connections: OrderedDict[RemoteRank, _RankConnection] = OrderedDict()
        self._logged: set[str] = set()
        self._lock = threading.Lock()

    def pull(self, handoff: Handoff, digest: str, first: int, blocks: Sequence[int]) -> Transport:
        """Fill local `blocks` with the producer's blocks from number `first` of the prompt on.

        Pulls from each remote rank that has a part of this rank's KV, and releases the lease at
        each. Returns the transport that was used. Raises RefusedError.
        """
        if handoff.prompt_digest != digest:
            raise RefusedError(RefusalReason.PROMPT, "the handoff is for other prompt tokens")
        if handoff.boot_id == self.kv.boot_id:
            raise RefusedError(RefusalReason.BOOT, "an engine cannot pull from itself")
        ranks = self.resolve_ranks(handoff)
        needed = [rank for rank in ranks if rank.source.part]
        request = _build_request(handoff, first, blocks)
        transports = [self._pull_from_rank(rank, request, blocks) for rank in needed]
        for rank in ranks:
            if not rank.source.part:
                self.decline_rank(rank, handoff)
        return transports[0]

    def pull_prefix(self, read: PrefixRead) -> Transport:
        """Fill local blocks with blocks that the prefix cache of another engine has leased to this
        one, and check that the lease has lasted. Returns the transport. Raises RefusedError."""
        handoff = read.build_handoff()
        if handoff.boot_id == self.kv.boot_id:
            raise RefusedError(RefusalReason.BOOT, "an engine cannot pull from itself")
        request = msgspec.structs.replace(
            _build_request(handoff, read.num_skipped, read.blocks),
            blocks=read.lease.blocks,
            blocks_mac=read.lease.blocks_mac,
        )
        transports = [
            self._pull_from_rank(rank, request, read.blocks)
            for rank in find_remote_ranks(self.kv, handoff)
            if rank.source.part
        ]
        check_lease(read.source, read.lease.lease_id)
        return transports[0]

    def pull_chunk(
        self, rank: RemoteRank, handoff: Handoff, chunk: KvChunk, blocks: Sequence[int]
    ) -> Transport:
        """Fill some layers of local `blocks` with a chunk of a running prefill. `LayerwiseClient`
        releases the prefill and checks its lease. Raises RefusedError."""
        layers = slice(chunk.first_layer, chunk.first_layer + chunk.num_layers)
        request = msgspec.structs.replace(
            _build_request(handoff, chunk.first_block, blocks),
            first_layer=chunk.first_layer,
            num_layers=chunk.num_layers,
        )
        return self._pull_from_rank(rank, request, blocks, layers)

    def resolve_ranks(
        self, handoff: Handoff, seconds: float = protocol.RESPONSE_TIMEOUT_S
    ) -> tuple[RemoteRank, ...]:
        """Return the remote ranks that this rank must contact, after looking up unknown addresses.
        Each network operation may take `seconds`. Raises RefusedError."""
        return find_remote_ranks(self.kv, self._rank_resolver.resolve(handoff, seconds))

    def decline(self, handoff: Handoff) -> None:
        """Notify the producer that its blocks will not be pulled; on failure the lease expires."""
        with suppress(RefusedError):
            for rank in self.resolve_ranks(handoff):
                self.decline_rank(rank, handoff)

    def decline_rank(self, rank: RemoteRank, handoff: Handoff) -> None:
        """Notify one rank of the producer."""
        with suppress(RefusedError, protocol.ProtocolError, TimeoutError):
            connection, _ = self.connect(rank, _CONNECT_TIMEOUT_S)
            with closing(connection):
                release = protocol.ReleaseBlocks(handoff.request_id, handoff.epoch)
                connection.send(release, _CONNECT_TIMEOUT_S)
                connection.receive(_CONNECT_TIMEOUT_S)

    def send_heartbeats(self, handoffs: Iterable[Handoff]) -> int:
        """Extend the leases of handoffs to be pulled later; return the number of lost ranks."""
        num_lost = 0
        for rank, request_ids in self._group_by_rank(handoffs).items():
            try:
                connection, _ = self.connect(rank, _HEARTBEAT_TIMEOUT_S)
            except RefusedError:
                num_lost += 1
                continue
            with suppress(protocol.ProtocolError):
                connection.send(protocol.LeaseHeartbeat(tuple(request_ids)), _HEARTBEAT_TIMEOUT_S)
            connection.close()
        return num_lost

    def close_lost(self) -> None:
        """Release the memory of producers that have closed their idle connection: that of a process
        that has ended stays allocated while it is mapped."""
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            connection.close_if_lost()

    def log_once(self, fault: str, boot_id: str) -> None:
        """Log why a transport is not used, with the first peer."""
        if fault not in self._logged:
            self._logged.add(fault)
            _log.info("%s (first with %s)", fault, boot_id)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            connections = list(self._connections.values())
            self._connections.clear()
        for connection in connections:
            connection.close()

    def _group_by_rank(self, handoffs: Iterable[Handoff]) -> dict[RemoteRank, list[str]]:
        request_ids: dict[RemoteRank, list[str]] = {}
        unreachable: set[str] = set()
        for handoff in handoffs:
            if handoff.boot_id in unreachable:
                continue
            try:
                for rank in self.resolve_ranks(handoff, _HEARTBEAT_TIMEOUT_S):
                    request_ids.setdefault(rank, []).append(handoff.request_id)
            except RefusedError:
                unreachable.add(handoff.boot_id)
        return request_ids

    def _pull_from_rank(
        self,
        rank: RemoteRank,
        request: protocol.PullRequest,
        blocks: Sequence[int],
        layers: slice = _ALL_LAYERS,
    ) -> Transport:
        connection = self._get_connection(rank)
        try:
            return connection.pull(request, blocks, layers)
        except RefusedError as refused:
            if refused.reason in _BROKEN_CONNECTION_REASONS:
                with self._lock:
                    if self._connections.get(rank) is connection:
                        del self._connections[rank]
                connection.close()
            raise

    def _get_connection(self, rank: RemoteRank) -> "_RankConnection":
        with self._lock:
            connection = self._connections.pop(rank, None) or _RankConnection(self, rank)
            self._connections[rank] = connection
            if len(self._connections) <= _MAX_CONNECTIONS:
                return connection
            _, oldest = self._connections.popitem(last=False)
        oldest.close()
        return connection

    def connect(
        self, rank: RemoteRank, seconds: float
    ) -> tuple[protocol.FramedConnection, protocol.HandshakeResponse]:
        """Connect and shake hands; each step may take `seconds`. Raises RefusedError."""
        kv = self.kv
        handshake = protocol.HandshakeRequest(
            rank.boot_id, kv.layout, rank.shape, rank.source, kv.boot_id, kv.shard.rank
        )
        connection = connect_authenticated(rank.address, rank.key, seconds)
        try:
            return connection, protocol.send_request(
                connection, handshake, protocol.HandshakeResponse, seconds
            )
        except BaseException:
            connection.close()
            raise


class _RankConnection:
    """The connection with one producer rank, and the link over which its KV is transferred."""

    def __init__(self, client: KvClient, remote_rank: RemoteRank) -> None:
        """Raises RefusedError when this rank lacks the layers that it should receive."""
        self._client = client
        self._kv = client.kv
        self._remote_rank = remote_rank
        self._local_layers = client.kv.select_layers(remote_rank.source.part)
        self._lock = threading.Lock()
        self._connection: protocol.FramedConnection | None = None
        self._remote_layers = self._local_layers
        self._one_sided: OneSidedLink | None = None
        self._two_sided: two_sided.TwoSidedLink | None = None
        self.transport: Transport | None = None
        self._meter = BandwidthMeter()
        self._logged_at_bytes = 0

    def pull(
        self, request: protocol.PullRequest, blocks: Sequence[int], layers: slice
    ) -> Transport:
        """Pull some layers of a running prefill, all of a finished one and release it, or blocks of
        a cached prefix."""
        with self._lock, refuse_on(LinkError, RefusalReason.PEER_LOST):
            response = self._request_or_reconnect(request)
            self._transfer(response, blocks, layers)
            assert self._connection
            assert self.transport
            if layers == _ALL_LAYERS and not request.blocks:
                protocol.release_blocks(self._connection, request.request_id, request.epoch)
            local = self._local_layers[layers]
            if self._client.check_bytes and response.checksums != compute_checksums(
                self._kv.memory, local, blocks
            ):
                fault = "the received bytes differ from those sent"
                raise RefusedError(RefusalReason.CHECKSUM, fault)
            if layers == _ALL_LAYERS:
                self._log_bandwidth()
            return self.transport

    def close_if_lost(self) -> None:
        """Close the connection if the producer has, unless a pull runs, which finds out itself."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._connection and self._connection.is_lost():
                self.close()
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the connection; a running pull ends with an error."""
        if self._connection:
            self._connection.close()
        for link in (self._one_sided, self._two_sided):
            if link:
                link.close()

    def _request_or_reconnect(self, request: protocol.PullRequest) -> protocol.PullResponse:
        is_new = self._connection is None
        if is_new:
            self._open()
        try:
            return self._request_blocks(request)
        except RefusedError as refused:
            if is_new or refused.reason is not RefusalReason.PEER_LOST:
                raise
        # The connection was idle, or the producer was lost: reconnect once to find out.
        self.close()
        self._open()
        return self._request_blocks(request)

    def _request_blocks(self, request: protocol.PullRequest) -> protocol.PullResponse:
        pull = msgspec.structs.replace(
            request, send=self._two_sided is not None, checksums=self._client.check_bytes
        )
        response = self._send_request(pull, protocol.PullResponse)
        if len(response.blocks) != request.num_blocks:
            fault = "the producer returned another number of blocks"
            raise RefusedError(RefusalReason.MALFORMED, fault)
        return response

    def _transfer(self, reply: protocol.PullResponse, blocks: Sequence[int], layers: slice) -> None:
        remote, local = self._remote_layers[layers], self._local_layers[layers]
        seconds = self._client.transfer_s
        with self._meter.measure(sum(layer.block_bytes for layer in local) * len(blocks)):
            if self._one_sided:
                with refuse_on(ValueError, RefusalReason.LAYOUT):
                    copies = plan_copies(remote, reply.blocks, local, blocks)
                self._one_sided.read(copies, seconds)
            elif self._two_sided:
                self._two_sided.receive(list_ranges(local, blocks), seconds)

    def _log_bandwidth(self) -> None:
        """Log the bandwidth each time that the total number of bytes has grown tenfold."""
        meter = self._meter
        if meter.num_bytes > 10 * self._logged_at_bytes:
            self._logged_at_bytes = meter.num_bytes
            boot_id, rate = self._remote_rank.boot_id, meter.bytes_per_s / 1e9
            _log.info("KV from %s arrives over %s at %.3f GB/s", boot_id, self.transport, rate)

    def _send_request(
        self, message: protocol.Message, kind: type[protocol.ResponseT]
    ) -> protocol.ResponseT:
        assert self._connection
        return protocol.send_request(self._connection, message, kind, protocol.RESPONSE_TIMEOUT_S)

    def _open(self) -> None:
        self._connection, handshake = self._client.connect(self._remote_rank, _CONNECT_TIMEOUT_S)
        self._remote_layers = handshake.layers
        remote, local = (
            [layer.block_bytes for layer in layers]
            for layers in (handshake.layers, self._local_layers)
        )
        if remote != local:
            raise RefusedError(RefusalReason.LAYOUT, "the producer has other layers or KV heads")
        self._one_sided = self._two_sided = None
        for transport in self._client.transports:
            if self._open_link(transport, handshake):
                self.transport = transport
                return
        raise RefusedError(RefusalReason.PEER_LOST, "no transport works with this producer")

    def _open_link(self, transport: Transport, handshake: protocol.HandshakeResponse) -> bool:
        rank = self._remote_rank
        try:
            if transport is Transport.SHARED_MEMORY:
                if handshake.shared:
                    self._one_sided = SharedMemoryLink(self._kv.memory, handshake.shared)
                return bool(handshake.shared)
            if transport is Transport.NIXL and not handshake.supports_nixl:
                return False
            if transport is Transport.CUDA_IPC and not cuda_ipc.is_here(handshake.place):
                raise LinkError("the peer is not in this container, or exports no memory")
            rendezvous = self._send_request(
                protocol.RendezvousRequest(transport), protocol.RendezvousResponse
            )
            if transport in (Transport.NIXL, Transport.CUDA_IPC):
                self._one_sided = self._create_one_sided_link(rendezvous)
                return self._one_sided is not None
            assert self._connection
            self._two_sided = two_sided.Rendezvous(
                self._connection, rendezvous.nonce, rank.key, _CONNECT_TIMEOUT_S
            ).create_consumer_link(self._kv.memory, transport, self._kv.host)
        except LinkError as error:
            self._client.log_once(f"KV is not pulled over {transport}: {error}", rank.boot_id)
            return False
        return True

    def _create_one_sided_link(self, offer: protocol.RendezvousResponse) -> OneSidedLink | None:
        """A link over what the producer offers; None: nothing. Raises LinkError."""
        memory, rank = self._kv.memory, self._remote_rank
        calls = cuda_ipc.find_calls(memory.device)
        if offer.exported and calls:
            return cuda_ipc.CudaIpcLink(memory, offer.exported, calls, _CONNECT_TIMEOUT_S)
        if offer.nixl_metadata is None:
            return None
        name = nixl.make_agent_name(rank.boot_id, rank.source.rank)
        buffers = self._client.staging_buffers
        return nixl.NixlLink(memory, buffers, offer.nixl_metadata, name, _CONNECT_TIMEOUT_S)


def _build_request(handoff: Handoff, first: int, blocks: Sequence[int]) -> protocol.PullRequest:
    """For all layers of a handoff's blocks from number `first` on; the connection knows whether the
    producer sends them."""
    return protocol.PullRequest(
        request_id=handoff.request_id,
        epoch=handoff.epoch,
        prompt_digest=handoff.prompt_digest,
        first_block=first,
        num_blocks=len(blocks),
        send=False,
        checksums=False,
    )
