"""Faults that a test injects into an emulated engine. Read by engine, API and KV side channel."""

import asyncio
import enum
import os
import sys
from collections.abc import Mapping

import msgspec

POISON = "poison pill"
"""With fault injection, a request that contains this ends the process, as requests have ended
vLLM's (CVE-2025-48942)."""
POISONED = "emulated engine: a request ended this process"
"""What the process then writes to its log."""


class FaultError(ValueError):
    """The body of a fault request is invalid."""


class PairFault(enum.Enum):
    """What is wrong with the handoffs from one engine; no checksum and no counter shows it."""

    EMPTY = "empty"
    """They succeed without a byte: this engine computes the prompts itself."""
    LOST = "lost"
    """They fail, and are counted."""
    LAYOUT = "layout"
    """The blocks arrive in another order."""
    STALE = "stale"
    """The first block is that of the handoff before."""
    SWAPPED = "swapped"
    """All blocks are those of the handoff before."""
    HUNG = "hung"
    """They never end, until the request is aborted."""
    SLOW = "slow"
    """They take twenty times as long."""


class FaultSpec(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /emulator/faults; absent fields stay unchanged."""

    slow: float | None = None
    """Factor on the duration of iterations."""
    hang: bool | None = None
    """The engine loop stops; /health still responds."""
    die: bool | None = None
    """The process ends at once with exit code 1."""
    refuse: bool | None = None
    """New requests get 503."""
    corrupt_handoff: int | None = None
    """This many next transfers out of this engine deliver altered block contents."""
    stale_handoff: int | None = None
    """This many next transfers deliver what the blocks contained before the request."""
    short_handoff: int | None = None
    """This many next transfers deliver one block less than was requested."""
    wrong_kv: int | None = None
    """This many next transfers deliver wrongly computed KV with a valid checksum."""
    swap_handoff: int | None = None
    """This many next prefills return the handoff of the prefill before them."""
    empty_handoff: int | None = None
    """This many next handoffs into this engine succeed without a byte: it computes the prompts
    itself and counts no failure."""
    pairs: dict[str, PairFault] | None = None
    """By engine id (boot): what is wrong with handoffs from there into this engine."""
    drop: int | None = None
    """Connections of streams close after this many tokens; 0: before the first."""


_COUNTED = (
    "corrupt_handoff", "stale_handoff", "short_handoff", "wrong_kv", "swap_handoff",
    "empty_handoff",
)  # fmt: skip


def end_if_poisoned(body: bytes) -> None:
    """End this process with exit code 1 if the request contains POISON."""
    if POISON.encode() in body:
        sys.stderr.write(f"{POISONED}\n")
        os._exit(1)


class Faults:
    """The active faults of one engine."""

    def __init__(self) -> None:
        self._resumed = asyncio.Event()
        self._last_handoff: dict[str, object] = {}
        self.clear()

    def clear(self) -> None:
        """Deactivate all faults."""
        self.slow = 1.0
        self.refuse = False
        self.drop: int | None = None
        self.pairs: Mapping[str, PairFault] = {}
        self._remaining = dict.fromkeys(_COUNTED, 0)
        self._resumed.set()

    @property
    def hang(self) -> bool:
        """Whether the engine loop is stopped."""
        return not self._resumed.is_set()

    async def wait_until_resumed(self) -> None:
        """Return at once unless the engine hangs; then wait for `clear` or `hang: false`."""
        await self._resumed.wait()

    def apply(self, body: bytes) -> None:
        """Activate the faults of a request's body. Raises FaultError for an invalid body."""
        try:
            spec = msgspec.json.decode(body, type=FaultSpec)
        except msgspec.DecodeError as error:
            raise FaultError(str(error)) from error
        if spec.slow is not None and spec.slow <= 0:
            raise FaultError("slow must be above 0")
        if spec.die:
            os._exit(1)
        self.slow = self.slow if spec.slow is None else spec.slow
        self.refuse = self.refuse if spec.refuse is None else spec.refuse
        self.drop = self.drop if spec.drop is None else spec.drop
        self.pairs = self.pairs if spec.pairs is None else spec.pairs
        for name in _COUNTED:
            if (count := getattr(spec, name)) is not None:
                self._remaining[name] = count
        if spec.hang:
            self._resumed.clear()
        elif spec.hang is not None:
            self._resumed.set()

    def consume(self, name: str) -> bool:
        """Return whether a counted fault is active, and decrement its count."""
        remaining = self._remaining[name]
        self._remaining[name] = max(remaining - 1, 0)
        return remaining > 0

    def swap_handoffs(self, handoff: dict[str, object]) -> dict[str, object]:
        """Return the handoff that a prefill returns, its own or the previous one."""
        previous, self._last_handoff = self._last_handoff, handoff
        return previous if previous and self.consume("swap_handoff") else handoff

    def describe(self) -> dict[str, object]:
        """Return the active faults as JSON."""
        switches = {"slow": self.slow, "hang": self.hang, "refuse": self.refuse}
        pairs = {engine: fault.value for engine, fault in self.pairs.items()}
        return {**switches, **self._remaining, "pairs": pairs, "drop": self.drop}
