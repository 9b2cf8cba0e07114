"""Prompts as blocks with chained hashes, whether prompts repeat, and how long engines cache blocks.

Called by the router for each prompt of more than 1 KiB; `router.prefix_index` remembers where
blocks are. What is hard: a gateway has text, engines cache blocks of tokens and do not report which
they evict. Tokenizing would cost more than all other work of the gateway, and hashing many small
blocks more than the rest of a pick. So blocks are large and grow with their position in the prompt,
and of traffic that does not repeat only a sample is hashed.
"""

from bisect import bisect_left
from struct import Struct

from xxhash import xxh3_64_intdigest

FIRST_BLOCK_BYTES = 1_024
"""Bytes of text in the first blocks: about sixteen blocks of vLLM's KV cache."""
WHOLE_BYTES = 8 << 10
"""Blocks up to this position are hashed as a whole ..."""
TAIL_BYTES = 256
"""... and so much of the end of each later one."""
MAX_PROMPT_BYTES = 512 << 10
"""Text beyond it is not hashed."""
_BLOCKS_PER_DOUBLING = 8
"""Blocks between a position and twice that position: what is cached is known to an eighth."""

CLOCK_TOKENS = 128
"""Unit of the clocks of caches, see `is_cached`."""
CLOCK_BITS = 20
"""Clocks wrap around after 2^20 units, 134 million tokens: longer than any cache lasts."""

_HASH_MASK = (1 << 32) - 1

_SAMPLED_MASK = 31
"""While prompts do not repeat, one of so many, plus one, is looked up and remembered: those with
certain bytes, so that a prompt and its repetition are both in the sample."""
_ALWAYS_SAMPLED_MASK = 63
"""And one of so many, plus one, with any bytes: all prompts may begin like each other."""
_SAMPLED_MIDDLE, _SAMPLED_LAST = 511, 1_023
"""Positions of these bytes, in the first block."""
_MIN_TRUST_TOKENS = 20_000.0
"""Predicted tokens from which predictions are compared with what engines report."""
_MIN_REPORTED_SHARE = 0.5
"""Share of the prompt tokens sent there of which the engine must have reported the lookup."""
_TRUST_TOLERANCE = 0.1
"""Difference of the shares from which predictions are corrected."""
_REPEATING_SHARE = 0.05
"""Share of prompt tokens in known blocks from which prompts repeat."""
_FIRST_SHARE = 0.5
"""The share at first: prompts count as repeating for about 150 of equal length."""
MAX_DETECTORS = 1_024
"""Limit of tenants with a detector of their own, 0.2 MB."""
_NUM_RECENT = 64
"""About so many prompts determine the share."""


def _list_block_ends() -> tuple[int, ...]:
    ends = [0]
    step = FIRST_BLOCK_BYTES
    while ends[-1] < MAX_PROMPT_BYTES:
        if ends[-1] >= 2 * _BLOCKS_PER_DOUBLING * step:
            step *= 2
        ends.append(ends[-1] + step)
    return tuple(ends[1:])


BLOCK_ENDS = _list_block_ends()
"""Where blocks end, in bytes of the prompt's text."""


def _list_cuts() -> tuple[Struct, ...]:
    layout, start = "<", 0
    cuts = [Struct(layout)]
    for end in BLOCK_ENDS:
        size = FIRST_BLOCK_BYTES if end <= WHOLE_BYTES else TAIL_BYTES
        layout += f"{end - start - size}x{size}s"
        cuts.append(Struct(layout))
        start = end
    return tuple(cuts)


_CUTS = _list_cuts()
"""By number of blocks: they read what is hashed of each. Slices of a memoryview take longer than
hashing them."""


def hash_blocks(text: bytes | memoryview, seed: int) -> list[int]:
    """Chained hashes of 32 bits: one for each full block of `text` together with all blocks before
    it. The last byte, which closes a text or a list in JSON, belongs to no block.

    Beyond WHOLE_BYTES only the last TAIL_BYTES of a block are hashed: a difference before them
    moves what follows, unless the text in its place is as long. `seed`: of the tenant, a secret. A
    collision only leads to a pick that is not the best.
    """
    chained = seed
    hashes: list[int] = []
    for piece in _CUTS[bisect_left(BLOCK_ENDS, len(text))].unpack_from(text):
        chained = xxh3_64_intdigest(piece, chained) & _HASH_MASK
        hashes.append(chained)
    return hashes


def hash_first_block(text: bytes | memoryview, seed: int) -> int:
    """The first hash of `hash_blocks`; `text` has at least FIRST_BLOCK_BYTES."""
    return xxh3_64_intdigest(text[:FIRST_BLOCK_BYTES], seed) & _HASH_MASK


def hash_alike(text: bytes | memoryview, number: int) -> int:
    """A hash of one full block that is the same in all gateways; `number`: from 0."""
    end = BLOCK_ENDS[number]
    return xxh3_64_intdigest(text[end - FIRST_BLOCK_BYTES : end]) & _HASH_MASK


def estimate_cached_tokens(blocks: int, text_bytes: int, prompt_tokens: int) -> float:
    """Tokens that are cached of a prompt of `text_bytes` bytes if its first `blocks` blocks are.
    On average half of the next block, which is another one or incomplete, is cached, too."""
    if blocks <= 0:
        return 0.0
    start, end = BLOCK_ENDS[blocks - 1], text_bytes
    if blocks < len(BLOCK_ENDS):
        end = min(end, BLOCK_ENDS[blocks])
    return prompt_tokens * (start + end) / (2.0 * text_bytes)


def is_cached(clock: int, stamp: int, capacity: float) -> bool:
    """Whether an engine probably still has a block that was used when its clock was at `stamp`.

    `clock`: tokens written to its KV since it started, computed or generated, in units of
    CLOCK_TOKENS; it wraps around. `capacity`: how much is written while a block lasts, in the same
    unit. Engines evict the block that was used longest ago (vLLM's block pool), so it lasts about
    until as much as their KV holds has been written; `cache_horizon.measure_window` knows better.
    """
    return (clock - stamp) % (1 << CLOCK_BITS) < capacity


def bound_hit_share(
    sent: float, looked_up: float, engine_prompt: float, engine_cached: float
) -> float:
    """The most that an engine can have cached of the prompts that a gateway looked up, 0..1.

    Tokens of recent prompts: `sent` there by the gateway, estimated, and `looked_up` of these, as
    short prompts are not; looked up in the engine's prefix cache, and found there, as the engine
    counts all prompts. Its hits are not known by prompt, so all count as hits of these.
    """
    if looked_up <= 0.0 or engine_prompt <= 0.0:
        return 0.0
    return min(max(engine_cached / engine_prompt, 0.0) * max(sent / looked_up, 1.0), 1.0)


def compute_trust(
    sent: float,
    looked_up: float,
    predicted_cached: float,
    engine_prompt: float,
    engine_cached: float,
) -> float | None:
    """The factor on predictions of cached tokens that makes them agree with an engine, 0..1.
    None: cannot be judged, too few prompts or too few of their lookups reported.

    Counts as in `bound_hit_share`, and tokens of the prompts looked up that were predicted to be
    cached. Small differences are chance, and a prediction that is too low is corrected by nothing,
    because what is cached beyond it is not known.
    """
    if predicted_cached < _MIN_TRUST_TOKENS or engine_prompt < _MIN_REPORTED_SHARE * sent:
        return None
    # The counts are read one by one while other processes write.
    if looked_up <= 0.0:
        return None
    predicted = predicted_cached / looked_up
    found = bound_hit_share(sent, looked_up, engine_prompt, engine_cached)
    return found / predicted if found < predicted - _TRUST_TOLERANCE else 1.0


class RepeatDetector:
    """Whether the prompts of one tenant repeat: the share of recent prompts' tokens that was known.

    By tokens, because what caches save is tokens: most prompts may be short and new while the long
    ones are conversations. It begins as if they repeated, so that the first conversations after a
    start are noticed. The same holds whenever prompts of a sample repeat: those that were not in it
    are not known yet.
    """

    __slots__ = ("_known", "_num_prompts", "_tokens", "is_repeating")

    def __init__(self) -> None:
        self._num_prompts = 0
        self._tokens = self._known = 0.0
        self.is_repeating = True
        """Whether it pays to look at caches."""

    def is_sampled(self, text: bytes | memoryview) -> bool:
        """Whether to look at this prompt although prompts do not repeat."""
        self._num_prompts = number = self._num_prompts + 1
        if not number & _ALWAYS_SAMPLED_MASK:
            return True
        return not (text[_SAMPLED_MIDDLE] + text[_SAMPLED_LAST]) & _SAMPLED_MASK

    def observe(self, tokens: float, known: float) -> None:
        """Count a prompt that was looked up, of which `known` tokens were in known blocks."""
        if not self._tokens:
            self._tokens, self._known = _NUM_RECENT * tokens, _FIRST_SHARE * _NUM_RECENT * tokens
        decay = 1 - 1 / _NUM_RECENT
        self._tokens = self._tokens * decay + tokens
        self._known = self._known * decay + known
        is_repeating = self._known > _REPEATING_SHARE * self._tokens
        if is_repeating and not self.is_repeating:
            self._known = _FIRST_SHARE * self._tokens
        self.is_repeating = is_repeating


class RepeatDetectors:
    """The detectors of tenants, so that one with prompts that do not repeat takes nothing from the
    others. Tenants differ by the seed of their blocks."""

    __slots__ = ("_by_seed", "_latest", "_latest_seed")

    def __init__(self) -> None:
        self._by_seed: dict[int, RepeatDetector] = {}
        """Those used longest ago first."""
        self._latest_seed = -1
        self._latest = RepeatDetector()
        """The one used last: a gateway often has one tenant."""

    def find(self, seed: int) -> RepeatDetector:
        """The detector of one tenant.

        Beyond the limit the one used longest ago is dropped: its tenant's prompts count as
        repeating again, so a client with many salts makes others cost more and takes no hit away.
        """
        if seed == self._latest_seed:
            return self._latest
        detectors = self._by_seed
        detector = detectors.pop(seed, None)
        if detector is None:
            if len(detectors) >= MAX_DETECTORS:
                del detectors[next(iter(detectors))]
            detector = RepeatDetector()
        detectors[seed] = self._latest = detector
        self._latest_seed = seed
        return detector
