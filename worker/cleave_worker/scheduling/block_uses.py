"""When the blocks of an engine's KV were last used, and the oldest of these uses.

Called by the emulated engine's block pool and vLLM's for each block, so it must be cheap. A use is
by a request, from its begin. Engines free a request's blocks when it ends and evict what was freed
longest ago, so about what was used since the oldest use is still there, free or in use.
"""

import time
from collections import OrderedDict
from collections.abc import Callable


class BlockUses:
    """The latest uses of one pool's blocks, in ns of `clock`."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._used_ns: OrderedDict[int, int] = OrderedDict()
        """By block, the oldest one first. Not a dict: finding its first item takes the longer the
        more have been removed before it."""
        self._cleared_ns = 0
        self._clock = clock

    @property
    def oldest_ns(self) -> int:
        """The oldest of the latest uses; while there is none, when all were forgotten, or 0."""
        return next(iter(self._used_ns.values()), self._cleared_ns)

    def begin(self, block: int) -> None:
        """A request begins to use a block, which it has found cached or which it will write."""
        self._used_ns[block] = self._clock()
        self._used_ns.move_to_end(block)

    def clear(self) -> None:
        """The pool has nothing cached any more."""
        self._used_ns.clear()
        self._cleared_ns = self._clock()
