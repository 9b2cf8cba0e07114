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
import struct
from collections.abc import Mapping
from hashlib import blake2b
from zlib import crc32

from cleave.policy.prefix_cache import CLOCK_BITS

NUM_BUCKETS = 1 << 16
_CELLS = 8
_BUCKET_BYTES = 8 * _CELLS
INDEX_BYTES = NUM_BUCKETS * _BUCKET_BYTES
"""4 MiB: half a million blocks of engines, of 256 tokens and more."""
_SECRET_BYTES = 16

_BUCKET_MASK = NUM_BUCKETS - 1
_BUCKET_BITS = 16
_STAMP_MASK = (1 << CLOCK_BITS) - 1
_HOLDER_BITS = 26
_HOLDER_MASK = (1 << _HOLDER_BITS) - 1
_TAG_SHIFT = CLOCK_BITS + _HOLDER_BITS
"""A cell: 16 bits of the block's hash that do not select the bucket, 26 of the holder, a stamp."""
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

Bucket = tuple[int, int, int, int, int, int, int, int]
_read_bucket = struct.Struct(f"<{_CELLS}q").unpack_from


class PrefixMemory:
    """The memory and the secret; created before the processes of a gateway are forked."""

    __slots__ = ("memory", "secret")

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, INDEX_BYTES)
        """Untouched pages take no memory."""
        self.secret = secrets.token_bytes(_SECRET_BYTES)


def to_holder(boot_id: str) -> int:
    """The number of one boot of an engine in cells. After a restart nothing of it is found any
    more. Two of a thousand engines have the same one with a probability below 1 %."""
    return crc32(boot_id.encode()) & _HOLDER_MASK


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

    def count_known(self, blocks: list[int]) -> int:
        """Number of leading blocks that any engine has used."""
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if self.contains(blocks[middle - 1]):
                low = middle
            else:
                high = middle - 1
        return low

    def contains(self, block: int) -> bool:
        """Whether any engine has used this block."""
        tag = block >> _BUCKET_BITS
        bucket: Bucket = _read_bucket(self._memory, (block & _BUCKET_MASK) * _BUCKET_BYTES)
        for cell in bucket:  # noqa: SIM110 - compiled, a generator would cost an allocation
            if cell >> _TAG_SHIFT == tag and cell:
                return True
        return False

    def list_uses(self, block: int) -> list[int]:
        """Cells of up to eight engines that have used this block, in no order: see `get_holder` and
        `get_stamp`. Of a block of more engines these are the latest, but for chance."""
        tag = block >> _BUCKET_BITS
        bucket: Bucket = _read_bucket(self._memory, (block & _BUCKET_MASK) * _BUCKET_BYTES)
        return [cell for cell in bucket if cell >> _TAG_SHIFT == tag and cell]

    def find_stamp(self, block: int, holder: int) -> int:
        """When this engine used the block; -1: it has not."""
        key = block >> _BUCKET_BITS << _HOLDER_BITS | holder
        tag = block >> _BUCKET_BITS
        bucket: Bucket = _read_bucket(self._memory, (block & _BUCKET_MASK) * _BUCKET_BYTES)
        listed = 0
        for cell in bucket:
            if cell >> CLOCK_BITS == key:
                return cell & _STAMP_MASK
            if cell >> _TAG_SHIFT == tag:
                listed += 1
        if listed < _LISTED:
            return -1
        bucket = _read_bucket(self._memory, _locate(block, holder) * _BUCKET_BYTES)
        for cell in bucket:
            if cell >> CLOCK_BITS == key:
                return cell & _STAMP_MASK
        return -1

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
        cells, number = self._cells, (block & _BUCKET_MASK) * _CELLS
        bucket: Bucket = _read_bucket(self._memory, number * 8)
        key, tag = cell >> CLOCK_BITS, block >> _BUCKET_BITS
        empty, listed, chosen = -1, 0, -1
        for place in range(_CELLS):
            each = bucket[place]
            if each >> CLOCK_BITS == key:
                cells[number + place] = cell
                return
            if not each:
                empty = place
            elif each >> _TAG_SHIFT == tag:
                # One of those listed: by the clock, which is as good as by chance.
                if listed <= cell & (_LISTED - 1):
                    chosen = place
                listed += 1
        if listed < _LISTED:
            cells[number + (empty if empty >= 0 else self._find_victim(bucket, cell))] = cell
            return
        moved = bucket[chosen]
        cells[number + chosen] = cell
        self._write_spilled(block, moved)

    def _write_spilled(self, block: int, cell: int) -> None:
        """Write a cell into the bucket of its block and its holder."""
        key = cell >> CLOCK_BITS
        number = _locate(block, key & _HOLDER_MASK) * _CELLS
        bucket: Bucket = _read_bucket(self._memory, number * 8)
        empty = -1
        for place in range(_CELLS):
            if bucket[place] >> CLOCK_BITS == key:
                empty = place
                break
            if not bucket[place]:
                empty = place
        self._cells[number + (empty if empty >= 0 else self._find_victim(bucket, cell))] = cell

    def _find_victim(self, bucket: Bucket, cell: int) -> int:
        """The place in a full bucket of the oldest of three cells."""
        clocks, victim, oldest = self._clocks, 0, -1
        for step in range(_NUM_VICTIMS):
            place = (cell + step) & (_CELLS - 1)
            each = bucket[place]
            clock = clocks.get(each >> CLOCK_BITS & _HOLDER_MASK, -1)
            if clock < 0:
                return place
            age = (clock - each) & _STAMP_MASK
            if age > oldest:
                victim, oldest = place, age
        return victim


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
