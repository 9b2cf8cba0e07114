"""Several ranks of one engine that come for the same held blocks, and who of them is the last.

Between an owner's connections and its holds: for the holds all of them are one reader. What is
hard: ranks come in any order and some only to say that they want nothing, so the blocks are free
when all have been there, or one of them was lost: then nothing that the others read is used. Who
follows a prefill is known to the holds; here its ranks only have their last words.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from cleave_worker.transfer.holds import Holds, Visitor
from cleave_worker.transfer.identity import Reason, RefusedError

_REMEMBERED = 4096
"""Holds that some ranks have come for, and the others perhaps never will."""


@dataclass(frozen=True, slots=True)
class Ask:
    """For blocks of a held prompt."""

    request_id: str
    epoch: int
    prompt_digest: str
    first_block: int
    num_blocks: int

    @property
    def wanted(self) -> slice:
        """Of the prompt's blocks."""
        return slice(self.first_block, self.first_block + self.num_blocks)


@dataclass(slots=True)
class _Turn:
    boot_id: str
    ask: Ask | None = None
    blocks: tuple[int, ...] = ()
    came: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Turns:
    """Of one owner."""

    def __init__(self, holds: Holds) -> None:
        self._holds = holds
        self._turns: OrderedDict[tuple[str, int], _Turn] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, visitor: Visitor, ask: Ask, wait_s: float) -> tuple[int, ...]:
        """Blocks for a visitor, which must release them. Raises RefusedError."""
        if visitor.num_ranks == 1:
            return self._take(ask, wait_s)
        turn = self._turn(visitor, ask.request_id, ask.epoch)
        with turn.lock:
            if turn.boot_id != visitor.boot_id or visitor.rank in turn.came:
                raise RefusedError(Reason.BUSY, "somebody reads it, or did")
            if turn.ask is None:
                turn.blocks = self._take(ask, wait_s)
                turn.ask = ask
            elif turn.ask != ask:
                raise RefusedError(Reason.MALFORMED, "another rank of yours asked for other blocks")
            turn.came.add(visitor.rank)
            return turn.blocks

    def release(self, visitor: Visitor, request_id: str, epoch: int) -> bool:
        """A visitor has read, or wants nothing; whether the blocks had been held until now."""
        if visitor.num_ranks == 1:
            return self._holds.release(request_id, epoch)
        turn = self._turn(visitor, request_id, epoch)
        with turn.lock:
            if turn.boot_id != visitor.boot_id:
                return False
            turn.came.add(visitor.rank)
            turn.done.add(visitor.rank)
            if len(turn.done) < visitor.num_ranks:
                return self._holds.has(request_id, epoch)
            return self._end(request_id, epoch)

    def abandon(self, request_id: str, epoch: int) -> None:
        """A visitor was lost while it read."""
        self._end(request_id, epoch)

    def _take(self, ask: Ask, wait_s: float) -> tuple[int, ...]:
        return self._holds.take(ask.request_id, ask.epoch, ask.prompt_digest, ask.wanted, wait_s)

    def _turn(self, visitor: Visitor, request_id: str, epoch: int) -> _Turn:
        with self._lock:
            turn = self._turns.setdefault((request_id, epoch), _Turn(visitor.boot_id))
            while len(self._turns) > _REMEMBERED:
                self._turns.popitem(last=False)
            return turn

    def _end(self, request_id: str, epoch: int) -> bool:
        with self._lock:
            self._turns.pop((request_id, epoch), None)
        return self._holds.release(request_id, epoch)
