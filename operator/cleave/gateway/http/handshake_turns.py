"""TLS handshakes take turns in a share of the event loop's time: who owes least goes first.

Used by `tls_connection`. What is hard: a first message of a client costs half a millisecond of
computing and can be sent again and again, over any number of connections and from many addresses.
Shares of equal size are no help: a busy client needs more than one of a hundred. So each turn is a
debt of its address, which a request with a key settles; a client that uses the gateway is served at
once, however many handshakes wait that lead to nothing. Of one address, as of a NAT with an
attacker behind it, those that have begun go first, then the newest: some are in time then, while
first come, first served makes all wait too long ("adaptive LIFO": Maurer, Fail at Scale, 2015).
"""

from collections.abc import Callable
from typing import Protocol

from cleave.gateway.event_loop_faults import contain
from cleave.time_slices import SliceQueue, Steps

SETTLED_TURNS = 4
"""A handshake takes two or three, so that who settles has credit ..."""
MAX_CREDIT = 32
"""... of so many turns."""
HALVING_S = 60.0
"""Debt and credit are halved so often."""
MAX_ADDRESSES = 4_096
"""With more of them debts are forgiven; credit, which takes a key, is kept if it can be."""


class Handshake(Protocol):
    """A connection with bytes of its handshake."""

    def run_handshake(self) -> None:
        """Handle what has come; nothing if the connection has closed."""

    def fail(self) -> None:
        """Close after a fault of this program."""


Waiting = dict[Handshake, None]


class HandshakeTurns:
    """The handshakes of one process."""

    def __init__(self, share: float, clock: Callable[[], float]) -> None:
        """`share`: of the event loop's time, for all of them together; `clock`: seconds."""
        self._slices = SliceQueue(share, clock)
        self._clock = clock
        self._is_running = False
        self._waiting: dict[str, tuple[Waiting, Waiting]] = {}
        """By address: handshakes that have begun, and others."""
        self._debts: dict[str, int] = {}
        """In turns, by address; negative: credit."""
        self._halved_at = clock()

    def add(self, handshake: Handshake, address: str, *, has_begun: bool) -> None:
        """Continue a handshake, at once if none waits; it must not wait already. `has_begun`: it
        goes before those of its address that have not."""
        begun, new = self._waiting.setdefault(address, ({}, {}))
        (begun if has_begun else new)[handshake] = None
        if not self._is_running:
            self._is_running = True
            self._slices.start(self._take_turns())

    def remove(self, handshake: Handshake, address: str) -> None:
        """A connection has ended; its handshake may wait or not."""
        for waiting in self._waiting.get(address, ()):
            waiting.pop(handshake, None)
        self._forget_served(address)

    def settle(self, address: str) -> None:
        """A new connection of this address has sent a request with a key."""
        self._add_debt(address, -SETTLED_TURNS)

    def has_credit(self, address: str) -> bool:
        """Whether its requests have settled more than its handshakes have cost."""
        return self._get_debt(address) < 0

    def _take_turns(self) -> Steps[None]:
        try:
            while self._waiting:
                address = min(self._waiting, key=self._get_debt)
                begun, new = self._waiting[address]
                handshake, _ = (begun or new).popitem()
                self._forget_served(address)
                self._add_debt(address, 1)
                contain(handshake.fail, handshake.run_handshake)
                yield
        finally:
            self._is_running = False

    def _get_debt(self, address: str) -> int:
        return self._debts.get(address, 0)

    def _forget_served(self, address: str) -> None:
        if not any(self._waiting.get(address, (True,))):
            del self._waiting[address]

    def _add_debt(self, address: str, turns: int) -> None:
        if self._clock() > self._halved_at + HALVING_S:
            self._halved_at = self._clock()
            halved = {other: int(debt / 2) for other, debt in self._debts.items()}
            self._debts = {other: debt for other, debt in halved.items() if debt}
        if len(self._debts) >= MAX_ADDRESSES:
            self._debts = {other: debt for other, debt in self._debts.items() if debt < 0}
        if len(self._debts) >= MAX_ADDRESSES:
            self._debts.clear()
        self._debts[address] = max(self._get_debt(address) + turns, -MAX_CREDIT)
