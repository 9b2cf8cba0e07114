"""Pulls the KV of a prefill while the producer computes it, chunk by chunk.

Called from worker threads, one per prompt. Progress is awaited on a connection of its own, so that
other prompts from the same producer do not wait; bytes arrive over the shared link of `Reader`.
What is hard: chunks arrive one by one, and from several ranks when the producer is sharded
differently. They are valid KV only together, and only if each rank confirms that its blocks were
leased from the first chunk to the last.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import msgspec

from cleave_worker.transfer import protocol
from cleave_worker.transfer.asking import ANSWER_S, exchange
from cleave_worker.transfer.client import Reader
from cleave_worker.transfer.handoff import HandOff, Reason, RefusedError
from cleave_worker.transfer.peers import Peer
from cleave_worker.transfer.progress import NOTHING, Piece, Progress, missing
from cleave_worker.transfer.transport import Way

_CONNECT_S = 10.0


class Follower:
    """Pulls running prefills from any producer."""

    def __init__(self, reader: Reader, patience_s: float) -> None:
        """`patience_s`: longest time from the first request to the end of a prefill."""
        self._reader = reader
        self._patience_s = patience_s

    def follow(
        self, handoff: HandOff, prompt_digest: str, first: int, blocks: Sequence[int]
    ) -> Way:
        """Fill local `blocks` with the producer's blocks from number `first` of the prompt on.

        The handoff is overlapped with its prefill. Returns the transport once all bytes have
        arrived and each remote rank has confirmed its lease. When it raises RefusedError, nothing
        is written any more.
        """
        deadline = time.monotonic() + self._patience_s
        prompt = _Prompt(handoff, prompt_digest, first, tuple(blocks), deadline)
        ranks = self._reader.find(handoff)
        try:
            return self._follow_all(prompt, [rank for rank in ranks if rank.source.part])
        finally:
            for rank in ranks:
                if not rank.source.part:
                    self._reader.decline_at(rank, handoff)

    def _follow_all(self, prompt: "_Prompt", ranks: Sequence[Peer]) -> Way:
        if len(ranks) == 1:
            return self._follow(prompt, ranks[0])
        # The pool's end waits for all ranks: a transfer that still runs writes into the blocks.
        with ThreadPoolExecutor(len(ranks), "kv-follow-rank") as pool:
            futures = [pool.submit(self._follow, prompt, rank) for rank in ranks]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            prompt.is_over.set()
            return next(iter([future.result() for future in done]))

    def _follow(self, prompt: "_Prompt", rank: Peer) -> Way:
        connection, handshake = self._reader.connect(rank, _CONNECT_S)
        try:
            transport = self._take(prompt, rank, connection, handshake)
            release = protocol.Release(prompt.named.request_id, prompt.named.epoch)
            released = exchange(connection, release, protocol.Released, ANSWER_S)
        finally:
            # The server treats a closed connection as a release if none was sent.
            connection.close()
        if not released.held:
            raise RefusedError(Reason.LAPSED, "the lease ended before the blocks were read")
        return transport

    def _take(
        self, prompt: "_Prompt", rank: Peer, connection: protocol.Wire, handshake: protocol.Welcome
    ) -> Way:
        first, end = prompt.first, prompt.first + len(prompt.blocks)
        num_layers = len(handshake.planes)
        received, announced = Progress(first, first, 0), NOTHING
        transport: Way | None = None
        while True:
            request = protocol.Follow(prompt.name, prompt.digest, announced)
            update = exchange(connection, request, protocol.News, ANSWER_S)
            handoff = prompt.hear(update)
            announced = update.progress
            available = announced.within(first, end).of_planes(handshake.first_plane, num_layers)
            for chunk in _pieces(received, available, num_layers):
                offset = chunk.first_block - first
                own = prompt.blocks[offset : offset + chunk.num_blocks]
                transport = self._reader.pull_piece(rank, handoff, chunk, own)
            received = available
            if received.blocks == end and transport:
                return transport
            prompt.check()


@dataclass(slots=True)
class _Prompt:
    """The pull of one prompt from all ranks of a producer."""

    promised: HandOff
    digest: str
    first: int
    blocks: tuple[int, ...]
    """Local blocks."""
    until: float
    is_over: threading.Event = field(default_factory=threading.Event)
    """One rank has failed, so the chunks from the others are useless."""
    _named: HandOff | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        """The name that the producer registered the prefill under."""
        return self.promised.request_id

    @property
    def named(self) -> HandOff:
        """The handoff with the request id and epoch that the producer reported."""
        assert self._named
        return self._named

    def check(self) -> None:
        """Raises RefusedError when the pull was cancelled or has timed out."""
        if self.is_over.is_set():
            raise RefusedError(Reason.LOST, "the pull from another rank of the producer failed")
        if time.monotonic() > self.until:
            raise RefusedError(Reason.TIME_OUT, "the prefill did not finish in time")

    def hear(self, update: protocol.News) -> HandOff:
        """Return the handoff with the update's request id and epoch, which must not change.

        Raises RefusedError.
        """
        with self._lock:
            if self._named is None:
                self._named = msgspec.structs.replace(
                    self.promised,
                    request_id=update.request_id,
                    epoch=update.epoch,
                    prompt_digest=self.digest,
                )
            if (update.request_id, update.epoch) != (self._named.request_id, self._named.epoch):
                raise RefusedError(
                    Reason.EPOCH, f"epoch {update.epoch} continues what {self._named.epoch} began"
                )
            return self._named


def _pieces(received: Progress, available: Progress, num_layers: int) -> list[Piece]:
    try:
        return missing(received, available, num_layers)
    except ValueError as error:
        raise RefusedError(Reason.MALFORMED, str(error)) from error
