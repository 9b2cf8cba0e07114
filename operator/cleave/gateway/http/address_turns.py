"""Connections take turns in a share of the event loop's time: whose address owes least goes first.

For TLS handshakes, and for what is read of clients that have sent no key. What is hard: a first
message of a handshake costs half a millisecond of computing, and so does a packet of pipelined
requests. A client that uses the gateway is served at once, however many connections wait that lead
to nothing. Of one address, as of a NAT with an attacker behind it, some go before the others, then
the newest: these are in time then, while first come, first served makes all wait too long
("adaptive LIFO": Maurer, Fail at Scale, 2015).
"""

import math
from collections.abc import Callable
from typing import Protocol

from cleave.gateway.event_loop_faults import contain
from cleave.gateway.http.address_debts import AddressDebts
from cleave.gateway.http.ranked_addresses import RankedAddresses
from cleave.time_slices import SliceQueue, Steps


class WaitingConnection(Protocol):
    """A connection with bytes that have not been handled."""

    def take_turn(self) -> None:
        """Handle what has come; nothing if the connection has closed."""

    def fail(self) -> None:
        """Close after a fault of this program."""


Waiting = dict[WaitingConnection, None]


class AddressTurns:
    """Those of one kind, in one process."""

    def __init__(self, share: float, clock: Callable[[], float], debts: AddressDebts) -> None:
        """`share`: of the event loop's time, for all of them together; `clock`: seconds."""
        self._slices = SliceQueue(share, clock)
        self._debts = debts
        self._is_running = False
        self._waiting: dict[str, tuple[Waiting, Waiting]] = {}
        """By address: those that go first, and others."""
        self._ranked = RankedAddresses()
        """By what they owed when they were looked at last."""

    def add(self, connection: WaitingConnection, address: str, *, goes_first: bool) -> None:
        """Give a connection a turn, at once if none waits. `goes_first`: before the others of its
        address; the same until its turn."""
        first, others = self._waiting.setdefault(address, ({}, {}))
        (first if goes_first else others)[connection] = None
        self._ranked.rank(address, self._debts.get(address))
        if not self._is_running:
            self._is_running = True
            self._slices.start(self._take_turns())

    def remove(self, connection: WaitingConnection, address: str) -> None:
        """A connection has ended; it may wait or not."""
        for waiting in self._waiting.get(address, ()):
            waiting.pop(connection, None)
        self._update(address)

    def _take_turns(self) -> Steps[None]:
        try:
            while self._waiting:
                address = next(self._ranked.take_turns(math.inf))
                first, others = self._waiting[address]
                connection, _ = (first or others).popitem()
                self._debts.add(address, 1)
                self._update(address)
                contain(connection.fail, connection.take_turn)
                yield
        finally:
            self._is_running = False

    def _update(self, address: str) -> None:
        """Connections of an address have been taken, and it may owe more."""
        if any(self._waiting.get(address, ())):
            self._ranked.rank(address, self._debts.get(address))
        else:
            self._waiting.pop(address, None)
            self._ranked.remove(address)
