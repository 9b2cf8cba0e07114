"""What an owner keeps for others: blocks of finished prefills, under leases, until they are read.

Shared by the engine's thread, which holds and frees, and the threads that serve readers. What is
hard: blocks must not be given up while somebody reads them, and a reader that stands still must not
keep them for ever. Reading has a bound of its own; a reader whose time was over learns it when it
releases the blocks, and throws away what it has read.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from cleave_worker.transfer.identity import Reason, RefusedError
from cleave_worker.transfer.leases import Leases

_REMEMBERED = 4096
"""Requests of the past; who asks for one of them is refused at once."""


@dataclass(frozen=True, slots=True)
class Held:
    """A finished prefill."""

    epoch: int
    prompt_digest: str
    blocks: tuple[int, ...]


class Holds:
    """Request ids with what is held for them."""

    def __init__(self, lease_s: float, reading_s: float) -> None:
        """`reading_s`: longest time that a reader may take, once it has begun."""
        self._leases = Leases(lease_s)
        self._reading_s = reading_s
        self._held: dict[str, Held] = {}
        self._reading: dict[str, float] = {}
        self._past: OrderedDict[str, None] = OrderedDict()
        self._freed: set[str] = set()
        self._changed = threading.Condition()
        self.num_expired = 0

    def hold(self, request_id: str, held: Held) -> None:
        """Start the lease of a prefill that has finished."""
        with self._changed:
            self._held[request_id] = held
            self._past.pop(request_id, None)
            self._leases.grant(request_id, time.monotonic())
            self._changed.notify_all()

    def take(
        self, request_id: str, epoch: int, prompt_digest: str, blocks: slice, wait_s: float
    ) -> tuple[int, ...]:
        """Blocks for a reader, which must release them. Raises RefusedError.

        A reader may be faster than the engine's own word that the prefill is done: it is waited
        for, unless the request is over already.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: request_id in self._held or request_id in self._past, wait_s
            )
            self._expire()
            held = self._held.get(request_id)
            if held is None:
                raise RefusedError(Reason.NOT_HELD, "the request is not held (any more)")
            if held.epoch != epoch:
                raise RefusedError(Reason.EPOCH, f"held as number {held.epoch}, not {epoch}")
            if held.prompt_digest != prompt_digest:
                raise RefusedError(Reason.PROMPT, "held for other tokens")
            if request_id in self._reading:
                raise RefusedError(Reason.BUSY, "somebody reads it")
            wanted = held.blocks[blocks]
            if not 0 <= blocks.start <= blocks.stop or len(wanted) != blocks.stop - blocks.start:
                raise RefusedError(Reason.MALFORMED, f"{len(held.blocks)} blocks are held")
            self._reading[request_id] = time.monotonic() + self._reading_s
            return wanted

    def release(self, request_id: str, epoch: int) -> bool:
        """Free what was read or is not wanted; whether it had been held until now."""
        with self._changed:
            self._expire()
            held = self._held.get(request_id)
            if held is None or held.epoch != epoch:
                return False
            self._free(request_id)
            return True

    def extend(self, request_ids: Iterable[str]) -> None:
        """A heartbeat came for these."""
        with self._changed:
            now = time.monotonic()
            self._expire()
            for request_id in request_ids:
                self._leases.extend(request_id, now)

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
            return len(self._held)

    def _expire(self) -> None:
        now = time.monotonic()
        over = [one for one, until in self._reading.items() if until <= now]
        for request_id in [*over, *self._leases.expire(now)]:
            # Whose lease ends while it is read is kept until the reader's own time is over.
            if self._reading.get(request_id, now) <= now and request_id in self._held:
                self.num_expired += 1
                self._free(request_id)

    def _free(self, request_id: str) -> None:
        del self._held[request_id]
        self._reading.pop(request_id, None)
        self._leases.end(request_id)
        self._freed.add(request_id)
        self._past[request_id] = None
        while len(self._past) > _REMEMBERED:
            self._past.popitem(last=False)
        self._changed.notify_all()
