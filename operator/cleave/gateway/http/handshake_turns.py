"""TLS handshakes take turns: of each address some, in a share of the event loop's time.

Used by `tls_connection`. What is hard: a first message of a client costs half a millisecond of
computing and can be sent again and again, over any number of connections. So computing has a limit
for all together, and addresses share it: one with thousands of handshakes delays its own.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from cleave.time_slices import SliceQueue, Steps


class Handshake(Protocol):
    """A connection with bytes of its handshake."""

    def run_handshake(self) -> None:
        """Handle what has come; nothing if the connection has closed."""


class HandshakeTurns:
    """The handshakes of one process."""

    def __init__(self, share: float, clock: Callable[[], float]) -> None:
        """`share`: of the event loop's time, for all of them together; `clock`: seconds."""
        self._slices = SliceQueue(share, clock)
        self._waiting: dict[str, deque[Handshake]] = {}
        """By address."""

    def add(self, handshake: Handshake, address: str, *, has_begun: bool) -> None:
        """Continue a handshake, at once if none waits; it must not wait already. `has_begun`: it
        goes before those of its address that have not."""
        waiting = self._waiting.get(address)
        if waiting is None:
            self._waiting[address] = deque((handshake,))
            self._slices.start(self._take_turns(address))
        elif has_begun:
            waiting.appendleft(handshake)
        else:
            waiting.append(handshake)

    def _take_turns(self, address: str) -> Steps[None]:
        waiting = self._waiting[address]
        try:
            while waiting:
                waiting.popleft().run_handshake()
                yield
        finally:
            del self._waiting[address]
