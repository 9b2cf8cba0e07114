"""A prefix cache that does what vLLM's block pool does, one KV block at a time, for the reference
simulator."""

from collections import deque
from collections.abc import Sequence


class Block:
    def __init__(self) -> None:
        self.content: object = None
        """A block's number, or anything else that no prompt has; None: nothing that is cached."""
        self.owners = 0


class PrefixCache:
    def __init__(self, total: int) -> None:
        self.empty: deque[Block] = deque()
        """Free blocks without content; the first is allocated next, of all."""
        self.num_unused = total
        """Blocks that were never allocated: they come after the empty ones, and are made then."""
        self.cached: deque[Block] = deque()
        """Free blocks with content; the first of them is allocated when there are no others."""
        self.copies: dict[object, list[Block]] = {}

    @property
    def num_free(self) -> int:
        return len(self.empty) + self.num_unused + len(self.cached)

    def find(self, contents: Sequence[object]) -> list[Block]:
        """Blocks of the longest cached prefix; of several copies the oldest."""
        found = []
        for content in contents:
            if not self.copies.get(content):
                break
            found.append(self.copies[content][0])
        return found

    def allocate(self, count: int) -> list[Block]:
        blocks = [self._take_one() for _ in range(count)]
        for block in blocks:
            if block.content is not None:
                self.copies[block.content].remove(block)
            block.content = None
            block.owners = 1
        return blocks

    def _take_one(self) -> Block:
        if not self.empty and self.num_unused:
            self.num_unused -= 1
            return Block()
        return (self.empty or self.cached).popleft()

    def hold(self, blocks: Sequence[Block]) -> int:
        """Hold cached blocks; return how many were free."""
        count = 0
        for block in blocks:
            if block.owners == 0:
                self.cached.remove(block)
                count += 1
            block.owners += 1
        return count

    def name(self, blocks: Sequence[Block], contents: Sequence[object]) -> None:
        """Cache blocks by content, those that are not cached yet."""
        for block, content in zip(blocks, contents, strict=False):
            if block.content is None:
                block.content = content
                self.copies.setdefault(content, []).append(block)

    def release(self, blocks: Sequence[Block], contents: Sequence[object]) -> int:
        """Free blocks from the last to the first; the first ones, with `contents`, stay cached.
        Returns how many are free now."""
        self.name(blocks, contents)
        empty, cached = [], []
        for block in reversed(blocks):
            block.owners -= 1
            if block.owners == 0:
                (empty if block.content is None else cached).append(block)
        self.empty.extendleft(reversed(empty))
        self.cached.extend(cached)
        return len(empty) + len(cached)
