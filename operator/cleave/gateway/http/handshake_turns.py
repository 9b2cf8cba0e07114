"""TLS handshakes take turns in a share of the event loop's time: who owes least goes first.

Used by `tls_connection`. What is hard: a first message of a client costs half a millisecond of
computing. A client that uses the gateway is served at once, however many handshakes wait that lead
to nothing. Of one address, as of a NAT with an attacker behind it, those that have begun go first,
then the newest: some are in time then, while first come, first served makes all wait too long
("adaptive LIFO": Maurer, Fail at Scale, 2015).
"""

import math
from collections.abc import Callable
from typing import Protocol

from cleave.gateway.event_loop_faults import contain
from cleave.gateway.http.address_debts import AddressDebts
from cleave.gateway.http.ranked_addresses import RankedAddresses
from cleave.time_slices import SliceQueue, Steps


class Handshake(Protocol):
    """A connection with bytes of its handshake."""

    def run_handshake(self) -> None:
        """Handle what has come; nothing if the connection has closed."""

    def fail(self) -> None:
        """Close after a fault of this program."""


Waiting = dict[Handshake, None]


class HandshakeTurns:
    """The handshakes of one process."""

    def __init__(self, share: float, clock: Callable[[], float], debts: AddressDebts) -> None:
        """`share`: of the event loop's time, for all of them together; `clock`: seconds."""
        self._slices = SliceQueue(share, clock)
        self._debts = debts
        self._is_running = False
        self._waiting: dict[str, tuple[Waiting, Waiting]] = {}
        """By address: handshakes that have begun, and others."""
        self._ranked = RankedAddresses()
        """By what they owed when they were looked at last."""

    def add(self, handshake: Handshake, address: str, *, has_begun: bool) -> None:
        """Continue a handshake, at once if none waits; it must not wait already. `has_begun`: it
        goes before those of its address that have not."""
        begun, new = self._waiting.setdefault(address, ({}, {}))
        (begun if has_begun else new)[handshake] = None
        self._ranked.rank(address, self._debts.get(address))
        if not self._is_running:
            self._is_running = True
            self._slices.start(self._take_turns())

    def remove(self, handshake: Handshake, address: str) -> None:
        """A connection has ended; its handshake may wait or not."""
        for waiting in self._waiting.get(address, ()):
            waiting.pop(handshake, None)
        self._update(address)

    def _take_turns(self) -> Steps[None]:
        try:
            while self._waiting:
                address = next(self._ranked.take_turns(math.inf))
                begun, new = self._waiting[address]
                handshake, _ = (begun or new).popitem()
                self._debts.add(address, 1)
                self._update(address)
                contain(handshake.fail, handshake.run_handshake)
                yield
        finally:
            self._is_running = False

    def _update(self, address: str) -> None:
        """Handshakes of an address have been taken, and it may owe more."""
        if any(self._waiting.get(address, ())):
            self._ranked.rank(address, self._debts.get(address))
        else:
            self._waiting.pop(address, None)
            self._ranked.remove(address)
