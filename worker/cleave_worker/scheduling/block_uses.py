"""When the blocks of an engine's KV were last used, and which of these times it has evicted.

Called by the emulated engine's block pool and vLLM's, for each block, so it only stores a number.
Engines free a request's blocks when it ends and evict what was freed longest ago. So the block that
is evicted next was used at about the time of the one evicted last, whatever running requests hold.
"""

import time
from collections.abc import Callable


class BlockUses:
    """The uses of one pool, in ns of `clock`."""

    def __init__(self, num_blocks: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._used_ns = [0] * num_blocks
        self._clock = clock
        self.evicted_ns = 0
        """When a request began to use the block that was evicted last; 0: none was."""

    def begin(self, block: int) -> None:
        """A request begins to use a block, new or cached."""
        self._used_ns[block] = self._clock()

    def evict(self, block: int) -> None:
        """A block of the prefix cache that nothing uses is evicted."""
        self.evicted_ns = self._used_ns[block]
