"""Copies of the trace's blocks in the caches of simulated engines, as linked lists. Compiled.

Called by `prefix_caches` and `host_memory`. Cache number `i` is that of instance `i`; the one in
its host memory has the number `i` plus that of all instances, and no request holds copies there.
What is hard: an instance is found in the list of all copies of a block, as most blocks have one or
two, so that no table of instances and blocks is needed.
"""

from cleave.simulator.prefix_index import forget_block, record_block
from cleave.simulator.record_access import (
    get_cache,
    get_copy,
    get_first_copy,
    get_held_copy,
    get_prompt,
    get_request,
)
from cleave.simulator.records import CACHED, NONE, Record, State


def mark_own(r: int) -> int:
    """The `block` of a copy of what only request `r`, which was preempted, will look for."""
    return NONE - 1 - r


def add_free_copy(state: State, i: int, block: int, size: int) -> None:
    """Cache a block that no request holds."""
    c = create_copy(state, i, block, size)
    get_copy(state, c).owners = 0
    if block >= 0:
        link_to_block(state, c)
        if state.cache_view == CACHED:
            record_block(state, i, block)
    link_as_newest(state, i, c)
    get_cache(state, i).size += size


def evict(state: State, i: int, room: int) -> None:
    """Evict what was freed longest ago until free copies have at most `room` KV blocks."""
    cache = get_cache(state, i)
    while cache.size > room:
        c = cache.oldest
        copy = get_copy(state, c)
        evicted = min(copy.size, cache.size - room)
        if copy.block >= 0:
            remove_from_block(state, c)
            if state.cache_view == CACHED and find_copy(state, i, copy.block) == NONE:
                forget_block(state, i, copy.block)
            cache.evicted += 1
            copy.block = NONE
        copy.size -= evicted
        cache.size -= evicted
        if copy.size == 0:
            drop_copy(state, i, c)


def drop_copy(state: State, i: int, c: int) -> None:
    """Remove a copy that nothing holds and that is in no list of a block."""
    drop_link(state, i, c)
    _drop_use(state, i, c)
    copy = get_copy(state, c)
    copy.younger = state.free_copy
    state.free_copy = c


def find_copy(state: State, i: int, block: int) -> int:
    """The copy of a block on instance `i` that was cached first; NONE: it is not cached."""
    c = get_first_copy(state, block).value
    while c != NONE and get_copy(state, c).instance != i:
        c = get_copy(state, c).next
    return c


def create_copy(state: State, i: int, block: int, size: int) -> int:
    """A new copy of a block in `size` KV blocks, in no list yet but that by use."""
    c = state.free_copy
    if c == NONE:
        c = state.num_copies
        state.num_copies += 1
    else:
        state.free_copy = get_copy(state, c).younger
    copy = get_copy(state, c)
    copy.block = block
    copy.instance = i
    copy.size = size
    _link_use(state, i, c)
    return c


def begin_use(state: State, i: int, c: int) -> None:
    """A request begins to use a copy."""
    _drop_use(state, i, c)
    _link_use(state, i, c)


def link_to_block(state: State, c: int) -> None:
    """Add a copy to the copies of its block, after older ones of the same instance."""
    copy = get_copy(state, c)
    after = find_copy(state, copy.instance, copy.block)
    if after == NONE:
        copy.next = get_first_copy(state, copy.block).value
        get_first_copy(state, copy.block).value = c
        return
    other = get_copy(state, after).next
    while other != NONE:
        if get_copy(state, other).instance == copy.instance:
            after = other
        other = get_copy(state, other).next
    copy.next = get_copy(state, after).next
    get_copy(state, after).next = c


def remove_from_block(state: State, c: int) -> None:
    """Remove a copy from the copies of its block."""
    copy = get_copy(state, c)
    before = get_first_copy(state, copy.block).value
    if before == c:
        get_first_copy(state, copy.block).value = copy.next
        return
    while get_copy(state, before).next != c:
        before = get_copy(state, before).next
    get_copy(state, before).next = copy.next


def link_as_newest(state: State, i: int, c: int) -> None:
    """Add a copy to those that nothing holds, as the one that is evicted last."""
    cache, copy = get_cache(state, i), get_copy(state, c)
    copy.younger = NONE
    copy.older = cache.newest
    if cache.newest == NONE:
        cache.oldest = c
    else:
        get_copy(state, cache.newest).younger = c
    cache.newest = c


def drop_link(state: State, i: int, c: int) -> None:
    """Remove a copy from those that nothing holds."""
    cache, copy = get_cache(state, i), get_copy(state, c)
    if copy.older == NONE:
        cache.oldest = copy.younger
    else:
        get_copy(state, copy.older).younger = copy.younger
    if copy.younger == NONE:
        cache.newest = copy.older
    else:
        get_copy(state, copy.younger).older = copy.older


def _link_use(state: State, i: int, c: int) -> None:
    cache, copy = get_cache(state, i), get_copy(state, c)
    copy.used = state.now
    copy.after = NONE
    copy.before = cache.last_begun
    if cache.last_begun == NONE:
        cache.first_begun = c
    else:
        get_copy(state, cache.last_begun).after = c
    cache.last_begun = c


def _drop_use(state: State, i: int, c: int) -> None:
    cache, copy = get_cache(state, i), get_copy(state, c)
    if copy.before == NONE:
        cache.first_begun = copy.after
    else:
        get_copy(state, copy.before).after = copy.after
    if copy.after == NONE:
        cache.last_begun = copy.before
    else:
        get_copy(state, copy.after).before = copy.before


def count_kv_blocks(state: State, inst: Record, r: int, at: int) -> int:
    """Full KV blocks in block number `at` of a prompt."""
    start = at * state.block_tokens
    end = min(start + state.block_tokens, get_request(state, r).prompt)
    blocks: int = (end - start) // inst.block
    return blocks


def get_owned_copy(state: State, i: int, r: int, at: int) -> Record:
    """The number of the copy that a request holds for its block number `at` on instance `i`."""
    prompt = get_prompt(state, r)
    side = 0 if get_request(state, r).prefill == i else state.num_block_uses
    return get_held_copy(state, side + prompt.first_block + at)


def get_num_owned(state: State, i: int, r: int) -> int:
    """How many blocks of its prompt a request holds on instance `i`."""
    prompt = get_prompt(state, r)
    count: int = prompt.held_prefill if get_request(state, r).prefill == i else prompt.held_decode
    return count


def set_num_owned(state: State, i: int, r: int, count: int) -> None:
    """The same, to be changed."""
    prompt = get_prompt(state, r)
    if get_request(state, r).prefill == i:
        prompt.held_prefill = count
    else:
        prompt.held_decode = count
