"""Leases on the KV blocks of prefills: which blocks an engine must not reuse until they are pulled.

Shared by the engine's thread, which leases and frees, and the server threads that serve consumers.
What is hard: blocks must not be freed while a consumer reads them, and a consumer that hangs must
not pin them for ever. So each read has a deadline of its own; a consumer that missed it learns this
when it releases the blocks, and discards what it has read. The ranks of one engine may pull a
prefill layer by layer while it runs: its lease then starts when it ends, and blocks that are
released earlier are freed at the end.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cleave_worker.transfer.handoff import Reason, RefusedError
from cleave_worker.transfer.leases import Leases
from cleave_worker.transfer.progress import NOTHING, Piece, Progress

_REMEMBERED = 4096
"""Past requests that are remembered; a request for one of them is refused without waiting."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """A rank of a consumer engine."""

    boot_id: str
    rank: int
    num_ranks: int
    """Number of ranks of that engine that will connect to this producer rank."""


class Computed(Protocol):
    """A point in a GPU's command queue, such as torch.cuda.Event."""

    def synchronize(self) -> None:
        """Block until the GPU has reached this point."""


@dataclass(frozen=True, slots=True)
class Held:
    """A finished prefill whose blocks can be pulled."""

    epoch: int
    prompt_digest: str
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Begun:
    """A running prefill that a consumer may pull layer by layer."""

    epoch: int
    prompt_digest: str
    num_blocks: int
    """Blocks that the prompt will have when it is computed."""
    name: str
    """The name that consumers use for the request, as they do not have the engine's request id
    yet."""


class News(NamedTuple):
    """How far a prefill has come, as returned to a layerwise consumer."""

    request_id: str
    epoch: int
    progress: Progress


@dataclass(slots=True)
class _Kept:
    """A prefill that consumers may pull, running or finished."""

    held: Held
    num_blocks: int
    progress: Progress
    name: str = ""
    computed: Computed | None = None
    """`progress` holds once the GPU has reached this point; None: it holds already."""
    ended: bool = True
    followers: set[Visitor] = field(default_factory=set)
    """All are ranks of one engine."""
    released: bool = False
    """Released by its consumers before it has finished."""


class Holds:
    """Leases by request id; one object per rank."""

    def __init__(self, lease_s: float, reading_s: float) -> None:
        """`reading_s`: longest time in seconds from the start of a read to its release."""
        self._leases = Leases(lease_s)
        self._reading_s = reading_s
        self._kept: dict[str, _Kept] = {}
        self._names: dict[str, str] = {}
        """Name of a running prefill to the engine's request id."""
        self._reading: dict[str, float] = {}
        self._past: OrderedDict[str, None] = OrderedDict()
        self._freed: set[str] = set()
        self._changed = threading.Condition()
        self.num_expired = 0

    def hold(self, request_id: str, prefill: Held) -> None:
        """Start the lease of a prefill that has just finished."""
        with self._changed:
            previous = self._kept.get(request_id)
            count = len(prefill.blocks)
            leased = _Kept(prefill, count, Progress(count, count, 0))
            self._kept[request_id] = leased
            self._past.pop(request_id, None)
            self._leases.grant(request_id, time.monotonic())
            if previous is not None:
                leased.name, leased.followers = previous.name, previous.followers
                if previous.followers:
                    self._reading[request_id] = time.monotonic() + self._reading_s
                if previous.released:
                    self._free(request_id)
            self._changed.notify_all()

    def begin(self, request_id: str, started: Begun) -> None:
        """Register a running prefill for layerwise consumers; none of it is computed yet."""
        with self._changed:
            prefill = Held(started.epoch, started.prompt_digest, ())
            leased = _Kept(prefill, started.num_blocks, NOTHING, started.name, ended=False)
            # The consumer may have declined it before it was registered.
            leased.released = started.name in self._past
            self._kept[request_id] = leased
            self._names[started.name] = request_id
            self._changed.notify_all()

    def grow(
        self,
        request_id: str,
        blocks: tuple[int, ...],
        progress: Progress,
        computed: Computed | None = None,
    ) -> None:
        """Record that more is computed, or will be once the GPU has reached `computed`.

        `blocks`: all blocks that the prompt has so far.
        """
        with self._changed:
            leased = self._kept.get(request_id)
            if leased is None or leased.ended:
                return
            if len(blocks) != len(leased.held.blocks):
                leased.held = Held(leased.held.epoch, leased.held.prompt_digest, blocks)
            leased.progress, leased.computed = progress, computed
            self._changed.notify_all()

    def give_up(self, request_id: str) -> None:
        """Forget a running prefill that was aborted, or preempted and so recomputed in other
        blocks."""
        with self._changed:
            leased = self._kept.get(request_id)
            if leased is not None and not leased.ended:
                self._forget(request_id)

    def follow(
        self,
        consumer: Visitor,
        name: str,
        prompt_digest: str,
        previous: Progress,
        wait_s: float,
        *,
        again: bool,
    ) -> News:
        """Wait until a prefill has more than `previous`. Raises RefusedError.

        Returns the unchanged progress after `wait_s`. `again`: not this consumer rank's first call.
        The first call reserves the prefill for one engine, whose calling ranks must all release it.
        """
        # 1. Wait for progress. 2. Reserve the prefill for this engine. 3. Start the deadline of a
        # finished prefill. 4. Wait for the GPU, outside the lock, so that the progress is true.
        with self._changed:
            self._changed.wait_for(lambda: self._has_more(name, previous), wait_s)
            leased = self._find(self._names.get(name, ""), prompt_digest)
            engines = {rank.boot_id for rank in leased.followers}
            if engines - {consumer.boot_id} or (consumer in leased.followers) is not again:
                raise RefusedError(Reason.BUSY, "another consumer reads it, or has read it")
            leased.followers.add(consumer)
            request_id, progress, event = self._names[name], leased.progress, leased.computed
            update = News(request_id, leased.held.epoch, progress)
            if leased.ended:
                self._reading.setdefault(request_id, time.monotonic() + self._reading_s)
        if event is not None:
            event.synchronize()
        return update

    def look(
        self, consumer: Visitor, request_id: str, epoch: int, prompt_digest: str, chunk: Piece
    ) -> tuple[int, ...]:
        """Return the blocks of a chunk for a layerwise consumer. Raises RefusedError."""
        with self._changed:
            self._expire()
            leased = self._find(request_id, prompt_digest, epoch)
            progress, end = leased.progress, chunk.first_block + chunk.num_blocks
            final = end <= progress.blocks or (
                end <= progress.coming and chunk.first_plane + chunk.num_planes <= progress.planes
            )
            blocks = leased.held.blocks[chunk.first_block : end]
            if consumer not in leased.followers or not final or len(blocks) != chunk.num_blocks:
                raise RefusedError(Reason.MALFORMED, "the chunk was not announced to this consumer")
            return blocks

    def take(
        self, request_id: str, epoch: int, prompt_digest: str, blocks: slice, wait_s: float
    ) -> tuple[int, ...]:
        """Lease blocks to a consumer, which must release them. Raises RefusedError.

        A consumer may ask before the engine has reported the end of the prefill. It then waits up
        to `wait_s`, unless the request is known to be over.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled(request_id), wait_s)
            self._expire()
            leased = self._find(request_id, prompt_digest, epoch)
            if not leased.ended:
                raise RefusedError(Reason.NOT_HELD, "the prefill is still running")
            if request_id in self._reading:
                raise RefusedError(Reason.BUSY, "another consumer reads it")
            prefill = leased.held
            granted = prefill.blocks[blocks]
            if not 0 <= blocks.start <= blocks.stop or len(granted) != blocks.stop - blocks.start:
                raise RefusedError(Reason.MALFORMED, f"{len(prefill.blocks)} blocks are leased")
            self._reading[request_id] = time.monotonic() + self._reading_s
            return granted

    def release(self, request_id: str, epoch: int) -> bool:
        """Free the blocks; return whether all of them were leased until now.

        With epoch 0 `request_id` is a prefill's name, also of a prefill that is not registered yet.
        """
        with self._changed:
            self._expire()
            if not epoch:
                self._remember(request_id)
                request_id = self._names.get(request_id, "")
            leased = self._kept.get(request_id)
            if leased is None or epoch not in (0, leased.held.epoch):
                return False
            if leased.ended:
                self._free(request_id)
                return True
            leased.released = True
            return leased.progress.blocks == leased.num_blocks

    def has(self, request_id: str, epoch: int) -> bool:
        """Return whether a prefill is complete and still leased."""
        with self._changed:
            self._expire()
            leased = self._kept.get(request_id)
            return (
                leased is not None
                and leased.held.epoch == epoch
                and leased.progress.blocks == leased.num_blocks
            )

    def extend(self, request_ids: Iterable[str]) -> None:
        """Extend the leases of these requests, by id or by name, after a heartbeat."""
        with self._changed:
            now = time.monotonic()
            self._expire()
            for request_id in request_ids:
                self._leases.extend(self._names.get(request_id, request_id), now)

    def take_freed(self) -> set[str]:
        """Return the requests whose blocks the engine may reuse; each is returned once."""
        with self._changed:
            self._expire()
            freed, self._freed = self._freed, set()
            return freed

    @property
    def num_held(self) -> int:
        """Requests whose blocks are leased now."""
        with self._changed:
            return len(self._kept)

    def _expire(self) -> None:
        now = time.monotonic()
        overdue = [read_id for read_id, deadline in self._reading.items() if deadline <= now]
        for request_id in [*overdue, *self._leases.expire(now)]:
            # A lease that ends during a read lasts until the deadline of that read.
            if self._reading.get(request_id, now) <= now and request_id in self._kept:
                self.num_expired += 1
                self._free(request_id)

    def _is_settled(self, request_id: str) -> bool:
        leased = self._kept.get(request_id)
        return leased.ended if leased is not None else request_id in self._past

    def _has_more(self, name: str, previous: Progress) -> bool:
        leased = self._kept.get(self._names.get(name, ""))
        return leased.progress != previous if leased is not None else name in self._past

    def _find(self, request_id: str, prompt_digest: str, epoch: int | None = None) -> _Kept:
        leased = self._kept.get(request_id)
        if leased is None:
            raise RefusedError(Reason.NOT_HELD, "no lease for this request, or it has ended")
        if epoch not in (None, leased.held.epoch):
            raise RefusedError(Reason.EPOCH, f"leased with epoch {leased.held.epoch}, not {epoch}")
        if leased.held.prompt_digest != prompt_digest:
            raise RefusedError(Reason.PROMPT, "leased for other prompt tokens")
        return leased

    def _free(self, request_id: str) -> None:
        self._freed.add(request_id)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        leased = self._kept.pop(request_id)
        self._reading.pop(request_id, None)
        self._leases.end(request_id)
        self._remember(request_id)
        if self._names.get(leased.name) == request_id:
            del self._names[leased.name]
            self._remember(leased.name)
        self._changed.notify_all()

    def _remember(self, request_id: str) -> None:
        self._past[request_id] = None
        while len(self._past) > _REMEMBERED:
            self._past.popitem(last=False)
