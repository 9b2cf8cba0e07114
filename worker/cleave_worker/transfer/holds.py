"""What an owner keeps for others: blocks of prefills, under leases, until they are read.

Shared by the engine's thread, which holds and frees, and the threads that serve readers. What is
hard: blocks must not be given up while somebody reads them, and a reader that stands still must not
keep them for ever. Reading has a bound of its own; a reader whose time was over learns it when it
releases the blocks, and throws away what it has read. A prefill may be followed while it runs, by
the ranks of one engine: then its lease begins with its end, and what is released before that is
freed at the end.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cleave_worker.transfer.identity import Reason, RefusedError
from cleave_worker.transfer.leases import Leases
from cleave_worker.transfer.progress import NOTHING, Piece, Progress

_REMEMBERED = 4096
"""Requests of the past; who asks for one of them is refused at once."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """A rank of an engine that reads."""

    boot_id: str
    rank: int
    num_ranks: int
    """That come to this owner in all."""


class Computed(Protocol):
    """A point in the work of a GPU, such as torch.cuda.Event."""

    def synchronize(self) -> None:
        """Wait until the GPU has come there."""


@dataclass(frozen=True, slots=True)
class Held:
    """A finished prefill."""

    epoch: int
    prompt_digest: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Begun:
    """A prefill that somebody may follow."""

    epoch: int
    prompt_digest: str
    num_blocks: int
    """That the prompt will have."""
    name: str
    """What readers call the request: they do not know the engine's own id yet."""


class News(NamedTuple):
    """What a follower hears of a prefill."""

    request_id: str
    epoch: int
    progress: Progress


@dataclass(slots=True)
class _Kept:
    """A prefill, finished or not."""

    held: Held
    num_blocks: int
    progress: Progress
    name: str = ""
    computed: Computed | None = None
    """When the progress is true; None: already."""
    ended: bool = True
    followers: set[Visitor] = field(default_factory=set)
    """All of one engine."""
    released: bool = False
    """Before it has ended."""


class Holds:
    """Request ids with what is held for them."""

    def __init__(self, lease_s: float, reading_s: float) -> None:
        """`reading_s`: longest time that a reader may take, once it has begun."""
        self._leases = Leases(lease_s)
        self._reading_s = reading_s
        self._kept: dict[str, _Kept] = {}
        self._names: dict[str, str] = {}
        """Of prefills that can be followed, with their request ids."""
        self._reading: dict[str, float] = {}
        self._past: OrderedDict[str, None] = OrderedDict()
        self._freed: set[str] = set()
        self._changed = threading.Condition()
        self.num_expired = 0

    def hold(self, request_id: str, held: Held) -> None:
        """Start the lease of a prefill that has finished."""
        with self._changed:
            before = self._kept.get(request_id)
            count = len(held.blocks)
            kept = _Kept(held, count, Progress(count, count, 0))
            self._kept[request_id] = kept
            self._past.pop(request_id, None)
            self._leases.grant(request_id, time.monotonic())
            if before is not None:
                kept.name, kept.followers = before.name, before.followers
                if before.followers:
                    self._reading[request_id] = time.monotonic() + self._reading_s
                if before.released:
                    self._free(request_id)
            self._changed.notify_all()

    def begin(self, request_id: str, begun: Begun) -> None:
        """A prefill that may be followed has come; nothing of it is computed."""
        with self._changed:
            held = Held(begun.epoch, begun.prompt_digest, ())
            kept = _Kept(held, begun.num_blocks, NOTHING, begun.name, ended=False)
            # Declined before it came.
            kept.released = begun.name in self._past
            self._kept[request_id] = kept
            self._names[begun.name] = request_id
            self._changed.notify_all()

    def grow(
        self,
        request_id: str,
        blocks: tuple[int, ...],
        progress: Progress,
        computed: Computed | None = None,
    ) -> None:
        """More of a prefill is computed, or will be when the GPU has come to `computed`.

        `blocks`: all that the prompt has so far.
        """
        with self._changed:
            kept = self._kept.get(request_id)
            if kept is None or kept.ended:
                return
            if len(blocks) != len(kept.held.blocks):
                kept.held = Held(kept.held.epoch, kept.held.prompt_digest, blocks)
            kept.progress, kept.computed = progress, computed
            self._changed.notify_all()

    def give_up(self, request_id: str) -> None:
        """A prefill ends without being held, or begins anew in other blocks."""
        with self._changed:
            kept = self._kept.get(request_id)
            if kept is not None and not kept.ended:
                self._forget(request_id)

    def follow(
        self,
        visitor: Visitor,
        name: str,
        prompt_digest: str,
        seen: Progress,
        wait_s: float,
        *,
        again: bool,
    ) -> News:
        """Wait for more of a prefill than a reader has seen. Raises RefusedError.

        Returns what it has seen when nothing comes in time. `again`: the reader has asked before;
        no other engine may from then on, and each rank that has asked must release the prefill.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_more(name, seen), wait_s)
            kept = self._find(self._names.get(name, ""), prompt_digest)
            followed_by = {one.boot_id for one in kept.followers}
            if followed_by - {visitor.boot_id} or (visitor in kept.followers) is not again:
                raise RefusedError(Reason.BUSY, "somebody reads it, or did")
            kept.followers.add(visitor)
            request_id, progress, computed = self._names[name], kept.progress, kept.computed
            news = News(request_id, kept.held.epoch, progress)
            if kept.ended:
                self._reading.setdefault(request_id, time.monotonic() + self._reading_s)
        if computed is not None:
            computed.synchronize()
        return news

    def look(
        self, visitor: Visitor, request_id: str, epoch: int, prompt_digest: str, piece: Piece
    ) -> tuple[int, ...]:
        """Blocks of a piece for a reader that follows the prefill. Raises RefusedError."""
        with self._changed:
            self._expire()
            kept = self._find(request_id, prompt_digest, epoch)
            progress, end = kept.progress, piece.first_block + piece.num_blocks
            final = end <= progress.blocks or (
                end <= progress.coming and piece.first_plane + piece.num_planes <= progress.planes
            )
            wanted = kept.held.blocks[piece.first_block : end]
            if visitor not in kept.followers or not final or len(wanted) != piece.num_blocks:
                raise RefusedError(Reason.MALFORMED, "not announced to this reader")
            return wanted

    def take(
        self, request_id: str, epoch: int, prompt_digest: str, blocks: slice, wait_s: float
    ) -> tuple[int, ...]:
        """Blocks for a reader, which must release them. Raises RefusedError.

        A reader may be faster than the engine's own word that the prefill is done: it is waited
        for, unless the request is over already.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled(request_id), wait_s)
            self._expire()
            kept = self._find(request_id, prompt_digest, epoch)
            if not kept.ended:
                raise RefusedError(Reason.NOT_HELD, "the prefill has not ended")
            if request_id in self._reading:
                raise RefusedError(Reason.BUSY, "somebody reads it")
            held = kept.held
            wanted = held.blocks[blocks]
            if not 0 <= blocks.start <= blocks.stop or len(wanted) != blocks.stop - blocks.start:
                raise RefusedError(Reason.MALFORMED, f"{len(held.blocks)} blocks are held")
            self._reading[request_id] = time.monotonic() + self._reading_s
            return wanted

    def release(self, request_id: str, epoch: int) -> bool:
        """Free what was read or is not wanted; whether it had been held until now, all of it.

        By name, with epoch 0, where the reader knows no more: also before the prefill has come.
        """
        with self._changed:
            self._expire()
            if not epoch:
                self._remember(request_id)
                request_id = self._names.get(request_id, "")
            kept = self._kept.get(request_id)
            if kept is None or epoch not in (0, kept.held.epoch):
                return False
            if kept.ended:
                self._free(request_id)
                return True
            kept.released = True
            return kept.progress.blocks == kept.num_blocks

    def has(self, request_id: str, epoch: int) -> bool:
        """Whether a prefill, all of it, has been held until now."""
        with self._changed:
            self._expire()
            kept = self._kept.get(request_id)
            return (
                kept is not None
                and kept.held.epoch == epoch
                and kept.progress.blocks == kept.num_blocks
            )

    def extend(self, request_ids: Iterable[str]) -> None:
        """A heartbeat came for these, by id or by name."""
        with self._changed:
            now = time.monotonic()
            self._expire()
            for request_id in request_ids:
                self._leases.extend(self._names.get(request_id, request_id), now)

    def take_freed(self) -> set[str]:
        """Requests whose blocks the engine may use again, each told once."""
        with self._changed:
            self._expire()
            freed, self._freed = self._freed, set()
            return freed

    @property
    def num_held(self) -> int:
        """Requests whose blocks are kept now."""
        with self._changed:
            return len(self._kept)

    def _expire(self) -> None:
        now = time.monotonic()
        over = [one for one, until in self._reading.items() if until <= now]
        for request_id in [*over, *self._leases.expire(now)]:
            # Whose lease ends while it is read is kept until the reader's own time is over.
            if self._reading.get(request_id, now) <= now and request_id in self._kept:
                self.num_expired += 1
                self._free(request_id)

    def _is_settled(self, request_id: str) -> bool:
        kept = self._kept.get(request_id)
        return kept.ended if kept is not None else request_id in self._past

    def _has_more(self, name: str, seen: Progress) -> bool:
        kept = self._kept.get(self._names.get(name, ""))
        return kept.progress != seen if kept is not None else name in self._past

    def _find(self, request_id: str, prompt_digest: str, epoch: int | None = None) -> _Kept:
        kept = self._kept.get(request_id)
        if kept is None:
            raise RefusedError(Reason.NOT_HELD, "the request is not held (any more)")
        if epoch not in (None, kept.held.epoch):
            raise RefusedError(Reason.EPOCH, f"held as number {kept.held.epoch}, not {epoch}")
        if kept.held.prompt_digest != prompt_digest:
            raise RefusedError(Reason.PROMPT, "held for other tokens")
        return kept

    def _free(self, request_id: str) -> None:
        self._freed.add(request_id)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        kept = self._kept.pop(request_id)
        self._reading.pop(request_id, None)
        self._leases.end(request_id)
        self._remember(request_id)
        if self._names.get(kept.name) == request_id:
            del self._names[kept.name]
            self._remember(kept.name)
        self._changed.notify_all()

    def _remember(self, request_id: str) -> None:
        self._past[request_id] = None
        while len(self._past) > _REMEMBERED:
            self._past.popitem(last=False)
