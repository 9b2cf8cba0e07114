"""What addresses owe for connections and TLS handshakes that have led to nothing yet.

Each costs something and can be sent again and again, from many addresses. Shares of equal size are
no help: a busy client needs more than one of a hundred. So each is a debt of its address, which a
request with a key settles; a client that uses the gateway has credit and goes first.
"""

from collections.abc import Callable

SETTLED = 6
"""A connection counts 1 and its handshake 2 or 3, so that who settles has credit ..."""
MAX_CREDIT = 32
"""... of so much."""
MAX_AWAITED = 16
"""With more connections that have led to nothing, credit does not count: else one key would be
enough to take all places with silent ones."""
HALVING_S = 60.0
"""Debt and credit are halved so often."""
MAX_ADDRESSES = 4_096
"""With more of them debts are forgiven; credit, which takes a key, is kept if it can be."""


class AddressDebts:
    """The debts of one process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._debts: dict[str, int] = {}
        """Negative: credit."""
        self._awaited: dict[str, int] = {}
        """Open connections that have led to nothing yet."""
        self._halved_at = clock()

    def get(self, address: str) -> int:
        """What it owes; negative: its credit."""
        return self._debts.get(address, 0)

    def has_credit(self, address: str) -> bool:
        """Whether its requests have settled more than its connections have cost, and few of these
        are still to send one."""
        return self._debts.get(address, 0) < 0 and self._awaited.get(address, 0) <= MAX_AWAITED

    def expect_request(self, address: str) -> None:
        """A connection, or its handshake, begins; `forget` or `settle` follows."""
        self._awaited[address] = self._awaited.get(address, 0) + 1

    def forget(self, address: str) -> None:
        """A connection ends without a request, or its handshake has ended."""
        left = self._awaited[address] - 1
        if left:
            self._awaited[address] = left
        else:
            del self._awaited[address]

    def settle(self, address: str) -> None:
        """A connection has sent a request with a key."""
        self.forget(address)
        self.add(address, -SETTLED)

    def add(self, address: str, cost: int) -> None:
        """Count the cost of a connection, or of a turn of its handshake."""
        if self._clock() > self._halved_at + HALVING_S:
            self._halved_at = self._clock()
            halved = {other: int(debt / 2) for other, debt in self._debts.items()}
            self._debts = {other: debt for other, debt in halved.items() if debt}
        if len(self._debts) >= MAX_ADDRESSES:
            self._debts = {other: debt for other, debt in self._debts.items() if debt < 0}
        if len(self._debts) >= MAX_ADDRESSES:
            self._debts.clear()
        self._debts[address] = max(self.get(address) + cost, -MAX_CREDIT)
