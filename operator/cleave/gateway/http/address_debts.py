"""What addresses owe for connections and TLS handshakes that have led to nothing yet.

Each costs something and can be sent again and again, from many addresses. Shares of equal size are
no help: a busy client needs more than one of a hundred. So each is a debt of its address, which a
request with a key settles; a client that uses the gateway has credit and goes first.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping

SETTLED = 6
"""A connection counts 1 and its handshake 2 or 3, so that who settles has credit ..."""
MAX_CREDIT = 32
"""... of so much."""
MAX_EXPECTED = 16
"""With more connections that have led to nothing, credit does not count: else one key would be
enough to take all places with silent ones."""
HALVING_S = 60.0
"""Debt and credit are halved so often."""
MAX_ADDRESSES = 4_096
"""With debt, and with credit; those that have changed longest ago are forgotten."""
EXPECTED_S = 2.0
"""So long a connection with credit is kept for its first request."""


class AddressDebts:
    """The debts of one process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._debts: OrderedDict[str, int] = OrderedDict()
        self._credits: OrderedDict[str, int] = OrderedDict()
        """Negative."""
        self._expected: dict[str, int] = {}
        """Open connections that have led to nothing yet."""
        self._halved_at = clock()

    def get(self, address: str) -> int:
        """What it owes; negative: its credit."""
        return self._debts.get(address) or self._credits.get(address, 0)

    def has_credit(self, address: str) -> bool:
        """Whether its requests have settled more than its connections have cost, and few of these
        are still to send one."""
        return address in self._credits and self._expected.get(address, 0) <= MAX_EXPECTED

    def expect_request(self, address: str) -> None:
        """A connection, or its handshake, begins; `forget` or `settle` follows."""
        self._expected[address] = self._expected.get(address, 0) + 1

    def forget(self, address: str) -> None:
        """A connection ends without a request, or its handshake has ended."""
        left = self._expected[address] - 1
        if left:
            self._expected[address] = left
        else:
            del self._expected[address]

    def settle(self, address: str) -> None:
        """A connection has sent a request with a key."""
        self.forget(address)
        self.add(address, -SETTLED)

    def add(self, address: str, cost: int) -> None:
        """Count the cost of a connection, or of a turn of its handshake."""
        if self._clock() > self._halved_at + HALVING_S:
            self._halved_at = self._clock()
            self._debts, self._credits = map(_halve, (self._debts, self._credits))
        owed = max(self.get(address) + cost, -MAX_CREDIT)
        for accounts in (self._debts, self._credits):
            accounts.pop(address, None)
        if owed:
            accounts = self._credits if owed < 0 else self._debts
            accounts[address] = owed
            if len(accounts) > MAX_ADDRESSES:
                accounts.popitem(last=False)


def _halve(accounts: Mapping[str, int]) -> OrderedDict[str, int]:
    halved = ((address, int(owed / 2)) for address, owed in accounts.items())
    return OrderedDict((address, owed) for address, owed in halved if owed)
