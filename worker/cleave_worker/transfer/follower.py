"""Takes KV while its owner computes it: waits for more, and has it moved piece by piece.

Called from worker threads, one for each prompt that is awaited. Waiting has a connection of its
own, so that it keeps no other prompt of the same owner waiting; bytes come over the pair's link
(reader.py). What is hard: the pieces come one by one, and from several ranks where the owner is of
another shape, but only all of them together, with each rank's word that it had held the blocks from
the first to the last, are KV.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import msgspec

from cleave_worker.transfer import wire
from cleave_worker.transfer.asking import ANSWER_S, exchange
from cleave_worker.transfer.identity import HandOff, Reason, RefusedError
from cleave_worker.transfer.link import Way
from cleave_worker.transfer.peers import Peer
from cleave_worker.transfer.progress import NOTHING, Piece, Progress, missing
from cleave_worker.transfer.reader import Reader

_CONNECT_S = 10.0


class Follower:
    """Follows prefills of any owner."""

    def __init__(self, reader: Reader, patience_s: float) -> None:
        """`patience_s`: longest time from the first question to the end of a prefill."""
        self._reader = reader
        self._patience_s = patience_s

    def follow(
        self, hand_off: HandOff, prompt_digest: str, first: int, blocks: Sequence[int]
    ) -> Way:
        """Fill own `blocks` with the owner's, from its block number `first` of the prompt.

        The hand-off is ahead of its prefill. Returns the way that the bytes took, once all of them
        are there and were held all the time by all ranks that have a part of them. Raises
        RefusedError, when nothing is written any more.
        """
        until = time.monotonic() + self._patience_s
        prompt = _Prompt(hand_off, prompt_digest, first, tuple(blocks), until)
        found = self._reader.find(hand_off)
        try:
            return self._follow_all(prompt, [peer for peer in found if peer.source.part])
        finally:
            for peer in found:
                if not peer.source.part:
                    self._reader.decline_at(peer, hand_off)

    def _follow_all(self, prompt: "_Prompt", needed: Sequence[Peer]) -> Way:
        if len(needed) == 1:
            return self._follow(prompt, needed[0])
        # Its end waits for all: whoever still moves bytes writes into the prompt's blocks.
        with ThreadPoolExecutor(len(needed), "kv-follow-rank") as pool:
            started = [pool.submit(self._follow, prompt, peer) for peer in needed]
            done, _ = wait(started, return_when=FIRST_EXCEPTION)
            prompt.is_over.set()
            return next(iter([one.result() for one in done]))

    def _follow(self, prompt: "_Prompt", peer: Peer) -> Way:
        connection, welcome = self._reader.connect(peer, _CONNECT_S)
        try:
            way = self._take(prompt, peer, connection, welcome)
            release = wire.Release(prompt.named.request_id, prompt.named.epoch)
            released = exchange(connection, release, wire.Released, ANSWER_S)
        finally:
            # The owner takes it for a release, if there has been none.
            connection.close()
        if not released.held:
            raise RefusedError(Reason.LAPSED, "the owner had given the blocks up")
        return way

    def _take(
        self, prompt: "_Prompt", peer: Peer, connection: wire.Wire, welcome: wire.Welcome
    ) -> Way:
        first, end = prompt.first, prompt.first + len(prompt.blocks)
        num_planes = len(welcome.planes)
        have, seen = Progress(first, first, 0), NOTHING
        way: Way | None = None
        while True:
            question = wire.Follow(prompt.name, prompt.digest, seen)
            news = exchange(connection, question, wire.News, ANSWER_S)
            hand_off = prompt.hear(news)
            seen = news.progress
            now = seen.within(first, end).of_planes(welcome.first_plane, num_planes)
            for piece in _pieces(have, now, num_planes):
                at = piece.first_block - first
                own = prompt.blocks[at : at + piece.num_blocks]
                way = self._reader.pull_piece(peer, hand_off, piece, own)
            have = now
            if have.blocks == end and way:
                return way
            prompt.check()


@dataclass(slots=True)
class _Prompt:
    """What is followed at one owner, all its ranks."""

    promised: HandOff
    digest: str
    first: int
    blocks: tuple[int, ...]
    """Own ones."""
    until: float
    is_over: threading.Event = field(default_factory=threading.Event)
    """One rank has failed: the others' bytes are of no use."""
    _named: HandOff | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        """By which it is followed."""
        return self.promised.request_id

    @property
    def named(self) -> HandOff:
        """The hand-off as the owner knows it, who has spoken by now."""
        assert self._named
        return self._named

    def check(self) -> None:
        """Raises RefusedError when going on is of no use."""
        if self.is_over.is_set():
            raise RefusedError(Reason.LOST, "another rank of the owner was lost")
        if time.monotonic() > self.until:
            raise RefusedError(Reason.TIME_OUT, "the prefill did not end in time")

    def hear(self, news: wire.News) -> HandOff:
        """The same for what a rank tells. Raises RefusedError when it was another prefill before,
        or is one at another rank."""
        with self._lock:
            if self._named is None:
                self._named = msgspec.structs.replace(
                    self.promised,
                    request_id=news.request_id,
                    epoch=news.epoch,
                    prompt_digest=self.digest,
                )
            if (news.request_id, news.epoch) != (self._named.request_id, self._named.epoch):
                raise RefusedError(
                    Reason.EPOCH, f"number {news.epoch} goes on where {self._named.epoch} began"
                )
            return self._named


def _pieces(have: Progress, now: Progress, num_planes: int) -> list[Piece]:
    try:
        return missing(have, now, num_planes)
    except ValueError as error:
        raise RefusedError(Reason.MALFORMED, str(error)) from error
