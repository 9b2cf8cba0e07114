"""Paged KV memory: which blocks are free, what each one holds, which can serve a prefix.

Owned by the scheduler. Free blocks keep their contents and are reused oldest first, so a freed
prefix stays usable until its memory is needed, as in vLLM. What is hard: a block may be shared
by several sequences through the prefix cache, so blocks are counted, and a cached block is found by
its tokens while it holds whatever was really written to it (a wrong hand-off poisons the cache).
"""

from collections import OrderedDict
from collections.abc import Sequence

from cleave_worker.emulator.content import EMPTY


class BlockPool:
    """A fixed number of KV blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.contents = [EMPTY] * num_blocks
        self.former = [EMPTY] * num_blocks
        """What each block held before its present owner: a stale transfer delivers this."""
        self._users = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that no sequence uses."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Own `count` blocks; the caller has checked `num_free`."""
        return [self._take_one() for _ in range(count)]

    def share(self, keys: Sequence[bytes]) -> list[int]:
        """The longest cached run of blocks for a prompt's block keys, now used once more."""
        found: list[int] = []
        for key in keys:
            block = self._cached.get(key)
            if block is None:
                break
            found.append(block)
        for block in found:
            self._free.pop(block, None)
            self._users[block] += 1
        return found

    def publish(self, block: int, key: bytes) -> None:
        """Let later prompts find a full block by its key."""
        if self._keys[block] is None and key not in self._cached:
            self._keys[block] = key
            self._cached[key] = block

    def give_back(self, blocks: Sequence[int]) -> None:
        """Stop using blocks; the last ones of a sequence are reused first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None

    def _take_one(self) -> int:
        block, _ = self._free.popitem(last=False)
        key = self._keys[block]
        if key is not None:
            del self._cached[key]
            self._keys[block] = None
        self._users[block] = 1
        self.former[block] = self.contents[block]
        self.contents[block] = EMPTY
        return block
