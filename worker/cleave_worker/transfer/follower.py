"""Takes KV while its owner computes it: waits for more, and has it moved piece by piece.

Called from worker threads, one for each prompt that is awaited. Waiting has a connection of its
own, so that it keeps no other prompt of the same owner waiting; bytes come over the pair's link
(reader.py). What is hard: the pieces come one by one, but only all of them together, with the
owner's word that it had held the blocks from the first to the last, are KV.
"""

import time
from collections.abc import Sequence

import msgspec

from cleave_worker.transfer import wire
from cleave_worker.transfer.identity import HandOff, Reason, RefusedError
from cleave_worker.transfer.link import Way
from cleave_worker.transfer.progress import NOTHING, Piece, Progress, missing
from cleave_worker.transfer.reader import ANSWER_S, Reader, exchange

_CONNECT_S = 10.0


class Follower:
    """Follows prefills of any owner."""

    def __init__(self, reader: Reader, num_planes: int, patience_s: float) -> None:
        """`patience_s`: longest time from the first question to the end of a prefill."""
        self._reader = reader
        self._num_planes = num_planes
        self._patience_s = patience_s

    def follow(
        self, hand_off: HandOff, prompt_digest: str, first: int, blocks: Sequence[int]
    ) -> Way:
        """Fill own `blocks` with the owner's, from its block number `first` of the prompt.

        The hand-off is ahead of its prefill. Returns the way that the bytes took, once all of them
        are there and were held all the time. Raises RefusedError.
        """
        connection, _ = self._reader.connect(self._reader.counterpart(hand_off), _CONNECT_S)
        try:
            return self._follow(connection, hand_off, prompt_digest, first, blocks)
        finally:
            # The owner takes it for a release, if there has been none.
            connection.close()

    def _follow(
        self,
        connection: wire.Wire,
        hand_off: HandOff,
        prompt_digest: str,
        first: int,
        blocks: Sequence[int],
    ) -> Way:
        end = first + len(blocks)
        have, seen = Progress(first, first, 0), NOTHING
        until = time.monotonic() + self._patience_s
        way: Way | None = None
        while True:
            question = wire.Follow(hand_off.request_id, prompt_digest, seen)
            news = exchange(connection, question, wire.News, ANSWER_S)
            named = msgspec.structs.replace(
                hand_off,
                request_id=news.request_id,
                epoch=news.epoch,
                prompt_digest=prompt_digest,
            )
            seen, now = news.progress, news.progress.within(first, end)
            for piece in _pieces(have, now, self._num_planes):
                at = piece.first_block - first
                way = self._reader.pull_piece(named, piece, blocks[at : at + piece.num_blocks])
            have = now
            if have.blocks == end and way:
                break
            if time.monotonic() > until:
                raise RefusedError(Reason.TIME_OUT, "the prefill did not end in time")
        release = wire.Release(named.request_id, named.epoch)
        released = exchange(connection, release, wire.Released, ANSWER_S)
        if not released.held:
            raise RefusedError(Reason.LAPSED, "the owner had given the blocks up")
        return way


def _pieces(have: Progress, now: Progress, num_planes: int) -> list[Piece]:
    try:
        return missing(have, now, num_planes)
    except ValueError as error:
        raise RefusedError(Reason.MALFORMED, str(error)) from error
