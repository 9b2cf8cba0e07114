"""The decode side of hand-offs: pulls held blocks into own ones, and says truly whether it did.

Called from worker threads, for different owners side by side, for one owner one after the other.
A pull that returns has moved the very KV that was handed off; any other end is a RefusedError with
its reason, and whatever lies in the own blocks then must not be attended to.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from cleave_worker.transfer import group, nixl, wire
from cleave_worker.transfer.arrivals import Arrivals
from cleave_worker.transfer.asking import ANSWER_S, Answer, dial, exchange
from cleave_worker.transfer.identity import HandOff, Reason, RefusedError
from cleave_worker.transfer.link import LinkError, Meter, OneSided, TwoSided, Way
from cleave_worker.transfer.memory import moves, spans_of
from cleave_worker.transfer.owner import Kept, checksums
from cleave_worker.transfer.peers import Peer, own_planes, peers
from cleave_worker.transfer.places import Places
from cleave_worker.transfer.progress import Piece
from cleave_worker.transfer.shared import SharedMemory

_log = logging.getLogger(__name__)
_CONNECT_S = 10.0
_BEAT_S = 2.0
"""For one owner; a dead one must not keep the others' heartbeats waiting."""
_MAX_OWNERS = 64
_BROKEN = (Reason.LOST, Reason.TIME_OUT, Reason.LAYOUT, Reason.MALFORMED)
"""After these nobody knows what the owner does; closing the connection makes it free the blocks."""

_ALL = slice(0, None)
"""Planes, where a prompt comes in one piece."""


class Reader:
    """Pulls from any owner."""

    def __init__(
        self,
        kept: Kept,
        ways: Sequence[Way],
        transfer_s: float,
        *,
        check_bytes: bool = False,
    ) -> None:
        """`ways`: which to use, best first; the first that works with an owner serves."""
        self._kept = kept
        self._ways = tuple(ways)
        self._transfer_s = transfer_s
        self._check_bytes = check_bytes
        self._places = Places()
        self.arrivals = Arrivals(
            f"{nixl.agent_name(kept.boot_id, kept.share.rank)}/reader",
            kept.memory.regions[0].device,
        )
        """Of all links over NIXL."""
        self._pairs: OrderedDict[Peer, _Pair] = OrderedDict()
        self._lock = threading.Lock()

    def pull(self, hand_off: HandOff, prompt_digest: str, first: int, blocks: Sequence[int]) -> Way:
        """Fill own `blocks` with the owner's, from its block number `first` of this prompt.

        From as many of its ranks as have a part of what this one holds, each with its own last
        word. Returns the way that the bytes took. Raises RefusedError.
        """
        if hand_off.prompt_digest != prompt_digest:
            raise RefusedError(Reason.PROMPT, "handed off for other tokens")
        if hand_off.boot_id == self._kept.boot_id:
            raise RefusedError(Reason.BOOT, "an engine cannot pull from itself")
        found = self.find(hand_off)
        needed = [peer for peer in found if peer.source.part]
        ways = [self._use(peer, lambda pair: pair.pull(hand_off, first, blocks)) for peer in needed]
        for peer in found:
            if peer not in needed:
                self.decline_at(peer, hand_off)
        return ways[0]

    def pull_piece(self, peer: Peer, hand_off: HandOff, piece: Piece, blocks: Sequence[int]) -> Way:
        """Fill some planes of own `blocks` with a piece of what is followed (follower.py).

        Whoever follows it asks in the end whether it was held all the time. Raises RefusedError.
        """
        return self._use(peer, lambda pair: pair.pull_piece(hand_off, piece, blocks))

    def find(self, hand_off: HandOff, seconds: float = ANSWER_S) -> tuple[Peer, ...]:
        """The owner's ranks that this one turns to; it is asked if the hand-off does not say.

        Each step of that gets `seconds`. Raises RefusedError.
        """
        return peers(self._kept, self._places.complete(hand_off, seconds))

    def decline(self, hand_off: HandOff) -> None:
        """Tell the owner that nobody will pull; if it cannot be reached its lease ends anyway."""
        with suppress(RefusedError):
            for peer in self.find(hand_off):
                self.decline_at(peer, hand_off)

    def decline_at(self, peer: Peer, hand_off: HandOff) -> None:
        """The same at one rank."""
        with suppress(RefusedError, wire.WireError, TimeoutError):
            connection, _ = self.connect(peer, _CONNECT_S)
            try:
                connection.send(wire.Release(hand_off.request_id, hand_off.epoch), _CONNECT_S)
                connection.receive(_CONNECT_S)
            finally:
                connection.close()

    def beat(self, hand_offs: Iterable[HandOff]) -> int:
        """Extend the leases of what will be pulled later; the number of ranks not reached."""
        lost = 0
        for peer, request_ids in self._by_peer(hand_offs).items():
            try:
                connection, _ = self.connect(peer, _BEAT_S)
            except RefusedError:
                lost += 1
                continue
            with suppress(wire.WireError):
                connection.send(wire.Beat(tuple(request_ids)), _BEAT_S)
            connection.close()
        return lost

    def close(self) -> None:
        """Break all connections."""
        with self._lock:
            pairs = list(self._pairs.values())
            self._pairs.clear()
        for pair in pairs:
            pair.close()

    def _by_peer(self, hand_offs: Iterable[HandOff]) -> dict[Peer, list[str]]:
        found: dict[Peer, list[str]] = {}
        silent: set[str] = set()
        for hand_off in hand_offs:
            if hand_off.boot_id in silent:
                continue
            try:
                for peer in self.find(hand_off, _BEAT_S):
                    found.setdefault(peer, []).append(hand_off.request_id)
            except RefusedError:
                silent.add(hand_off.boot_id)
        return found

    def _use(self, peer: Peer, pull: "Callable[[_Pair], Way]") -> Way:
        pair = self._pair(peer)
        try:
            return pull(pair)
        except RefusedError as refused:
            if refused.reason in _BROKEN:
                self._forget(peer, pair)
            raise

    def _pair(self, peer: Peer) -> "_Pair":
        with self._lock:
            pair = self._pairs.pop(peer, None) or _Pair(self, peer)
            self._pairs[peer] = pair
            old = self._pairs.popitem(last=False)[1] if len(self._pairs) > _MAX_OWNERS else None
        if old:
            old.close()
        return pair

    def _forget(self, peer: Peer, pair: "_Pair") -> None:
        with self._lock:
            if self._pairs.get(peer) is pair:
                del self._pairs[peer]
        pair.close()

    def connect(self, peer: Peer, seconds: float) -> tuple[wire.Wire, wire.Welcome]:
        """A greeted connection; each of two steps gets `seconds`. Raises RefusedError."""
        kept = self._kept
        hello = wire.Hello(
            peer.boot_id, kept.layout, peer.shape, peer.source, kept.boot_id, kept.share.rank
        )
        connection = dial(peer.address, seconds)
        try:
            return connection, exchange(connection, hello, wire.Welcome, seconds)
        except BaseException:
            connection.close()
            raise


class _Pair:
    """The connection with one rank of an owner, and the link over which its bytes come."""

    def __init__(self, reader: Reader, peer: Peer) -> None:
        """Raises RefusedError when own planes have no room for what the peer is asked for."""
        self._reader = reader
        self._peer = peer
        self._own = own_planes(reader._kept, peer)
        self._lock = threading.Lock()
        self._connection: wire.Wire | None = None
        self._planes = self._own
        self._one_sided: OneSided | None = None
        self._two_sided: TwoSided | None = None
        self.way: Way | None = None
        self._meter = Meter()
        self._told_at = 0

    def pull(self, hand_off: HandOff, first: int, blocks: Sequence[int]) -> Way:
        """See Reader.pull."""
        with self._lock:
            try:
                grant = self._ask(hand_off, first, blocks)
                self._move(grant, blocks)
                self._settle(hand_off, grant, blocks)
            except LinkError as error:
                raise RefusedError(Reason.LOST, str(error)) from error
            assert self.way
            self._tell()
            return self.way

    def pull_piece(self, hand_off: HandOff, piece: Piece, blocks: Sequence[int]) -> Way:
        """See Reader.pull_piece."""
        planes = slice(piece.first_plane, piece.first_plane + piece.num_planes)
        with self._lock:
            try:
                grant = self._ask(hand_off, piece.first_block, blocks, planes)
                self._move(grant, blocks, planes)
            except LinkError as error:
                raise RefusedError(Reason.LOST, str(error)) from error
            self._check(grant, blocks, planes)
            assert self.way
            return self.way

    def close(self) -> None:
        """Break the connection; a pull that runs ends with an error."""
        connection = self._connection
        if connection:
            connection.close()
        for link in (self._one_sided, self._two_sided):
            if link:
                link.close()

    def _ask(
        self, hand_off: HandOff, first: int, blocks: Sequence[int], planes: slice = _ALL
    ) -> wire.Grant:
        fresh = self._connection is None
        if fresh:
            self._open()
        try:
            return self._request(hand_off, first, blocks, planes)
        except RefusedError as refused:
            if fresh or refused.reason is not Reason.LOST:
                raise
        # The owner closes connections that are idle for long, or was lost: one more try tells.
        self.close()
        self._open()
        return self._request(hand_off, first, blocks, planes)

    def _request(
        self, hand_off: HandOff, first: int, blocks: Sequence[int], planes: slice
    ) -> wire.Grant:
        pull = wire.Pull(
            hand_off.request_id,
            hand_off.epoch,
            hand_off.prompt_digest,
            first,
            len(blocks),
            send=self._two_sided is not None,
            checksums=self._reader._check_bytes,
            first_plane=planes.start,
            num_planes=(planes.stop or 0) - planes.start,
        )
        grant = self._exchange(pull, wire.Grant)
        if len(grant.blocks) != len(blocks):
            raise RefusedError(Reason.MALFORMED, "another number of blocks was granted")
        return grant

    def _move(self, grant: wire.Grant, blocks: Sequence[int], part: slice = _ALL) -> None:
        theirs, ours = self._planes[part], self._own[part]
        seconds = self._reader._transfer_s
        size = sum(plane.block_bytes for plane in ours) * len(blocks)
        with self._meter.measure(size):
            if self._one_sided:
                try:
                    wanted = moves(theirs, grant.blocks, ours, blocks)
                except ValueError as error:
                    raise RefusedError(Reason.LAYOUT, str(error)) from error
                self._one_sided.read(wanted, seconds)
            elif self._two_sided:
                self._two_sided.receive(spans_of(ours, blocks), seconds)

    def _tell(self) -> None:
        """Log the bandwidth of this pair, each time that ten times as much has come."""
        meter = self._meter
        if meter.num_bytes > 10 * self._told_at:
            self._told_at = meter.num_bytes
            rate = meter.bytes_per_s / 1e9
            _log.info("KV of %s comes over %s at %.3f GB/s", self._peer.boot_id, self.way, rate)

    def _settle(self, hand_off: HandOff, grant: wire.Grant, blocks: Sequence[int]) -> None:
        """Give the blocks back, learn whether they were held all the time, compare the bytes."""
        release = wire.Release(hand_off.request_id, hand_off.epoch)
        released = self._exchange(release, wire.Released)
        if not released.held:
            raise RefusedError(Reason.LAPSED, "the owner had given the blocks up")
        self._check(grant, blocks)

    def _check(self, grant: wire.Grant, blocks: Sequence[int], part: slice = _ALL) -> None:
        if self._reader._check_bytes and grant.checksums != checksums(
            self._reader._kept.memory, self._own[part], blocks
        ):
            raise RefusedError(Reason.CHECKSUM, "other bytes arrived than were sent")

    def _exchange(self, message: wire.Message, kind: type[Answer]) -> Answer:
        assert self._connection
        return exchange(self._connection, message, kind, ANSWER_S)

    def _open(self) -> None:
        self._connection, welcome = self._reader.connect(self._peer, _CONNECT_S)
        self._planes = welcome.planes
        if [one.block_bytes for one in self._planes] != [one.block_bytes for one in self._own]:
            raise RefusedError(Reason.LAYOUT, "the owner holds other layers, or heads of them")
        self._one_sided = self._two_sided = None
        for way in self._reader._ways:
            if self._use(way, welcome):
                self.way = way
                return
        raise RefusedError(Reason.LOST, "no way to move KV works with this owner")

    def _use(self, way: Way, welcome: wire.Welcome) -> bool:
        kept = self._reader._kept
        try:
            if way is Way.SHARED_MEMORY:
                if not welcome.shared:
                    return False
                self._one_sided = SharedMemory(kept.memory, welcome.shared)
            elif way is Way.NIXL:
                return self._use_nixl(welcome)
            else:
                met = self._exchange(wire.Meet(way), wire.Met)
                peer = (self._peer.address[0], met.port)
                self._two_sided = group.join(kept.memory, way, peer, kept.host, _CONNECT_S)
        except LinkError as error:
            _log.info("%s does not reach %s: %s", way, self._peer.boot_id, error)
            return False
        return True

    def _use_nixl(self, welcome: wire.Welcome) -> bool:
        """Raises LinkError."""
        reach = self._exchange(wire.Meet(Way.NIXL), wire.Met).reach if welcome.nixl else None
        if reach is None:
            return False
        reader, peer = self._reader, self._peer
        name = nixl.agent_name(peer.boot_id, peer.source.rank)
        self._one_sided = nixl.Nixl(reader._kept.memory, reader.arrivals, reach, name, _CONNECT_S)
        return True
