"""Faults that a test switches on in an emulated engine. Read by engine, API and KV door."""

import asyncio
import os

import msgspec

_SETTINGS = (
    "slow",
    "refuse",
    "corrupt_handoff",
    "stale_handoff",
    "short_handoff",
    "wrong_kv",
    "swap_handoff",
    "empty_handoff",
    "drop",
)


class FaultError(ValueError):
    """The asked fault is not understood."""


class FaultSpec(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /emulator/faults; what is absent stays as it was."""

    slow: float | None = None
    """Iterations take this many times longer."""
    hang: bool | None = None
    """The engine loop stops; /health still answers."""
    die: bool | None = None
    """The process ends at once with exit code 1."""
    refuse: bool | None = None
    """New requests get 503."""
    corrupt_handoff: int | None = None
    """So many next transfers out of this engine deliver altered block contents."""
    stale_handoff: int | None = None
    """So many deliver what the blocks held before the request."""
    short_handoff: int | None = None
    """So many deliver a block less than was asked for."""
    wrong_kv: int | None = None
    """So many deliver KV that was computed wrong: no checksum tells."""
    swap_handoff: int | None = None
    """So many next prefills answer with the hand-off of the prefill before them."""
    empty_handoff: int | None = None
    """So many next hand-offs into this engine end well without a byte: it computes the prompts, and
    counts no failure."""
    drop: int | None = None
    """Connections of streams close after so many tokens; 0 before the first."""


class Faults:
    """What is switched on now."""

    def __init__(self) -> None:
        self._resumed = asyncio.Event()
        self._last_handoff: dict[str, object] = {}
        self.clear()

    def clear(self) -> None:
        """Behave again."""
        self.slow = 1.0
        self.refuse = False
        self.corrupt_handoff = 0
        self.stale_handoff = 0
        self.short_handoff = 0
        self.wrong_kv = 0
        self.swap_handoff = 0
        self.empty_handoff = 0
        self.drop: int | None = None
        self._resumed.set()

    @property
    def hang(self) -> bool:
        """Whether the engine loop is stopped."""
        return not self._resumed.is_set()

    async def wait_until_resumed(self) -> None:
        """Return at once unless the engine hangs; then wait for `clear` or `hang: false`."""
        await self._resumed.wait()

    def apply(self, body: bytes) -> None:
        """Switch on what a request's body asks for. Raises FaultError on a malformed body."""
        try:
            spec = msgspec.json.decode(body, type=FaultSpec)
        except msgspec.DecodeError as error:
            raise FaultError(str(error)) from error
        if spec.slow is not None and spec.slow <= 0:
            raise FaultError("slow must be above 0")
        if spec.die:
            os._exit(1)
        self._switch(spec)

    def spend(self, name: str) -> bool:
        """Whether a fault that is on for so many times is on now; it is so once less."""
        left: int = getattr(self, name)
        setattr(self, name, max(left - 1, 0))
        return left > 0

    def mix_up(self, hand_off: dict[str, object]) -> dict[str, object]:
        """What a prefill answers instead of its own hand-off."""
        before, self._last_handoff = self._last_handoff, hand_off
        return before if before and self.spend("swap_handoff") else hand_off

    def describe(self) -> dict[str, object]:
        """What is on, as JSON."""
        return {
            "slow": self.slow,
            "hang": self.hang,
            "refuse": self.refuse,
            "corrupt_handoff": self.corrupt_handoff,
            "stale_handoff": self.stale_handoff,
            "short_handoff": self.short_handoff,
            "wrong_kv": self.wrong_kv,
            "swap_handoff": self.swap_handoff,
            "empty_handoff": self.empty_handoff,
            "drop": self.drop,
        }

    def _switch(self, spec: FaultSpec) -> None:
        for name in _SETTINGS:
            value = getattr(spec, name)
            if value is not None:
                setattr(self, name, value)
        if spec.hang:
            self._resumed.clear()
        elif spec.hang is not None:
            self._resumed.set()
