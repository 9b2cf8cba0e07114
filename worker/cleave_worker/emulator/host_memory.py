"""Copies of KV blocks outside the block pool, by vLLM's rules in `cleave.policy.host_memory`.

Owned by the scheduler. A copy has what the block had, so a wrong one gives wrong tokens. Blocks are
copied when their request ends, as in the simulator, while those of vLLM are copied when they are
computed: until then they are in the pool's prefix cache.
"""

from collections import OrderedDict
from collections.abc import Sequence


class HostMemory:
    """A fixed number of copies, by the keys of their blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_hits = 0
        """Prompt tokens that were copied back."""
        self.load_ms = 0.0
        """ms that this took."""
        self._contents: OrderedDict[bytes, int] = OrderedDict()
        """Those used longest ago first."""

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the contents of the blocks of the longest run of `keys`."""
        found: list[int] = []
        for key in keys:
            content = self._contents.get(key)
            if content is None:
                break
            found.append(content)
        return found

    def keep(self, keys: Sequence[bytes], contents: Sequence[int]) -> None:
        """Copy the blocks of a prompt whose request has ended, and evict others. The first one
        counts as used last."""
        for key, content in zip(reversed(keys), reversed(contents), strict=True):
            self._contents.setdefault(key, content)
            self._contents.move_to_end(key)
        while len(self._contents) > self.num_blocks:
            self._contents.popitem(last=False)
