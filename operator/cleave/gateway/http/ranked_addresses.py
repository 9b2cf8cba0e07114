"""Addresses by rank; those of one rank take turns. All costs grow with the ranks, not with them."""

from collections import OrderedDict
from collections.abc import Iterator


class RankedAddresses:
    """Addresses of clients, each with a rank."""

    def __init__(self) -> None:
        self._ranks: dict[str, int] = {}
        self._by_rank: dict[int, OrderedDict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def rank(self, address: str, rank: int) -> None:
        """Give an address a rank, the last place in it if it is another one than before."""
        if self._ranks.get(address) == rank:
            return
        self.remove(address)
        self._ranks[address] = rank
        self._by_rank.setdefault(rank, OrderedDict())[address] = None

    def remove(self, address: str) -> None:
        """Forget an address; nothing if it has no rank."""
        rank = self._ranks.pop(address, None)
        if rank is None:
            return
        addresses = self._by_rank[rank]
        del addresses[address]
        if not addresses:
            del self._by_rank[rank]

    def take_turns(self, last: float) -> Iterator[str]:
        """The addresses up to a rank, lowest first. Each goes to the end of its rank when it is
        returned; none may be placed or removed before the next one."""
        for rank in sorted(self._by_rank):
            if rank > last:
                return
            addresses = self._by_rank[rank]
            for _ in range(len(addresses)):
                address = next(iter(addresses))
                addresses.move_to_end(address)
                yield address
