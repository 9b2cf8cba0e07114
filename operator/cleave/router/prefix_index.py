"""Which engines probably cache which blocks of prompts, in memory that processes share.

Used by `router.selection` for prompts that repeat. A block is known by 32 bits; a cell of 8 bytes
says that one engine used it, and when. Eight cells are a bucket, one cache line, which the block's
hash selects. All processes of a gateway read and write the same cells without locks: a cell is
written at once, and a lost one only leads to a pick that is not the best.

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
EVERYWHERE = _HOLDER_MASK
"""The holder of blocks that more engines use than a bucket has cells; stamped with seconds."""
EVERYWHERE_S = 60
"""How long such a block counts as cached by all engines."""
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
    return crc32(boot_id.encode()) % EVERYWHERE


def is_everywhere(stamp: int, now_s: int) -> bool:
    """Whether a block with this stamp of EVERYWHERE counts as cached by all engines now."""
    return (now_s - stamp) & _STAMP_MASK < EVERYWHERE_S


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

    def list_uses(self, block: int) -> list[tuple[int, int]]:
        """(holder, stamp) of the engines that have used this block, in no order."""
        tag = block >> _BUCKET_BITS
        bucket: Bucket = _read_bucket(self._memory, (block & _BUCKET_MASK) * _BUCKET_BYTES)
        uses: list[tuple[int, int]] = []
        for cell in bucket:
            if cell >> _TAG_SHIFT == tag and cell:
                uses.append((cell >> CLOCK_BITS & _HOLDER_MASK, cell & _STAMP_MASK))
        return uses

    def find_use(self, blocks: list[int], holder: int, clock: int, now_s: int) -> tuple[int, int]:
        """(number of leading blocks that this engine has used, stamp of the last of them); `clock`:
        its clock."""
        low, high, last = 0, len(blocks), 0
        while low < high:
            middle = (low + high + 1) // 2
            stamp = -1
            for found, its_stamp in self.list_uses(blocks[middle - 1]):
                if found == holder:
                    stamp = its_stamp
                elif found == EVERYWHERE and is_everywhere(its_stamp, now_s):
                    stamp = clock & _STAMP_MASK
            if stamp >= 0:
                low, last = middle, stamp
            else:
                high = middle - 1
        return low, last

    def record(self, blocks: list[int], start: int, holder: int, clock: int, now_s: int) -> None:
        """Note that an engine uses the blocks of a prompt from number `start` on, at this `clock`;
        `now_s`: seconds."""
        clocks = self._clocks
        clock &= _STAMP_MASK
        clocks[holder] = clock
        cells = self._cells
        for at in range(start, len(blocks)):
            block = blocks[at]
            number = (block & _BUCKET_MASK) * _CELLS
            tag = block >> _BUCKET_BITS
            cell = ((tag << _HOLDER_BITS | holder) << CLOCK_BITS) | clock
            place = self._find_place(number, cell, tag, clocks, now_s)
            if place >= 0:
                cells[number + place] = cell
            elif place == _TO_EVERYWHERE:
                seconds = now_s & _STAMP_MASK
                cells[number] = ((tag << _HOLDER_BITS | EVERYWHERE) << CLOCK_BITS) | seconds

    def retain(self, holders: Mapping[int, object]) -> None:
        """Forget the clocks of all other engines, whose cells are then overwritten first."""
        for holder in self._clocks.keys() - holders.keys():
            del self._clocks[holder]

    def _find_place(
        self, number: int, cell: int, tag: int, clocks: dict[int, int], now_s: int
    ) -> int:
        """The place in a bucket for a cell; _NOT_NEEDED or _TO_EVERYWHERE: none."""
        bucket: Bucket = _read_bucket(self._memory, number * 8)
        empty, same_tag = -1, 0
        key = cell >> CLOCK_BITS
        everywhere = tag << _HOLDER_BITS | EVERYWHERE
        for place in range(_CELLS):
            each = bucket[place]
            if each >> CLOCK_BITS == key:
                return place
            if not each:
                empty = place
            elif each >> _TAG_SHIFT == tag:
                if each >> CLOCK_BITS == everywhere:
                    if is_everywhere(each, now_s):
                        return _NOT_NEEDED
                    empty = place
                else:
                    same_tag += 1
        if empty >= 0:
            return empty
        victim, oldest = 0, -1
        for step in range(_NUM_VICTIMS):
            place = (cell + step) & (_CELLS - 1)
            each = bucket[place]
            clock = clocks.get(each >> CLOCK_BITS & _HOLDER_MASK, -1)
            if clock < 0:
                return place
            age = (clock - each) & _STAMP_MASK
            if age > oldest:
                victim, oldest = place, age
        return _TO_EVERYWHERE if same_tag == _CELLS else victim


_NOT_NEEDED, _TO_EVERYWHERE = -1, -2
"""In place of a place: all engines have the block, or count as such from now on."""


def _shorten(model: str) -> bytes:
    """A model's name as a parameter of BLAKE2b, which takes 16 bytes."""
    return blake2b(model.encode(), digest_size=16).digest()
