"""Which engines probably cache which blocks of prompts, in memory that processes share.

Used by `router.selection` for prompts that repeat. A block is known by 32 bits; a cell of 8 bytes
says that one engine used it, and when. Eight cells are a bucket, one cache line, which the block's
hash selects; further engines of a hot block have cells in other buckets. So an engine counts only
for what it has used. All processes of a gateway read and write the same cells without locks: a cell
is written at once, and a lost one only leads to a pick that is not the best.

What is hard: tenants must not find out by the instance that serves them, or by the time that takes,
what others have sent. Engines keep their caches apart by salt (`cache_salt`). The index does so by
a seed that depends on the salt and on a secret of this gateway: to meet the block of another one, a
tenant would have to guess 32 bits.
"""

import mmap
import secrets
from collections.abc import Mapping
from hashlib import blake2b

from cleave.policy.prefix_cache import CLOCK_BITS
from cleave.policy.reuse_times import LAST_USES_BYTES

NUM_BUCKETS = 1 << 16
_CELLS = 8
_CELL_BYTES = 8
_BUCKET_BYTES = _CELL_BYTES * _CELLS
INDEX_BYTES = NUM_BUCKETS * _BUCKET_BYTES
"""4 MiB: half a million blocks of engines, of 256 tokens and more."""
_SECRET_BYTES = 16

_BUCKET_MASK = NUM_BUCKETS - 1
_BUCKET_BITS = 16
_STAMP_MASK = (1 << CLOCK_BITS) - 1
_HOLDER_BITS = 26
_HOLDER_MASK = (1 << _HOLDER_BITS) - 1
_HOLDER_KEY = secrets.token_bytes(16)
"""The same in all processes of a gateway, which are forked."""
_TAG_SHIFT = CLOCK_BITS + _HOLDER_BITS
"""A cell: 16 bits of the block's hash that do not select the bucket, 26 of the holder, a stamp."""
_HIGH_SHIFT, _LOW_SHIFT = 26, 18
_KEY_HIGH_SHIFT, _KEY_LOW_SHIFT = 36, 28
"""Where the two highest bytes of a cell are in its block's hash, and in its bits of block and
holder. They are compared first: two bytes are read in a fraction of the time of a cell."""
_LISTED = 4
"""Cells of one block in its own bucket. The cells of further holders are in buckets that the block
and the holder select together: they are found for a given engine, not listed."""
_SPREAD = 0x9E3779B1
"""An odd number with bits at random, which spreads holders over buckets."""
_NUM_VICTIMS = 3
"""Cells of a full bucket of which the one used longest ago is overwritten."""
_MAX_SEEDS = 4_096
"""Limit of seeds that are kept, at most 3 MB; computing one takes a microsecond."""
_MAX_SALT_BYTES = 512
"""Of longer salts, which clients may send, a digest is kept."""


class PrefixMemory:
    """The memory and the secret; created before the processes of a gateway are forked."""

    __slots__ = ("last_uses", "memory", "secret")

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, INDEX_BYTES)
        """Untouched pages take no memory."""
        self.last_uses = mmap.mmap(-1, LAST_USES_BYTES)
        """Of `policy.reuse_times`."""
        self.secret = secrets.token_bytes(_SECRET_BYTES)


def to_holder(boot_id: str) -> int:
    """The number of one boot of an engine in cells. After a restart nothing of it is found any
    more. Two of a thousand engines have the same one with a probability below 1 %, and no agent can
    choose an id with the number of another one."""
    digest = blake2b(boot_id.encode(), digest_size=4, key=_HOLDER_KEY).digest()
    return int.from_bytes(digest, "little") & _HOLDER_MASK


class PrefixIndex:
    """The index as one process uses it."""

    __slots__ = ("_cells", "_clocks", "_memory", "_plain_seeds", "_secret", "_seeds")

    def __init__(self, memory: PrefixMemory) -> None:
        self._memory = memory.memory
        self._cells: memoryview[int] = memoryview(memory.memory).cast("q")
        self._secret = memory.secret
        self._seeds: dict[tuple[str, bytes], int] = {}
        self._plain_seeds: dict[str, int] = {}
        """Without a salt, by model, which is looked up in half the time."""
        self._clocks: dict[int, int] = {}
        """Clock of each holder when it was used last by this process."""

    def find_seed(self, model: str, salt: bytes) -> int:
        """What makes blocks of this model or adapter and `salt` differ from those of others."""
        if not salt:
            seed = self._plain_seeds.get(model)
            if seed is not None:
                return seed
        if len(salt) > _MAX_SALT_BYTES:
            salt = blake2b(salt, digest_size=_SECRET_BYTES).digest()
        seed = self._seeds.get((model, salt))
        if seed is None:
            if len(self._seeds) >= _MAX_SEEDS:
                self._seeds.clear()
            digest = blake2b(salt, digest_size=4, key=self._secret, person=_shorten(model))
            seed = self._seeds[model, salt] = int.from_bytes(digest.digest(), "little")
        if not salt and len(self._plain_seeds) < _MAX_SEEDS:
            self._plain_seeds[model] = seed
        return seed

    def find_known(self, blocks: list[int]) -> tuple[int, list[int]]:
        """(number of leading blocks that any engine has used, `list_uses` of the last of them).

        From the end: of the next turn of a conversation all but the latest blocks are known.
        """
        low = high = len(blocks)
        step = 1
        uses: list[int] = []
        while low > 0:
            uses = self.list_uses(blocks[low - 1])
            if uses:
                break
            high = low - 1
            low = max(low - step, 0)
            step *= 2
        while low < high:
            middle = (low + high + 1) // 2
            found = self.list_uses(blocks[middle - 1])
            if found:
                low, uses = middle, found
            else:
                high = middle - 1
        return low, uses

    def contains(self, block: int) -> bool:
        """Whether any engine has used this block."""
        return bool(self.list_uses(block))

    def list_uses(self, block: int) -> list[int]:
        """Cells of up to eight engines that have used this block, in no order: see `get_holder` and
        `get_stamp`. Of a block of more engines these are the latest, but for chance."""
        start = (block & _BUCKET_MASK) * _BUCKET_BYTES
        bucket: bytes = self._memory[start : start + _BUCKET_BYTES]
        high, low, tag = block >> _HIGH_SHIFT, block >> _LOW_SHIFT & 255, block >> _BUCKET_BITS
        uses: list[int] = []
        for at in range(0, _BUCKET_BYTES, _CELL_BYTES):
            if bucket[at + 7] == high and bucket[at + 6] == low:
                cell = _read_cell(bucket, at)
                if cell >> _TAG_SHIFT == tag and cell:
                    uses.append(cell)
        return uses

    def are_all(self, uses: list[int]) -> bool:
        """Whether `uses`, from `list_uses`, are those of all engines that have used the block."""
        return len(uses) < _LISTED

    def find_stamp(self, block: int, holder: int) -> int:
        """When this engine used the block; -1: it has not."""
        uses = self.list_uses(block)
        for cell in uses:
            if cell >> CLOCK_BITS & _HOLDER_MASK == holder:
                return cell & _STAMP_MASK
        return self.find_spilled(block, holder) if len(uses) >= _LISTED else -1

    def find_spilled(self, block: int, holder: int) -> int:
        """`find_stamp` of an engine that is not among the `_LISTED` ones of its block."""
        start = _locate(block, holder) * _BUCKET_BYTES
        bucket: bytes = self._memory[start : start + _BUCKET_BYTES]
        place = _find_key(bucket, block >> _BUCKET_BITS << _HOLDER_BITS | holder)
        return _read_cell(bucket, place) & _STAMP_MASK if place >= 0 else -1

    def find_use(self, blocks: list[int], count: int, holder: int) -> tuple[int, int]:
        """(number of leading blocks, of the first `count`, that this engine has used, stamp of the
        last of them)."""
        low, high, last = 0, count, 0
        # Often all of them.
        middle = high
        while low < high:
            stamp = self.find_stamp(blocks[middle - 1], holder)
            if stamp >= 0:
                low, last = middle, stamp
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low, last

    def record(self, blocks: list[int], start: int, holder: int, clock: int) -> None:
        """Note that an engine uses the blocks of a prompt from number `start` on, at this
        `clock`."""
        clock &= _STAMP_MASK
        self._clocks[holder] = clock
        for at in range(start, len(blocks)):
            block = blocks[at]
            cell = ((block >> _BUCKET_BITS << _HOLDER_BITS | holder) << CLOCK_BITS) | clock
            self._write(block, cell)

    def forget(self, blocks: list[int], holder: int) -> None:
        """Take back what was recorded of a prompt that this engine has not computed."""
        cells = self._cells
        for block in blocks:
            key = block >> _BUCKET_BITS << _HOLDER_BITS | holder
            for bucket in (block & _BUCKET_MASK, _locate(block, holder)):
                for number in range(bucket * _CELLS, (bucket + 1) * _CELLS):
                    if cells[number] >> CLOCK_BITS == key:
                        cells[number] = 0

    def retain(self, holders: Mapping[int, object]) -> None:
        """Forget the clocks of all other engines, whose cells are then overwritten first."""
        for holder in self._clocks.keys() - holders.keys():
            del self._clocks[holder]

    def _write(self, block: int, cell: int) -> None:
        """Write a cell into its block's bucket. If that has `_LISTED` of the block, the cell takes
        the place of one of these, which moves to the bucket of the block and its holder: so listed
        are engines that have used the block lately, and none counts that has not used it."""
        number = block & _BUCKET_MASK
        start = number * _BUCKET_BYTES
        bucket: bytes = self._memory[start : start + _BUCKET_BYTES]
        key, tag = cell >> CLOCK_BITS, block >> _BUCKET_BITS
        high, low = block >> _HIGH_SHIFT, block >> _LOW_SHIFT & 255
        empty, listed, chosen, moved = -1, 0, -1, 0
        for place in range(_CELLS):
            at = place * _CELL_BYTES
            first, second = bucket[at + 7], bucket[at + 6]
            if empty < 0 and not (first or second) and not _read_cell(bucket, at):
                empty = place
                continue
            if first != high or second != low:
                continue
            each = _read_cell(bucket, at)
            if each >> CLOCK_BITS == key:
                self._cells[number * _CELLS + place] = cell
                return
            if each >> _TAG_SHIFT == tag:
                # One of those listed: by the clock, which is as good as by chance.
                if listed <= cell & (_LISTED - 1):
                    chosen, moved = place, each
                listed += 1
        if listed < _LISTED:
            chosen = empty if empty >= 0 else self._find_victim(bucket, cell)
        self._cells[number * _CELLS + chosen] = cell
        if listed >= _LISTED:
            self._write_spilled(block, moved)

    def _write_spilled(self, block: int, cell: int) -> None:
        """Write a cell into the bucket of its block and its holder."""
        key = cell >> CLOCK_BITS
        number = _locate(block, key & _HOLDER_MASK)
        bucket: bytes = self._memory[number * _BUCKET_BYTES : (number + 1) * _BUCKET_BYTES]
        at = _find_key(bucket, key)
        if at < 0:
            at = _find_key(bucket, 0)
        place = at // _CELL_BYTES if at >= 0 else self._find_victim(bucket, cell)
        self._cells[number * _CELLS + place] = cell

    def _find_victim(self, bucket: bytes, cell: int) -> int:
        """The place in a full bucket of the oldest of three cells."""
        clocks, victim, oldest = self._clocks, 0, -1
        for step in range(_NUM_VICTIMS):
            place = (cell + step) & (_CELLS - 1)
            each = _read_cell(bucket, place * _CELL_BYTES)
            clock = clocks.get(each >> CLOCK_BITS & _HOLDER_MASK, -1)
            if clock < 0:
                return place
            age = (clock - each) & _STAMP_MASK
            if age > oldest:
                victim, oldest = place, age
        return victim


def _read_cell(bucket: bytes, at: int) -> int:
    """The cell at this offset. Compiled, unpacking a bucket takes seven times as long as reading
    those of its bytes that matter, because it makes an object of each number."""
    return (
        bucket[at]
        | bucket[at + 1] << 8
        | bucket[at + 2] << 16
        | bucket[at + 3] << 24
        | bucket[at + 4] << 32
        | bucket[at + 5] << 40
        | bucket[at + 6] << 48
        | bucket[at + 7] << 56
    )


def _find_key(bucket: bytes, key: int) -> int:
    """Offset of the cell with these bits of block and holder, or, if 0, of an empty one; -1: there
    is none."""
    high, low = key >> _KEY_HIGH_SHIFT, key >> _KEY_LOW_SHIFT & 255
    for at in range(0, _BUCKET_BYTES, _CELL_BYTES):
        is_similar = bucket[at + 7] == high and bucket[at + 6] == low
        if is_similar and _read_cell(bucket, at) >> CLOCK_BITS == key:
            return at
    return -1


def get_holder(cell: int) -> int:
    """The engine of a cell, by `to_holder`."""
    return cell >> CLOCK_BITS & _HOLDER_MASK


def get_stamp(cell: int) -> int:
    """When the engine of a cell used its block last."""
    return cell & _STAMP_MASK


def _locate(block: int, holder: int) -> int:
    """The bucket of a block that many engines hold, for one of them."""
    return (block ^ holder * _SPREAD >> 8) & _BUCKET_MASK


def _shorten(model: str) -> bytes:
    """A model's name as a parameter of BLAKE2b, which takes 16 bytes."""
    return blake2b(model.encode(), digest_size=16).digest()
