"""The prefill side of hand-offs: serves held blocks to readers on a port of its own.

One thread accepts, one serves each reader; the engine never waits for any of them. What is hard is
told in holds.py; what is refused, and why, in identity.py.
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

from cleave_worker.transfer import agents, group, nixl, wire
from cleave_worker.transfer.holds import Holds, Visitor
from cleave_worker.transfer.identity import Layout, Reason, RefusedError
from cleave_worker.transfer.link import LinkError, TwoSided, Way
from cleave_worker.transfer.memory import Memory, Plane, spans_of
from cleave_worker.transfer.progress import Piece
from cleave_worker.transfer.shapes import Share, count_before, cut
from cleave_worker.transfer.shared import SharedRegion
from cleave_worker.transfer.turns import Ask, Turns

_log = logging.getLogger(__name__)
_ANSWER_S = 10.0
_IDLE_S = 120.0
"""Readers come again when they need to."""
_APPEAR_S = 10.0
"""From a hand-off in an answer to the engine's next step, which says that it is held."""
_MAX_READERS = 256
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Kept:
    """A rank's KV as it is registered for transfers."""

    boot_id: str
    layout: Layout
    memory: Memory
    planes: tuple[Plane, ...]
    host: str
    """Own address, which peers can reach."""
    share: Share = field(default_factory=Share)
    """Of the model's KV."""


class Owner:
    """Serves until it is closed."""

    def __init__(
        self,
        kept: Kept,
        holds: Holds,
        shared: Sequence[SharedRegion],
        port: int,
        transfer_s: float,
    ) -> None:
        """Listen on `port`, 0 for a free one. Raises OSError when it is taken."""
        self._kept = kept
        self._holds = holds
        self._turns = Turns(holds)
        self._shared = tuple(shared)
        name = nixl.agent_name(kept.boot_id, kept.share.rank)
        self._served = nixl.Served(name, kept.memory) if agents.installed() else None
        self._transfer_s = transfer_s
        self._listening = socket.create_server((kept.host, port), backlog=128)
        self.port: int = self._listening.getsockname()[1]
        self._located: Future[wire.Located] = Future()
        if kept.share.shape.num_ranks == 1:
            self.locate(((kept.host, self.port),))
        self._wires: set[wire.Wire] = set()
        self._closed = False
        threading.Thread(target=self._accept, name="kv-owner", daemon=True).start()

    def locate(self, addresses: tuple[tuple[str, int], ...]) -> None:
        """Where the ranks of this engine serve, in their order: told to readers that ask."""
        if not self._located.done():
            self._located.set_result(wire.Located(self._kept.share.shape, addresses))

    def close(self) -> None:
        """Stop serving; readers find the connection closed."""
        self._closed = True
        try:
            self._listening.shutdown(socket.SHUT_RDWR)
        finally:
            self._listening.close()
        for one in list(self._wires):
            one.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connected, _ = self._listening.accept()
            except OSError as error:
                if not self._closed:
                    # No file descriptors, say: those who read now will give theirs back.
                    _log.warning("cannot accept a reader of KV: %s", error)
                    time.sleep(_PAUSE_S)
                continue
            if len(self._wires) >= _MAX_READERS:
                connected.close()
                continue
            one = wire.Wire(connected)
            self._wires.add(one)
            threading.Thread(target=self._serve, args=(one,), name="kv-serve", daemon=True).start()

    def _serve(self, one: wire.Wire) -> None:
        session = _Session(
            self._kept, self._served, self._holds, self._turns, one, self._transfer_s
        )
        try:
            first = one.receive(_ANSWER_S)
            if isinstance(first, wire.Locate):
                one.send(self._tell(first), _ANSWER_S)
                return
            session.greet(first, self._shared)
            while True:
                session.answer(one.receive(_IDLE_S))
        except RefusedError as refused:
            # After a refused greeting there is nothing to talk about.
            _log.info("a reader was refused: %s", refused)
        except (wire.WireError, TimeoutError):
            pass  # It has left, or has nothing to ask.
        finally:
            session.close()
            one.close()
            self._wires.discard(one)

    def _tell(self, locate: wire.Locate) -> wire.Located | wire.Refusal:
        if locate.boot_id != self._kept.boot_id:
            return wire.Refusal(Reason.BOOT, f"this is boot {self._kept.boot_id}")
        try:
            # The engine's first step tells.
            return self._located.result(_APPEAR_S)
        except TimeoutError:
            return wire.Refusal(Reason.NOT_HELD, "no prompt has come since the engine started")


class _Session:
    """One reader's connection."""

    def __init__(
        self,
        kept: Kept,
        served: nixl.Served | None,
        holds: Holds,
        turns: Turns,
        connection: wire.Wire,
        transfer_s: float,
    ) -> None:
        self._kept = kept
        self._served = served
        self._holds = holds
        self._turns = turns
        self._wire = connection
        self._transfer_s = transfer_s
        self._link: TwoSided | None = None
        self._read: tuple[str, int] | None = None
        self._planes: tuple[Plane, ...] = ()
        self._first_plane = 0
        self._visitor = Visitor("", 0, 1)

    def greet(self, hello: wire.Message, shared: tuple[SharedRegion, ...]) -> None:
        """Compare boot and layout. Raises RefusedError, after the reader has been told."""
        if not isinstance(hello, wire.Hello):
            raise wire.WireError("no greeting")
        try:
            self._planes, self._first_plane = _asked(self._kept, hello)
        except RefusedError as refused:
            self._refuse(refused)
            raise
        self._visitor = Visitor(hello.reader, hello.rank, hello.source.num_readers)
        has_nixl = self._served is not None
        welcome = wire.Welcome(self._planes, shared, self._first_plane, has_nixl)
        self._wire.send(welcome, _ANSWER_S)

    def answer(self, message: wire.Message) -> None:
        """Do what a reader asks. Raises WireError when that makes no sense."""
        match message:
            case wire.Pull() if message.num_planes:
                self._pull_piece(message)
            case wire.Pull():
                self._pull(message)
            case wire.Follow():
                self._follow(message)
            case wire.Release():
                self._read = None
                held = self._turns.release(self._visitor, message.request_id, message.epoch)
                self._wire.send(wire.Released(held), _ANSWER_S)
            case wire.Beat():
                self._holds.extend(message.request_ids)
            case wire.Meet(Way.NIXL):
                self._tell_reach()
            case wire.Meet():
                self._meet(message.way)
            case _:
                raise wire.WireError(f"unexpected {type(message).__name__}")

    def close(self) -> None:
        """A reader that left in the middle will not come back for its blocks."""
        if self._link:
            self._link.close()
        if self._read:
            self._turns.abandon(*self._read)

    def _pull(self, pull: wire.Pull) -> None:
        ask = Ask(
            pull.request_id, pull.epoch, pull.prompt_digest, pull.first_block, pull.num_blocks
        )
        try:
            blocks = self._turns.take(self._visitor, ask, _APPEAR_S)
        except RefusedError as refused:
            self._refuse(refused)
            return
        self._read = (pull.request_id, pull.epoch)
        self._give(pull, blocks, self._planes)

    def _pull_piece(self, pull: wire.Pull) -> None:
        """Whose reader follows it on a connection of its own, and releases it there."""
        first_plane = self._first_plane + pull.first_plane
        piece = Piece(pull.first_block, pull.num_blocks, first_plane, pull.num_planes)
        try:
            blocks = self._holds.look(
                self._visitor, pull.request_id, pull.epoch, pull.prompt_digest, piece
            )
        except RefusedError as refused:
            self._refuse(refused)
            return
        planes = self._planes[pull.first_plane : pull.first_plane + pull.num_planes]
        self._give(pull, blocks, planes)

    def _follow(self, follow: wire.Follow) -> None:
        again = self._read is not None
        try:
            news = self._holds.follow(
                self._visitor,
                follow.name,
                follow.prompt_digest,
                follow.seen,
                _APPEAR_S,
                again=again,
            )
        except RefusedError as refused:
            self._refuse(refused)
            return
        self._read = (news.request_id, news.epoch)
        self._wire.send(wire.News(*news), _ANSWER_S)

    def _give(self, pull: wire.Pull, blocks: Sequence[int], planes: Sequence[Plane]) -> None:
        sums = checksums(self._kept.memory, planes, blocks) if pull.checksums else ()
        self._wire.send(wire.Grant(tuple(blocks), sums), _ANSWER_S)
        if pull.send:
            self._send(blocks, planes)

    def _send(self, blocks: Sequence[int], planes: Sequence[Plane]) -> None:
        if self._link is None:
            raise wire.WireError("no link to send over")
        try:
            self._link.send(spans_of(planes, blocks), self._transfer_s)
        except LinkError as error:
            raise wire.WireError(str(error)) from error

    def _tell_reach(self) -> None:
        reach = self._served.reach() if self._served else None
        self._wire.send(wire.Met(reach=reach), _ANSWER_S)

    def _meet(self, way: Way) -> None:
        host = self._kept.host
        try:
            meeting = group.Meeting(host, _ANSWER_S)
            self._wire.send(wire.Met(meeting.port), _ANSWER_S)
            self._link = meeting.enter(self._kept.memory, way, host, _ANSWER_S)
        except (LinkError, RuntimeError) as error:
            raise wire.WireError(str(error)) from error

    def _refuse(self, refused: RefusedError) -> None:
        self._wire.send(wire.Refusal(refused.reason, str(refused)), _ANSWER_S)


def _asked(kept: Kept, hello: wire.Hello) -> tuple[tuple[Plane, ...], int]:
    """(where what a reader needs of this rank lies, planes before it). Raises RefusedError."""
    share, source = kept.share, hello.source
    if hello.boot_id != kept.boot_id:
        raise RefusedError(Reason.BOOT, f"this is boot {kept.boot_id}")
    if difference := hello.layout.difference(kept.layout):
        raise RefusedError(Reason.LAYOUT, difference)
    if (hello.shape, source.rank) != (share.shape, share.rank):
        raise RefusedError(Reason.LAYOUT, f"this is rank {share.rank} of {share.shape}")
    if source.part is None:
        return (), 0
    try:
        cuts = cut(kept.planes, share, source.part, kept.layout.num_kv_heads)
    except ValueError as error:
        raise RefusedError(Reason.LAYOUT, str(error)) from error
    return cuts, count_before(len(kept.planes), share, source.part)


def checksums(memory: Memory, planes: Sequence[Plane], blocks: Sequence[int]) -> tuple[int, ...]:
    """One per block, over what it holds in every plane."""
    return tuple(_checksum(memory, planes, block) for block in blocks)


def _checksum(memory: Memory, planes: Sequence[Plane], block: int) -> int:
    value = 0
    for plane in planes:
        value = zlib.crc32(_host_bytes(memory.view(plane.span(block))), value)
    return value


def _host_bytes(view: torch.Tensor) -> memoryview:
    return memoryview(view.cpu().numpy())
