"""The consumer side of KV transfers: pulls leased blocks into blocks of this engine.

Called from worker threads: concurrently for different producers, serially for one producer rank.
When a pull returns, the local blocks contain exactly the KV that the handoff names. Otherwise it
raises RefusedError with a reason, and the engine must not use the local blocks.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from cleave_worker.transfer import protocol
from cleave_worker.transfer.asking import ANSWER_S, Answer, dial, exchange
from cleave_worker.transfer.handoff import HandOff, Reason, RefusedError
from cleave_worker.transfer.memory import moves, spans_of
from cleave_worker.transfer.peers import Peer, own_planes, peers
from cleave_worker.transfer.places import Places
from cleave_worker.transfer.progress import Piece
from cleave_worker.transfer.server import Kept, checksums
from cleave_worker.transfer.transport import LinkError, Meter, OneSided, TwoSided, Way
from cleave_worker.transfer.transports import nixl, torch_distributed
from cleave_worker.transfer.transports.nixl_buffers import Arrivals
from cleave_worker.transfer.transports.shared_memory import SharedMemory

_log = logging.getLogger(__name__)
_CONNECT_S = 10.0
_BEAT_S = 2.0
"""For one producer; a dead one must not delay heartbeats to the others."""
_MAX_OWNERS = 64
_BROKEN = (Reason.LOST, Reason.TIME_OUT, Reason.LAYOUT, Reason.MALFORMED)
"""After these the state of the producer is unknown; closing the connection frees its blocks."""

_ALL = slice(0, None)
"""Layers of a pull that takes a whole prompt."""


class Reader:
    """Pulls KV from any producer."""

    def __init__(
        self,
        kv: Kept,
        transports: Sequence[Way],
        transfer_s: float,
        *,
        check_bytes: bool = False,
    ) -> None:
        """`transports`: in order of preference; the first that works with a producer is
        used."""
        self._kept = kv
        self._ways = tuple(transports)
        self._transfer_s = transfer_s
        self._check_bytes = check_bytes
        self._places = Places()
        self.arrivals = Arrivals(
            f"{nixl.agent_name(kv.boot_id, kv.share.rank)}/reader",
            kv.memory.regions[0].device,
        )
        """Shared by all links over NIXL."""
        self._pairs: OrderedDict[Peer, _Pair] = OrderedDict()
        self._lock = threading.Lock()

    def pull(self, handoff: HandOff, prompt_digest: str, first: int, blocks: Sequence[int]) -> Way:
        """Fill local `blocks` with the producer's blocks from number `first` of the prompt on.

        Pulls from each remote rank that has a part of this rank's KV, and releases the lease at
        each. Returns the transport that was used. Raises RefusedError.
        """
        if handoff.prompt_digest != prompt_digest:
            raise RefusedError(Reason.PROMPT, "the handoff is for other prompt tokens")
        if handoff.boot_id == self._kept.boot_id:
            raise RefusedError(Reason.BOOT, "an engine cannot pull from itself")
        ranks = self.find(handoff)
        needed = [rank for rank in ranks if rank.source.part]
        transports = [
            self._use(rank, lambda connection: connection.pull(handoff, first, blocks))
            for rank in needed
        ]
        for rank in ranks:
            if rank not in needed:
                self.decline_at(rank, handoff)
        return transports[0]

    def pull_piece(self, rank: Peer, handoff: HandOff, chunk: Piece, blocks: Sequence[int]) -> Way:
        """Fill some layers of local `blocks` with a chunk of a running prefill.

        The caller (`Follower`) releases the prefill and checks its lease. Raises RefusedError.
        """
        return self._use(rank, lambda connection: connection.pull_piece(handoff, chunk, blocks))

    def find(self, handoff: HandOff, seconds: float = ANSWER_S) -> tuple[Peer, ...]:
        """Return the remote ranks that this rank must contact; asks the producer for unknown
        addresses.

        Each network operation may take `seconds`. Raises RefusedError.
        """
        return peers(self._kept, self._places.complete(handoff, seconds))

    def decline(self, handoff: HandOff) -> None:
        """Tell the producer that its blocks will not be pulled; if that fails the lease expires."""
        with suppress(RefusedError):
            for rank in self.find(handoff):
                self.decline_at(rank, handoff)

    def decline_at(self, rank: Peer, handoff: HandOff) -> None:
        """Tell one rank of the producer."""
        with suppress(RefusedError, protocol.WireError, TimeoutError):
            connection, _ = self.connect(rank, _CONNECT_S)
            try:
                connection.send(protocol.Release(handoff.request_id, handoff.epoch), _CONNECT_S)
                connection.receive(_CONNECT_S)
            finally:
                connection.close()

    def beat(self, handoffs: Iterable[HandOff]) -> int:
        """Extend the leases of handoffs that will be pulled later; return the number of lost
        ranks."""
        num_lost = 0
        for rank, request_ids in self._by_peer(handoffs).items():
            try:
                connection, _ = self.connect(rank, _BEAT_S)
            except RefusedError:
                num_lost += 1
                continue
            with suppress(protocol.WireError):
                connection.send(protocol.Beat(tuple(request_ids)), _BEAT_S)
            connection.close()
        return num_lost

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            connections = list(self._pairs.values())
            self._pairs.clear()
        for connection in connections:
            connection.close()

    def _by_peer(self, handoffs: Iterable[HandOff]) -> dict[Peer, list[str]]:
        request_ids: dict[Peer, list[str]] = {}
        unreachable: set[str] = set()
        for handoff in handoffs:
            if handoff.boot_id in unreachable:
                continue
            try:
                for rank in self.find(handoff, _BEAT_S):
                    request_ids.setdefault(rank, []).append(handoff.request_id)
            except RefusedError:
                unreachable.add(handoff.boot_id)
        return request_ids

    def _use(self, rank: Peer, pull: "Callable[[_Pair], Way]") -> Way:
        connection = self._pair(rank)
        try:
            return pull(connection)
        except RefusedError as refused:
            if refused.reason in _BROKEN:
                self._forget(rank, connection)
            raise

    def _pair(self, rank: Peer) -> "_Pair":
        with self._lock:
            connection = self._pairs.pop(rank, None) or _Pair(self, rank)
            self._pairs[rank] = connection
            old = self._pairs.popitem(last=False)[1] if len(self._pairs) > _MAX_OWNERS else None
        if old:
            old.close()
        return connection

    def _forget(self, rank: Peer, connection: "_Pair") -> None:
        with self._lock:
            if self._pairs.get(rank) is connection:
                del self._pairs[rank]
        connection.close()

    def connect(self, rank: Peer, seconds: float) -> tuple[protocol.Wire, protocol.Welcome]:
        """Connect and shake hands; each of the two steps may take `seconds`. Raises
        RefusedError."""
        kv = self._kept
        handshake = protocol.Hello(
            rank.boot_id, kv.layout, rank.shape, rank.source, kv.boot_id, kv.share.rank
        )
        connection = dial(rank.address, seconds)
        try:
            return connection, exchange(connection, handshake, protocol.Welcome, seconds)
        except BaseException:
            connection.close()
            raise


class _Pair:
    """The connection with one producer rank, and the link over which its KV is transferred."""

    def __init__(self, client: Reader, remote_rank: Peer) -> None:
        """Raises RefusedError when this rank lacks the layers that it should receive."""
        self._reader = client
        self._peer = remote_rank
        self._own = own_planes(client._kept, remote_rank)
        self._lock = threading.Lock()
        self._connection: protocol.Wire | None = None
        self._planes = self._own
        self._one_sided: OneSided | None = None
        self._two_sided: TwoSided | None = None
        self.way: Way | None = None
        self._meter = Meter()
        self._told_at = 0

    def pull(self, handoff: HandOff, first: int, blocks: Sequence[int]) -> Way:
        """See `Reader.pull`."""
        with self._lock:
            try:
                response = self._ask(handoff, first, blocks)
                self._move(response, blocks)
                self._settle(handoff, response, blocks)
            except LinkError as error:
                raise RefusedError(Reason.LOST, str(error)) from error
            assert self.way
            self._tell()
            return self.way

    def pull_piece(self, handoff: HandOff, chunk: Piece, blocks: Sequence[int]) -> Way:
        """See `Reader.pull_piece`."""
        layers = slice(chunk.first_plane, chunk.first_plane + chunk.num_planes)
        with self._lock:
            try:
                response = self._ask(handoff, chunk.first_block, blocks, layers)
                self._move(response, blocks, layers)
            except LinkError as error:
                raise RefusedError(Reason.LOST, str(error)) from error
            self._check(response, blocks, layers)
            assert self.way
            return self.way

    def close(self) -> None:
        """Close the connection; a running pull ends with an error."""
        connection = self._connection
        if connection:
            connection.close()
        for link in (self._one_sided, self._two_sided):
            if link:
                link.close()

    def _ask(
        self, handoff: HandOff, first: int, blocks: Sequence[int], layers: slice = _ALL
    ) -> protocol.Grant:
        is_new = self._connection is None
        if is_new:
            self._open()
        try:
            return self._request(handoff, first, blocks, layers)
        except RefusedError as refused:
            if is_new or refused.reason is not Reason.LOST:
                raise
        # The server closes idle connections, or the producer is gone: reconnect once to find out.
        self.close()
        self._open()
        return self._request(handoff, first, blocks, layers)

    def _request(
        self, handoff: HandOff, first: int, blocks: Sequence[int], layers: slice
    ) -> protocol.Grant:
        pull = protocol.Pull(
            handoff.request_id,
            handoff.epoch,
            handoff.prompt_digest,
            first,
            len(blocks),
            send=self._two_sided is not None,
            checksums=self._reader._check_bytes,
            first_plane=layers.start,
            num_planes=(layers.stop or 0) - layers.start,
        )
        response = self._exchange(pull, protocol.Grant)
        if len(response.blocks) != len(blocks):
            raise RefusedError(Reason.MALFORMED, "the producer returned another number of blocks")
        return response

    def _move(self, response: protocol.Grant, blocks: Sequence[int], layers: slice = _ALL) -> None:
        remote, local = self._planes[layers], self._own[layers]
        seconds = self._reader._transfer_s
        size = sum(layer.block_bytes for layer in local) * len(blocks)
        with self._meter.measure(size):
            if self._one_sided:
                try:
                    copies = moves(remote, response.blocks, local, blocks)
                except ValueError as error:
                    raise RefusedError(Reason.LAYOUT, str(error)) from error
                self._one_sided.read(copies, seconds)
            elif self._two_sided:
                self._two_sided.receive(spans_of(local, blocks), seconds)

    def _tell(self) -> None:
        """Log the bandwidth each time that the total number of bytes has grown tenfold."""
        meter = self._meter
        if meter.num_bytes > 10 * self._told_at:
            self._told_at = meter.num_bytes
            rate = meter.bytes_per_s / 1e9
            _log.info("KV from %s arrives over %s at %.3f GB/s", self._peer.boot_id, self.way, rate)

    def _settle(self, handoff: HandOff, response: protocol.Grant, blocks: Sequence[int]) -> None:
        """Release the lease, check that it lasted until now, and compare checksums."""
        release = protocol.Release(handoff.request_id, handoff.epoch)
        released = self._exchange(release, protocol.Released)
        if not released.held:
            raise RefusedError(Reason.LAPSED, "the lease ended before the blocks were read")
        self._check(response, blocks)

    def _check(self, response: protocol.Grant, blocks: Sequence[int], layers: slice = _ALL) -> None:
        if self._reader._check_bytes and response.checksums != checksums(
            self._reader._kept.memory, self._own[layers], blocks
        ):
            raise RefusedError(Reason.CHECKSUM, "the received bytes differ from those sent")

    def _exchange(self, message: protocol.Message, kind: type[Answer]) -> Answer:
        assert self._connection
        return exchange(self._connection, message, kind, ANSWER_S)

    def _open(self) -> None:
        self._connection, handshake = self._reader.connect(self._peer, _CONNECT_S)
        self._planes = handshake.planes
        if [layer.block_bytes for layer in self._planes] != [
            layer.block_bytes for layer in self._own
        ]:
            raise RefusedError(Reason.LAYOUT, "the producer has other layers or KV heads")
        self._one_sided = self._two_sided = None
        for transport in self._reader._ways:
            if self._use(transport, handshake):
                self.way = transport
                return
        raise RefusedError(Reason.LOST, "no transport works with this producer")

    def _use(self, transport: Way, handshake: protocol.Welcome) -> bool:
        kv = self._reader._kept
        try:
            if transport is Way.SHARED_MEMORY:
                if not handshake.shared:
                    return False
                self._one_sided = SharedMemory(kv.memory, handshake.shared)
            elif transport is Way.NIXL:
                return self._use_nixl(handshake)
            else:
                rendezvous = self._exchange(protocol.Meet(transport), protocol.Met)
                peer = (self._peer.address[0], rendezvous.port)
                self._two_sided = torch_distributed.join(
                    kv.memory, transport, peer, kv.host, _CONNECT_S
                )
        except LinkError as error:
            _log.info(
                "transport %s does not work with %s: %s", transport, self._peer.boot_id, error
            )
            return False
        return True

    def _use_nixl(self, handshake: protocol.Welcome) -> bool:
        """Return whether a link over NIXL was opened. Raises LinkError."""
        metadata = (
            self._exchange(protocol.Meet(Way.NIXL), protocol.Met).reach if handshake.nixl else None
        )
        if metadata is None:
            return False
        client, rank = self._reader, self._peer
        name = nixl.agent_name(rank.boot_id, rank.source.rank)
        self._one_sided = nixl.Nixl(
            client._kept.memory, client.arrivals, metadata, name, _CONNECT_S
        )
        return True
